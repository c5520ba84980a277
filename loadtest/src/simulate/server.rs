//! One server of the simulation: the product's scheduler, a simulated machine, and its requests.
//!
//! Invariant: the scheduler is the product's. Only the clock, the clients and the model's answers
//! are simulated.
//!
//! As in the server, the scheduler learns at the end of a step what happened during the step.
//! Latencies count from the moment when it happened.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Instant;

use sterna_scheduler::{
    Batch, CacheChange, Event, FinishReason, Limits, Micros, Plan, Policy, Refusal, Request, Row,
    Sampled, Scheduler, SequenceId, TenantId, TenantPolicy,
};

use super::machine::{RowCosts, SimulatedMachine, batch_shape, row_shape};
use super::policies::PolicyPreset;
use super::record::{SimulatedRequest, SimulationRecorder, TurnKey};
use crate::workload::{ChatTurn, STOP, Session, Workload};

/// What all servers of a simulation have in common.
pub(super) struct ServerSettings {
    limits: Limits,
    policy: Policy,
    knows_tenants: bool,
    tenants: Vec<(TenantId, TenantPolicy)>,
    deadlines: Vec<Option<Micros>>, // The first token's deadline, by class.
    publishes: bool,                // Whether the server tells what its prefix cache holds.
}

/// A server and its requests.
pub(super) struct SimulatedServer {
    scheduler: Scheduler,
    machine: SimulatedMachine,
    inbox: BinaryHeap<Reverse<(Micros, InboxEvent)>>,
    requests: HashMap<SequenceId, SimulatedRequest>,
    work: ServerWork,
}

/// What a server has done.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ServerWork {
    /// The steps so far.
    pub(super) steps: u64,
    /// The tokens of all rows.
    pub(super) tokens: u64,
    /// Machine time of all steps.
    pub(super) busy_nanos: u64,
    /// Evictions of the schedulers before the last failure.
    evictions: u64,
}

/// An event that the scheduler does not know of yet. Events of the same time happen in the order of
/// this type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum InboxEvent {
    Arrival { number: u64, turn: TurnKey },
    Disconnect { number: u64, id: SequenceId },
}

/// A request that has left the server.
pub(super) enum Departure {
    /// The scheduler refused it.
    Refused(TurnKey, Refusal),
    /// It left the full queue for one of another tenant.
    Displaced(SimulatedRequest, Micros),
    /// It has ended.
    Finished(SimulatedRequest, FinishReason),
}

/// The requests of a server that has failed.
#[derive(Default)]
pub(super) struct LostRequests {
    /// Requests without a token of their answer, each with the time of its arrival.
    pub(super) unanswered: Vec<(Micros, TurnKey)>,
    /// Requests whose answer had begun.
    pub(super) broken: Vec<SimulatedRequest>,
}

impl ServerSettings {
    /// Returns the settings of servers for this workload.
    pub(super) fn new(workload: &Workload, preset: PolicyPreset) -> ServerSettings {
        let tenant = |tenant| {
            let policy = TenantPolicy {
                weight: workload.weight(tenant),
                ..TenantPolicy::default()
            };
            (TenantId(tenant), policy)
        };
        let deadline = |within: f64| (within * 1e6) as Micros;
        let classes = workload.classes.iter();
        ServerSettings {
            limits: preset.limits,
            policy: preset.policy,
            knows_tenants: preset.knows_tenants,
            tenants: (0..workload.tenants()).map(tenant).collect(),
            deadlines: classes
                .map(|class| class.first_token_within.map(deadline))
                .collect(),
            publishes: false,
        }
    }

    /// Says whether servers tell what their prefix cache holds.
    pub(super) fn publish(mut self, publishes: bool) -> ServerSettings {
        self.publishes = publishes;
        self
    }

    fn scheduler(&self, machine: &mut SimulatedMachine) -> Scheduler {
        let mut scheduler = Scheduler::new(self.limits.clone(), self.policy.clone());
        scheduler.calibrate(machine.calibrated());
        let set = scheduler.set_tenants(&self.tenants);
        set.expect("weights are positive and no pages are guaranteed");
        if self.publishes {
            scheduler.watch_cache();
        }
        scheduler
    }
}

impl SimulatedServer {
    /// Starts a server with an empty cache.
    pub(super) fn new(settings: &ServerSettings, mut machine: SimulatedMachine) -> SimulatedServer {
        SimulatedServer {
            scheduler: settings.scheduler(&mut machine),
            machine,
            inbox: BinaryHeap::new(),
            requests: HashMap::new(),
            work: ServerWork::default(),
        }
    }

    /// Returns what the server has done.
    pub(super) fn work(&self) -> ServerWork {
        self.work
    }

    /// Returns the pages that the server has evicted from its cache.
    pub(super) fn evictions(&self) -> u64 {
        self.work.evictions + self.scheduler.snapshot().evictions
    }

    /// Returns whether the server has no request that has not ended.
    pub(super) fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Adds a turn that arrived at `at`. The scheduler learns of it at the next
    /// [`SimulatedServer::deliver`].
    pub(super) fn arrive(&mut self, at: Micros, number: u64, turn: TurnKey) {
        let arrival = InboxEvent::Arrival { number, turn };
        self.inbox.push(Reverse((at, arrival)));
    }

    /// Returns when the next event comes that the scheduler does not know of yet.
    pub(super) fn next_event(&self) -> Option<Micros> {
        self.inbox.peek().map(|Reverse((at, _))| *at)
    }

    /// Tells the scheduler what has happened until `now`. Returns the requests that it refused.
    /// `numbers` gives numbers to later events.
    pub(super) fn deliver(
        &mut self,
        now: Micros,
        settings: &ServerSettings,
        sessions: &HashMap<u64, Session>,
        numbers: &mut impl FnMut() -> u64,
        recorder: &mut SimulationRecorder,
    ) -> Vec<Departure> {
        let mut refused = Vec::new();
        while let Some(Reverse((at, event))) = self.inbox.peek().copied() {
            if at > now {
                break;
            }
            self.inbox.pop();
            match event {
                InboxEvent::Arrival { turn: key, .. } => {
                    let session = &sessions[&key.session];
                    let request = request(settings, session, key, now - at);
                    recorder.advance_to(now);
                    match self.scheduler.submit(now, request) {
                        Ok(id) => {
                            let mut request = SimulatedRequest::new(session, key, at);
                            recorder.submitted(&mut request, session, self.work.steps);
                            let disconnects_after = request.turn.disconnects_after;
                            self.requests.insert(id, request);
                            if let Some(after) = disconnects_after {
                                let number = numbers();
                                let disconnect = InboxEvent::Disconnect { number, id };
                                let at = at + (after * 1e6) as Micros;
                                self.inbox.push(Reverse((at, disconnect)));
                            }
                        }
                        Err(refusal) => refused.push(Departure::Refused(key, refusal)),
                    }
                }
                InboxEvent::Disconnect { id, .. } => {
                    self.scheduler.cancel(id, FinishReason::Cancelled);
                }
            }
        }
        refused
    }

    /// Runs one step that begins at `now`. Returns its end, or `None` if the scheduler is idle.
    pub(super) fn step(
        &mut self,
        now: Micros,
        recorder: &mut SimulationRecorder,
    ) -> Option<Micros> {
        let start = Instant::now();
        let Plan::Step(step) = self.scheduler.plan(now) else {
            return None;
        };
        let planning = start.elapsed();
        let batch = step.batch();
        let shape = batch_shape(batch, |row| step.prompt_len(row.sequence));
        let nanos = self.machine.run(shape, now);
        let end = now + nanos.div_ceil(1000);
        let costs = RowCosts::new(self.machine.cost(), shape);
        self.work.steps += 1;
        self.work.tokens += shape.rows;
        self.work.busy_nanos += nanos;
        let mut sampled = Vec::new();
        for row in batch.rows() {
            let request = self.requests.get_mut(&row.sequence);
            let request = request.expect("a row belongs to a request that has not ended");
            let prompt_len = request.prompt_len;
            let service = costs.of(row_shape(row, prompt_len as usize));
            recorder.computed(request, row, service);
            for draw in sample(request.turn, prompt_len, batch, row) {
                if matches!(draw, Sampled::Token(_)) {
                    recorder.token(request, end, self.work.steps);
                }
                sampled.push(draw);
            }
        }
        let predicted = step.predicted();
        let start = Instant::now();
        step.commit(end, &sampled);
        let scheduling = planning + start.elapsed();
        recorder.step(scheduling, predicted, nanos);
        Some(end)
    }

    /// Handles the scheduler's events. Returns whether there were any, and the requests that have
    /// left.
    pub(super) fn handle_events(
        &mut self,
        recorder: &mut SimulationRecorder,
    ) -> (bool, Vec<Departure>) {
        let events: Vec<Event> = self.scheduler.events().collect();
        let mut departures = Vec::new();
        for event in &events {
            match *event {
                Event::Admitted { id, cached_tokens } => {
                    // The end of a request comes later in the list than its admission.
                    let request = self.requests.get_mut(&id);
                    let request = request.expect("the request has not ended");
                    recorder.admitted(request, cached_tokens);
                }
                Event::Preempted { .. } => recorder.preempted(),
                Event::Displaced {
                    id, retry_after, ..
                } => {
                    let request = self.requests.remove(&id);
                    let request = request.expect("the request has not ended");
                    departures.push(Departure::Displaced(request, retry_after));
                }
                Event::Finished { id, reason, .. } => {
                    let request = self.requests.remove(&id).expect("a request ends once");
                    departures.push(Departure::Finished(request, reason));
                }
            }
        }
        (!events.is_empty(), departures)
    }

    /// Removes and returns what the prefix cache has gained and lost since the last call.
    pub(super) fn cache_changes(&mut self) -> Vec<CacheChange> {
        self.scheduler.cache_changes()
    }

    /// Ends the server's process and starts another one, with an empty cache. Returns the requests
    /// that the server had, in the order of their sessions.
    pub(super) fn fail(&mut self, settings: &ServerSettings) -> LostRequests {
        let mut lost = LostRequests::default();
        self.work.evictions = self.evictions();
        self.scheduler = settings.scheduler(&mut self.machine);
        for Reverse((at, event)) in self.inbox.drain() {
            if let InboxEvent::Arrival { turn, .. } = event {
                lost.unanswered.push((at, turn));
            }
        }
        for (_, request) in self.requests.drain() {
            lost.broken.push(request);
        }
        lost.unanswered.sort_unstable();
        lost.broken.sort_unstable_by_key(|request| request.key);
        lost
    }
}

/// Returns the request of a turn that arrived `waited` before its submission.
fn request(settings: &ServerSettings, session: &Session, key: TurnKey, waited: Micros) -> Request {
    let deadline = settings.deadlines[session.class];
    Request {
        prompt: session.prompt(key.index),
        max_new_tokens: session.turns[key.index].max_tokens,
        stop_tokens: vec![STOP],
        tenant: TenantId(if settings.knows_tenants {
            session.tenant
        } else {
            0
        }),
        // The client has been waiting since the arrival.
        first_token_within: deadline.map(|within| within.saturating_sub(waited)),
        ..Request::default()
    }
}

/// Returns what the simulated model samples after a row: one draw for each of its logits.
///
/// Drafts that are equal to the answer's tokens are confirmed. The draws after the first other
/// draft, or after the stop token, are void.
fn sample(
    turn: ChatTurn,
    prompt_len: u32,
    batch: &Batch,
    row: &Row,
) -> impl Iterator<Item = Sampled> {
    let logits = row.logits as usize;
    let drafted = &batch.tokens(row)[row.len() - logits..];
    let first = row.end() - logits + 1 - prompt_len as usize * usize::from(logits > 0);
    let mut ended = false;
    (0..logits).map(move |index| {
        if ended {
            return Sampled::Void;
        }
        let token = turn.answer_token((first + index) as u32);
        ended = token == STOP || drafted.get(index + 1) != Some(&token);
        Sampled::Token(token)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{SeededText, token};
    use sterna_scheduler::Page;

    /// Returns the draws after a row of `tokens` at `start`, for a prompt of 4 tokens and an
    /// answer of 5.
    fn draws(start: usize, tokens: &[u32], logits: usize) -> Vec<Sampled> {
        let text = |seed, tokens| SeededText { seed, tokens };
        let turn = ChatTurn {
            think: 0.0,
            prompt: text(1, 4),
            answer: text(2, 5),
            max_tokens: 5,
            disconnects_after: None,
        };
        let mut batch = Batch::new();
        let page = [Page::new(0)];
        batch.push_row(SequenceId::new(0, 0), start, tokens, &page, logits);
        sample(turn, 4, &batch, &batch.rows()[0]).collect()
    }

    #[test]
    fn the_answer_does_not_depend_on_how_it_is_computed() {
        let answer: Vec<u32> = (0..4).map(|index| token(2, index)).chain([STOP]).collect();
        let [a, b, c, d, stop] = answer[..] else {
            unreachable!("the answer has five tokens")
        };
        let token = Sampled::Token;
        assert_eq!(draws(0, &[9, 9, 9, 9], 1), [token(a)]);
        assert_eq!(draws(0, &[9, 9], 0), []);
        assert_eq!(draws(4, &[a], 1), [token(b)]);
        // Recomputed after a preemption.
        assert_eq!(draws(0, &[9, 9, 9, 9, a, b], 1), [token(c)]);
        // Right drafts are confirmed. The first wrong one voids the rest.
        let right = [token(b), token(c), token(d)];
        assert_eq!(draws(4, &[a, b, c], 3), right);
        let wrong = [token(b), token(c), Sampled::Void];
        assert_eq!(draws(4, &[a, b, 7], 3), wrong);
        // Nothing follows the stop token.
        let ended = [token(d), token(stop), Sampled::Void];
        assert_eq!(draws(6, &[c, d, STOP], 3), ended);
    }
}
