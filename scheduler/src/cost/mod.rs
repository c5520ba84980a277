//! How long a step takes: the cost model, its fit to measured steps, and its correction at run
//! time.

mod correction;
mod fit;
mod model;

pub(crate) use correction::Correction;
pub use model::{CostModel, Nanos, StepShape};
