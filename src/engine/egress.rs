//! Sends the output of each turn to the requests' streams, and records latencies.
//!
//! It runs on its own thread, which receives one message for each turn of the engine thread. So
//! neither metrics nor the wake-ups of readers delay the engine thread.
//!
//! Invariant: nothing here waits for a reader. A stream holds at most `max_new_tokens` tokens, the
//! scores of the prompt if they are wanted, and two more events.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_scheduler::{
    CostModel, FinishReason, Micros, Refusal, SequenceId, Snapshot, TenantId, TenantState,
};

use super::load::TokenRate;
use super::request::{StreamEvent, SubmitError};
use super::sampling_params::{ScoredToken, TokenOutput};
use super::status::SharedState;
use super::submission::{EventSender, RequestMoments};
use super::sync::mpsc;
use super::sync::thread::{self, JoinHandle};
use crate::metrics::{Metrics, StepTimes, Timeline};
use crate::model::ExpertUse;

/// How often recorded samples are folded into histograms.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// The output of one turn of the engine thread.
pub(super) struct StepOutput {
    /// When the turn began. Admissions count from here.
    pub(super) began: Instant,
    /// When the tokens were drawn, or when the turn began if no step ran.
    pub(super) drawn: Instant,
    /// The durations of the step, if one ran.
    pub(super) times: Option<StepTimes>,
    pub(super) snapshot: Snapshot,
    pub(super) experts: ExpertUse,
    /// The tenants whose gauges are due.
    pub(super) tenants: Vec<(TenantId, TenantState)>,
    /// The cost of a step, if it was measured again.
    pub(super) recalibrated: Option<CostModel>,
    pub(super) updates: Vec<RequestUpdate>,
}

/// An event of one request.
pub(super) enum RequestUpdate {
    Accepted {
        id: SequenceId,
        events: EventSender,
        moments: Arc<RequestMoments>,
        timeline: Timeline,
    },
    Refused {
        events: Vec<EventSender>, // Of all choices.
        tenant: TenantId,
        error: SubmitError,
    },
    /// The request left the full queue before it ran.
    Displaced {
        id: SequenceId,
        tenant: TenantId,
        retry_after: Micros,
    },
    Token {
        id: SequenceId,
        output: TokenOutput,
    },
    /// A token of the prompt, in their order.
    Scored {
        id: SequenceId,
        score: ScoredToken,
    },
    /// The embedding of the prompt is complete.
    Embedded {
        id: SequenceId,
        embedding: Vec<f32>,
    },
    /// The scheduler admitted the request for the first time.
    Admitted {
        id: SequenceId,
    },
    /// The scheduler ended the request.
    Ended(EndedSequence),
}

/// How a request ended, and its size.
pub(super) struct EndedSequence {
    pub(super) id: SequenceId,
    pub(super) reason: FinishReason,
    /// Why no token could follow in an output that follows a grammar.
    pub(super) dead_end: Option<String>,
    pub(super) prompt_tokens: u32,
    pub(super) cached_tokens: u32,
    pub(super) output_tokens: u32,
}

/// Starts the thread. When the sender is dropped, it closes all streams and ends.
pub(super) fn start(
    metrics: Metrics,
    shared: Arc<SharedState>,
) -> std::io::Result<(mpsc::Sender<StepOutput>, JoinHandle<()>)> {
    let (sender, outputs) = mpsc::channel();
    let mut egress = Egress {
        metrics,
        shared,
        routes: HashMap::new(),
    };
    let thread = thread::Builder::new()
        .name("sterna-egress".into())
        .spawn(move || egress.run(&outputs))?;
    Ok((sender, thread))
}

/// Where a request's events go, and its moments so far.
struct Route {
    events: EventSender,
    moments: Arc<RequestMoments>,
    timeline: Timeline,
}

struct Egress {
    metrics: Metrics,
    shared: Arc<SharedState>,
    routes: HashMap<SequenceId, Route>,
}

impl Egress {
    fn run(&mut self, outputs: &mpsc::Receiver<StepOutput>) {
        let mut last_upkeep = Instant::now();
        let mut rate = TokenRate::new(last_upkeep);
        for output in outputs {
            // Gauges before events: a client that has read its last event finds them up to date.
            self.metrics.snapshot(&output.snapshot);
            let ExpertUse {
                rows,
                hits,
                candidates,
                rows_at_largest_load,
            } = output.experts;
            (self.metrics).experts(rows, hits, candidates, rows_at_largest_load);
            for (id, state) in &output.tenants {
                self.metrics.tenant(*id, *state);
            }
            if let Some(cost) = &output.recalibrated {
                self.metrics.calibrated(cost);
            }
            if let Some(times) = &output.times {
                self.metrics.step(times);
            }
            let is_token = |update: &&RequestUpdate| matches!(update, RequestUpdate::Token { .. });
            let tokens = output.updates.iter().filter(is_token).count();
            let shared = &self.shared;
            rate.add(tokens, output.drawn, &shared.load, shared.clock);
            for update in output.updates {
                self.route(update, output.began, output.drawn);
            }
            if last_upkeep.elapsed() > UPKEEP_INTERVAL {
                self.metrics.run_upkeep();
                last_upkeep = Instant::now();
            }
        }
        self.metrics.ended();
    }

    fn route(&mut self, update: RequestUpdate, began: Instant, drawn: Instant) {
        match update {
            RequestUpdate::Accepted {
                id,
                events,
                moments,
                timeline,
            } => {
                send(&events, StreamEvent::Accepted);
                let route = Route {
                    events,
                    moments,
                    timeline,
                };
                self.routes.insert(id, route);
            }
            RequestUpdate::Refused {
                events,
                tenant,
                error,
            } => {
                self.metrics.rejected(tenant, error.label());
                for events in events {
                    send(&events, StreamEvent::Refused(error.clone()));
                }
            }
            RequestUpdate::Displaced {
                id,
                tenant,
                retry_after,
            } => {
                let route = self.routes.remove(&id).expect("accepted, and ends once");
                let error = SubmitError::from(Refusal::Overloaded { retry_after });
                self.metrics.rejected(tenant, error.label());
                send(&route.events, StreamEvent::Refused(error));
            }
            RequestUpdate::Token { id, output } => {
                let route = self.routes.get_mut(&id).expect("accepted before it runs");
                self.metrics.token(&mut route.timeline, drawn);
                route.moments.first_token.get_or_init(|| drawn);
                send(&route.events, StreamEvent::Token(output));
            }
            RequestUpdate::Scored { id, score } => {
                let route = self.routes.get(&id).expect("accepted before it runs");
                send(&route.events, StreamEvent::Scored(score));
            }
            RequestUpdate::Embedded { id, embedding } => {
                let route = self.routes.get_mut(&id).expect("accepted before it runs");
                self.metrics.embedded(&mut route.timeline, drawn);
                route.moments.first_token.get_or_init(|| drawn);
                send(&route.events, StreamEvent::Embedding(embedding));
            }
            RequestUpdate::Admitted { id } => {
                let route = self.routes.get_mut(&id).expect("accepted before admitted");
                self.metrics.admitted(&mut route.timeline, began);
                route.moments.admitted.get_or_init(|| began);
            }
            RequestUpdate::Ended(ended) => self.end(ended, drawn),
        }
    }

    fn end(&mut self, ended: EndedSequence, drawn: Instant) {
        let route = (self.routes.remove(&ended.id)).expect("accepted, and ends once");
        if matches!(ended.reason, FinishReason::Stop | FinishReason::Length) {
            route.moments.ended.get_or_init(|| drawn);
        }
        self.metrics
            .finished(&route.timeline, ended.reason, ended.cached_tokens, drawn);
        if let Some(service) = route.timeline.service_time(drawn) {
            self.shared.load.served(service);
        }
        let last = match ended.reason {
            FinishReason::Error if let Some(why) = ended.dead_end => StreamEvent::DeadEnd(why),
            FinishReason::Error => {
                StreamEvent::Failed("the model could not compute the next token".into())
            }
            reason => StreamEvent::Finished {
                reason,
                prompt_tokens: ended.prompt_tokens,
                cached_tokens: ended.cached_tokens,
                completion_tokens: ended.output_tokens,
            },
        };
        send(&route.events, last);
    }
}

fn send(events: &EventSender, event: StreamEvent) {
    // A client that has left has cancelled its request, so its events may be lost.
    let _ = events.send(event);
}
