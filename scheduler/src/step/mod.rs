//! One step: its plan, and what its commit changes.

mod commit;
mod decodes;
mod draft;
mod plan;
mod planner;
mod preempt;
mod prefills;
mod speculate;

pub(crate) use planner::Planner;
