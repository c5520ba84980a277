//! One step: its plan, the batch that the model computes, and what its commit changes.

mod acceptance;
mod batch;
mod commit;
mod decodes;
mod draft;
mod plan;
mod preempt;
mod prefills;
mod speculate;

pub(crate) use acceptance::Acceptance;
pub use batch::{Batch, PageCopy, Row, Sampled};
pub use draft::MAX_DRAFTED_TOKENS;
pub(crate) use plan::Share;
pub use plan::{Plan, Step};
#[cfg(debug_assertions)]
pub(crate) use preempt::MOST_PREEMPTIONS;
pub(crate) use prefills::{PREFILL_FLOOR, PrefillRank};
