//! The two queues into the engine thread.
//!
//! The submit queue is bounded; a bell tells the engine thread of new submissions. The control
//! queue holds everything that must not wait behind submissions. Its type is unbounded, but it
//! holds at most one `End` or `ChargeRequest` and one `ChargeTime` for each request, one
//! `ChargeTime` for each millisecond that grammars have taken, and the operator's messages.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use sterna_scheduler::{CacheChange, Rates, Refusal, TenantId, TenantPolicy, TenantsError};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use super::status::SharedState;
use super::submission::{Submission, Ticket};
use super::sync::Ordering;
use super::sync::channel::{Receiver, Select, Sender, bounded, unbounded};

/// A message on the control queue.
pub(super) enum Control {
    /// The request's stream has set its `ending`.
    End(Ticket),
    Drain,
    SetTenants {
        tenants: Vec<(TenantId, TenantPolicy)>,
        done: oneshot::Sender<Result<(), TenantsError>>,
    },
    /// A request of this tenant is never submitted.
    ChargeRequest {
        tenant: TenantId,
        done: oneshot::Sender<RequestCharge>,
    },
    /// Reading the requests of this tenant, or its grammars, took this time.
    ChargeTime {
        tenant: TenantId,
        time: Duration,
    },
    ResetPrefixCache {
        done: oneshot::Sender<usize>, // The number of freed pages.
    },
    /// From now on, send what the prefix cache gains and loses.
    WatchCache {
        changes: UnboundedSender<Vec<CacheChange>>,
    },
}

/// The answer to `Control::ChargeRequest`.
pub(super) struct RequestCharge {
    pub(super) charged: Result<(), Refusal>,
    pub(super) rates: Rates,
}

/// Returns both ends of the bell and of the control queue. `shared` has the submit queue.
pub(super) fn command_queues(shared: Arc<SharedState>) -> (CommandSender, CommandReceiver) {
    let (bell, bell_receiver) = bounded(1); // A bell that rings already need not ring twice.
    let (control, control_receiver) = unbounded();
    let sender = CommandSender { bell, control };
    let receiver = CommandReceiver {
        bell: bell_receiver,
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
    /// Dropped first: the engine thread ends when it has lost its last sender. If the bell lost its
    /// own earlier, an idle engine thread would spin until then.
    pub(super) control: Sender<Control>,
    pub(super) bell: Sender<()>, // Rings after a submission has entered the queue.
}

/// The engine thread's end of both queues.
pub(super) struct CommandReceiver {
    pub(super) bell: Receiver<()>,
    pub(super) control: Receiver<Control>,
    pub(super) shared: Arc<SharedState>,
}

impl CommandReceiver {
    /// Takes the submissions that are in the queue now.
    pub(super) fn take_submissions(&self) -> VecDeque<Submission> {
        // A later submission rings again, so the queue needs no look while the bell is silent.
        match self.bell.try_recv() {
            Ok(()) => self.shared.submissions.take_all(),
            Err(_) => VecDeque::new(),
        }
    }

    /// Returns whether [`wait`](Self::wait) would not block: a queue has a message, or the last
    /// [`CommandSender`] is dropped.
    pub(super) fn is_ready(&self) -> bool {
        self.queues().try_ready().is_ok()
    }

    /// Blocks until a queue has a message, the last [`CommandSender`] is dropped, or `limit` has
    /// passed.
    pub(super) fn wait(&self, limit: Option<Duration>) {
        let mut queues = self.queues();
        match limit {
            // The caller looks at the queues again, so it need not know which of them is ready.
            Some(limit) => drop(queues.ready_timeout(limit)),
            None => drop(queues.ready()),
        }
    }

    fn queues(&self) -> Select<'_> {
        let mut queues = Select::new();
        queues.recv(&self.bell);
        queues.recv(&self.control);
        queues
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
        drop(self.shared.submissions.take_all());
    }
}
