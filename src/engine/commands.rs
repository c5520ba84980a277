//! The two queues into the engine thread.
//!
//! The submit queue is bounded. The control queue holds everything that must not wait behind
//! submissions. Its type is unbounded, but it holds at most one `End` or one `ChargeFailed` for
//! each request, and the operator's messages.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossbeam::channel::{Receiver, Select, Sender, bounded, unbounded};
use sterna_scheduler::{FinishReason, Rates, Refusal, TenantId, TenantPolicy, TenantsError};
use tokio::sync::oneshot;

use super::egress::EventSender;
use super::request::GenerationRequest;
use super::status::SharedState;

/// The number of a request, never reused. A client may leave before the request has a `SequenceId`,
/// so its stream names it by this ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ticket(pub(super) u64);

/// State of a request that its stream and the engine thread share.
#[derive(Default)]
pub(super) struct SharedRequest {
    /// Set by the stream, once, if it ends the request.
    pub(super) ending: OnceLock<FinishReason>,
    /// Set by the engine thread at the first admission, before the first token.
    pub(super) cached_tokens: OnceLock<u32>,
    /// The tenant's rates. Set by the engine thread before it sends `Accepted` or `Refused`.
    pub(super) rates: OnceLock<Rates>,
}

/// A request on its way to the engine thread.
pub(super) struct Submission {
    pub(super) ticket: Ticket,
    pub(super) request: GenerationRequest,
    pub(super) events: EventSender,
    pub(super) shared: Arc<SharedRequest>,
}

/// A message on the control queue.
pub(super) enum Control {
    /// The request's stream has set its `ending`.
    End(Ticket),
    Drain,
    SetTenants {
        tenants: Vec<(TenantId, TenantPolicy)>,
        done: oneshot::Sender<Result<(), TenantsError>>,
    },
    /// A request of this tenant has failed before its submission.
    ChargeFailed {
        tenant: TenantId,
        done: oneshot::Sender<FailedCharge>,
    },
    ResetPrefixCache,
}

/// The answer to `Control::ChargeFailed`.
pub(super) struct FailedCharge {
    pub(super) charged: Result<(), Refusal>,
    pub(super) rates: Rates,
}

/// Returns both ends of the queues. The submit queue holds at most `capacity` submissions.
pub(super) fn command_queues(
    capacity: usize,
    shared: Arc<SharedState>,
) -> (CommandSender, CommandReceiver) {
    let (submissions, submission_receiver) = bounded(capacity);
    let (control, control_receiver) = unbounded();
    let sender = CommandSender {
        submissions,
        control,
    };
    let receiver = CommandReceiver {
        submissions: submission_receiver,
        control: control_receiver,
        shared,
    };
    (sender, receiver)
}

/// The other end of both queues, which every handle and every stream holds. It has both senders
/// even where only one is used: a queue that lost its last sender earlier than the other one would
/// keep `CommandReceiver::wait` from blocking.
#[derive(Clone)]
pub(super) struct CommandSender {
    pub(super) submissions: Sender<Submission>,
    pub(super) control: Sender<Control>,
}

/// The engine thread's end of both queues.
pub(super) struct CommandReceiver {
    pub(super) submissions: Receiver<Submission>,
    pub(super) control: Receiver<Control>,
    pub(super) shared: Arc<SharedState>,
}

impl CommandReceiver {
    /// Takes the next submission, and frees its place in the tenant's quota.
    pub(super) fn take(&self) -> Option<Submission> {
        let submission = self.submissions.try_recv().ok()?;
        self.shared.lane_quota.leave(submission.request.tenant);
        Some(submission)
    }

    /// Returns whether both queues are empty.
    pub(super) fn is_empty(&self) -> bool {
        self.submissions.is_empty() && self.control.is_empty()
    }

    /// Blocks until a queue has a message, the last [`CommandSender`] is dropped, or `limit` has
    /// passed.
    pub(super) fn wait(&self, limit: Option<Duration>) {
        let mut queues = Select::new();
        queues.recv(&self.submissions);
        queues.recv(&self.control);
        match limit {
            // The caller looks at the queues again, so it need not know which of them is ready.
            Some(limit) => drop(queues.ready_timeout(limit)),
            None => drop(queues.ready()),
        }
    }
}

impl Drop for CommandReceiver {
    /// Runs when the engine thread ends, also by a panic. Drops the submissions left in the queue,
    /// so that their streams end now.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared.died.store(true, Ordering::SeqCst);
        }
        self.shared.ended.store(true, Ordering::SeqCst);
        while self.take().is_some() {}
    }
}
