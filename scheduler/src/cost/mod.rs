//! How long a step takes: the cost model, its fit to measured steps, and what the steps since
//! teach.

mod decode_speeds;
mod fit;
mod learner;
mod model;
mod predictor;
mod terms;

pub(crate) use decode_speeds::{DecodeSpeeds, Drafting};
pub use model::{CostModel, Nanos, SAMPLING_UNIT, StepShape};
pub(crate) use predictor::Predictor;
