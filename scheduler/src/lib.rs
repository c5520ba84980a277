//! Decides the next step of a continuous batch from the time and the requests.
//!
//! ```text
//! submit ──► queue ──► plan(now) ──► Step ──► (the caller computes it) ──► commit ──► events
//! ```
//!
//! A [`Step`] borrows the scheduler, so the compiler proves that no request is submitted, cancelled
//! or freed while the caller computes the step. Planning moves pages: it may admit, evict and
//! preempt. Only committing changes what counts as computed, so a dropped step needs no undo.
//!
//! `Scheduler::check` asserts the invariants.
//!
//! Invariant: every page is free, private to one sequence, or in the prefix tree. A step writes
//! private pages only.
//!
//! Invariant: sequences share only full and computed pages. A lookup finds a page only by equal
//! tokens after an equal prefix, of the same tenant or of a public prefix.
//!
//! Invariant: an accepted request fits in KV memory when no other request runs. The first running
//! sequence by band and arrival is preempted only for a tenant that uses less than its guaranteed
//! pages, and such a tenant loses no page to others. So every request ends.
//!
//! Invariant: equal calls give equal plans. The caller reports the time; the scheduler does no I/O,
//! starts no thread and has no locks. One thread owns a `Scheduler`.

#![forbid(unsafe_code)]

mod admission;
mod batch;
mod conditions;
mod cost;
mod event_log;
mod ids;
mod ledger;
mod limits;
mod meter;
mod pages;
mod policy;
mod queue;
mod request;
mod scheduler;
mod sequence;
mod slabs;
mod state;
mod step;
mod tenant;

pub use batch::{Batch, PageCopy, Row, Sampled};
pub use cost::{CostModel, Nanos, SAMPLING_UNIT, StepShape};
pub use ids::{Micros, SequenceId, SubTenant, TenantId, TokenId};
pub use ledger::{Ledger, NoRoom, Share, quarter};
pub use limits::{Limits, MAX_DRAFTED_TOKENS};
pub use meter::Meter;
pub use pages::{CacheChange, PAGE_TOKENS, Page, StoredPage};
pub use policy::{
    Budget, Diffusion, Growth, INTER_TOKEN_TARGET, MAX_THROUGHPUT_LOSS, Order, OwnDrafts, Policy,
};
pub use request::{Event, FinishReason, MAX_DRAW_TIME, Refusal, Request, Snapshot};
pub use scheduler::{Plan, Scheduler, Step};
pub use sequence::OutputRules;
pub use slabs::{KeptState, RowStates, SlabCounts, StateLimits, StateSlab};
pub use tenant::{
    Band, PublicPrefix, Rate, RateKind, RateState, Rates, TenantPolicy, TenantState, TenantsError,
};
