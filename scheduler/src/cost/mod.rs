//! How long a step takes: the cost model, its fit to measured steps, and its correction at run
//! time.

mod correction;
mod fit;
mod model;
mod predictor;

pub use model::{CostModel, Nanos, StepShape};
pub(crate) use predictor::Predictor;
