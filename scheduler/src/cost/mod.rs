//! How long a step takes: the cost model, its fit to measured steps, and what the steps since
//! teach.

mod fit;
mod learner;
mod model;
mod predictor;
mod terms;

pub use model::{CostModel, Nanos, SAMPLING_UNIT, StepShape};
pub(crate) use predictor::Predictor;
