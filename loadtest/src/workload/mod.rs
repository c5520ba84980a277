//! Workloads: which requests come, from which tenant and when.
//!
//! `simulate` runs a workload in virtual time; `drive` sends it to a server over HTTP.
//!
//! Invariant: session `i` of a class is a function of the seed, whatever ran before it.
//!
//! Only the start of a later turn depends on the server: the turn starts one think time after the
//! previous answer ended.

mod definition;
mod distributions;
mod named;
mod recorded;
mod session;
mod trace;

pub(crate) use definition::{
    Arrivals, CONTEXT, Disconnects, SessionClass, SharedPrefix, TenantRange, Workload,
};
pub(crate) use distributions::{Count, stream};
pub(crate) use named::{all, named, names};
pub(crate) use recorded::RecordedTrace;
#[cfg(test)]
pub(crate) use session::token;
pub(crate) use session::{ChatTurn, STOP, SeededText, Session};
pub(crate) use trace::Trace;
