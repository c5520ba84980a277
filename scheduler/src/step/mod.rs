//! One step: its plan, the batch that the model computes, and what its commit changes.

mod acceptance;
mod batch;
mod commit;
mod decodes;
mod draft;
mod plan;
mod planner;
mod preempt;
mod prefills;
mod speculate;

pub(crate) use acceptance::Acceptance;
pub use batch::{Batch, PageCopy, Row, Sampled};
pub use draft::MAX_DRAFTED_TOKENS;
pub(crate) use planner::Planner;
pub(crate) use prefills::PREFILL_FLOOR;
