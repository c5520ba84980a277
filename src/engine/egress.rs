//! The way out: what a step produced goes to each request's stream, and its latencies are recorded as they happen.
//!
//! A thread of its own, fed by one message a step, so that neither metrics nor wake-ups of readers cost the engine thread time.
//! Invariant: nothing here blocks on a reader. A request's stream holds at most its `max_new_tokens` tokens and two events more.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_scheduler::{FinishReason, SequenceId, Snapshot, TenantId, TenantState};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::status::Shared;
use super::{StreamEvent, SubmitError, TokenOutput};
use crate::metrics::{Ending, Metrics, Occupancy, TenantLoad, Timeline};

pub(super) use crate::metrics::StepTimes;

pub(super) type EventSender = UnboundedSender<StreamEvent>;
pub(super) type EventReceiver = UnboundedReceiver<StreamEvent>;

/// How often recorded samples are folded into histograms.
const UPKEEP: Duration = Duration::from_secs(5);

/// The channel of one request. Unbounded in type only: `max_new_tokens` bounds what is ever sent.
pub(super) fn event_lane() -> (EventSender, EventReceiver) {
    unbounded_channel()
}

/// What one turn of the engine tells the world.
pub(super) struct Turn {
    /// When the turn was planned, and so who was admitted in it.
    pub(super) planned: Instant,
    /// When it was committed, and so its tokens drawn.
    pub(super) committed: Instant,
    pub(super) step: Option<StepTimes>,
    pub(super) snapshot: Snapshot,
    /// Of some tenants, now and then.
    pub(super) tenants: Vec<(TenantId, TenantState)>,
    pub(super) notices: Vec<Notice>,
}

/// One thing that happened to one request.
pub(super) enum Notice {
    Accepted {
        id: SequenceId,
        events: EventSender,
        timeline: Timeline,
    },
    Refused {
        events: EventSender,
        tenant: TenantId,
        error: SubmitError,
    },
    Admitted {
        id: SequenceId,
    },
    Token {
        id: SequenceId,
        output: TokenOutput,
    },
    Finished {
        id: SequenceId,
        reason: FinishReason,
        prompt_tokens: u32,
        cached_tokens: u32,
        output_tokens: u32,
    },
}

/// Starts the thread; it ends, and every open stream with it, when the sender is dropped.
pub(super) fn start(
    metrics: Metrics,
    shared: Arc<Shared>,
) -> std::io::Result<(mpsc::Sender<Turn>, JoinHandle<()>)> {
    let (sender, turns) = mpsc::channel();
    let mut egress = Egress {
        metrics,
        shared,
        routes: HashMap::new(),
    };
    let thread = std::thread::Builder::new()
        .name("sterna-egress".into())
        .spawn(move || egress.run(&turns))?;
    Ok((sender, thread))
}

struct Route {
    events: EventSender,
    timeline: Timeline,
}

struct Egress {
    metrics: Metrics,
    shared: Arc<Shared>,
    routes: HashMap<SequenceId, Route>,
}

impl Egress {
    fn run(&mut self, turns: &mpsc::Receiver<Turn>) {
        let mut last_upkeep = Instant::now();
        for turn in turns {
            // The gauges first: a client that has read its last event finds them true.
            self.metrics.occupancy(&occupancy(&turn.snapshot));
            for (id, state) in &turn.tenants {
                self.metrics.tenant(id.0, tenant_load(state));
            }
            if let Some(step) = &turn.step {
                let whole = turn.committed.saturating_duration_since(turn.planned);
                self.metrics.step(whole, step);
            }
            for notice in turn.notices {
                self.route(notice, turn.planned, turn.committed);
            }
            if last_upkeep.elapsed() > UPKEEP {
                self.metrics.run_upkeep();
                last_upkeep = Instant::now();
            }
        }
        self.metrics.ended();
    }

    fn route(&mut self, notice: Notice, planned: Instant, committed: Instant) {
        match notice {
            Notice::Accepted {
                id,
                events,
                timeline,
            } => {
                send(&events, StreamEvent::Accepted);
                self.routes.insert(id, Route { events, timeline });
            }
            Notice::Refused {
                events,
                tenant,
                error,
            } => {
                self.metrics.rejected(tenant.0, error.label());
                send(&events, StreamEvent::Refused(error));
            }
            Notice::Admitted { id } => {
                let route = self
                    .routes
                    .get_mut(&id)
                    .expect("admitted after it was accepted");
                self.metrics.admitted(&mut route.timeline, planned);
            }
            Notice::Token { id, output } => {
                let route = self
                    .routes
                    .get_mut(&id)
                    .expect("runs after it was accepted");
                self.metrics.token(&mut route.timeline, committed);
                send(&route.events, StreamEvent::Token(output));
            }
            Notice::Finished {
                id,
                reason,
                prompt_tokens,
                cached_tokens,
                output_tokens,
            } => {
                let route = self.end(id, reason, cached_tokens, committed);
                let last = match reason {
                    FinishReason::Error => {
                        StreamEvent::Failed("the model could not compute the next token".into())
                    }
                    _ => StreamEvent::Finished {
                        reason,
                        prompt_tokens,
                        cached_tokens,
                        completion_tokens: output_tokens,
                    },
                };
                send(&route.events, last);
            }
        }
    }

    fn end(
        &mut self,
        id: SequenceId,
        reason: FinishReason,
        cached_tokens: u32,
        at: Instant,
    ) -> Route {
        let route = self
            .routes
            .remove(&id)
            .expect("ends once, after it was accepted");
        self.metrics
            .finished(&route.timeline, ending(reason), cached_tokens, at);
        if let Some(service) = route.timeline.service_time(at) {
            self.shared.served(service);
        }
        route
    }
}

fn send(events: &EventSender, event: StreamEvent) {
    // A client that has left has sent its cancel; what still comes for it is nobody's.
    let _ = events.send(event);
}

fn ending(reason: FinishReason) -> Ending {
    match reason {
        FinishReason::Stop => Ending::Stop,
        FinishReason::Length => Ending::Length,
        FinishReason::Cancelled | FinishReason::Shutdown => Ending::Abort,
        FinishReason::Error | FinishReason::Deadline => Ending::Error,
    }
}

fn occupancy(snapshot: &Snapshot) -> Occupancy {
    Occupancy {
        running: snapshot.running,
        waiting: snapshot.queued,
        pages_free: snapshot.free,
        pages_private: snapshot.private,
        pages_tree_pinned: snapshot.pinned,
        pages_tree_cached: snapshot.tree - snapshot.pinned,
        prefix_queries: snapshot.prefix_queries,
        prefix_hits: snapshot.prefix_hits,
        preemptions: snapshot.preemptions,
        evictions: snapshot.evictions,
        drafted: snapshot.drafted,
        accepted: snapshot.accepted,
        page_copies: snapshot.copies,
        queued: Duration::from_micros(snapshot.queued_time),
    }
}

fn tenant_load(state: &TenantState) -> TenantLoad {
    TenantLoad {
        running: state.running,
        waiting: state.queued,
        pages: state.pages,
        service: Duration::from_micros(state.service),
    }
}
