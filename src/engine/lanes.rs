//! The two lanes into the engine thread: a bounded one for requests, and one for everything that must never queue behind them.
//!
//! The second is unbounded in type only: it holds at most one `End` for each request, and what the operator asks.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossbeam::channel::{Receiver, Select};
use sterna_scheduler::{FinishReason, Rates, TenantId, TenantPolicy, TenantsError};
use tokio::sync::oneshot;

use super::GenerationRequest;
use super::egress;
use super::status::Shared;

/// A request's number, never reused. (The scheduler's `SequenceId` is not known yet when a client may already have left.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ticket(pub(super) u64);

/// What both ends of a request know without a message.
#[derive(Default)]
pub(super) struct Common {
    /// Set by the stream, once, if its side ends the request.
    pub(super) ending: OnceLock<FinishReason>,
    /// Set by the engine thread when the request is first admitted, before any of its tokens leaves.
    pub(super) cached_tokens: OnceLock<u32>,
    /// Where the tenant's rates stand. Set by the engine thread when it has taken or refused the request, before it says so.
    pub(super) rates: OnceLock<Rates>,
}

/// A request on its way to the engine thread.
pub(super) struct Submission {
    pub(super) ticket: Ticket,
    pub(super) request: GenerationRequest,
    pub(super) events: egress::EventSender,
    pub(super) common: Arc<Common>,
}

pub(super) enum Control {
    /// The request's stream has set its `ending`.
    End(Ticket),
    Drain,
    SetTenants {
        tenants: Vec<(TenantId, TenantPolicy)>,
        done: oneshot::Sender<Result<(), TenantsError>>,
    },
    ResetPrefixCache,
}

/// The engine thread's end of the two lanes.
pub(super) struct Lanes {
    pub(super) submissions: Receiver<Submission>,
    pub(super) control: Receiver<Control>,
    pub(super) shared: Arc<Shared>,
}

impl Lanes {
    /// The next submission, if one lies in the lane; its tenant has room for another.
    pub(super) fn take(&self) -> Option<Submission> {
        let submission = self.submissions.try_recv().ok()?;
        self.shared.lane_quota.leave(submission.request.tenant);
        Some(submission)
    }

    /// Blocks until something lies in a lane, every sender is gone, or `limit` has passed.
    pub(super) fn wait(&self, limit: Option<Duration>) {
        let mut lanes = Select::new();
        lanes.recv(&self.submissions);
        lanes.recv(&self.control);
        match limit {
            // Passing the limit is as good an answer as a message: the caller looks again.
            Some(limit) => drop(lanes.ready_timeout(limit)),
            None => drop(lanes.ready()),
        }
    }
}

impl Drop for Lanes {
    /// Runs when the engine thread ends, also by a panic. Drops the submissions left in the lane,
    /// so that their streams end now.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared.died.store(true, Ordering::SeqCst);
        }
        self.shared.ended.store(true, Ordering::SeqCst);
        while self.take().is_some() {}
    }
}
