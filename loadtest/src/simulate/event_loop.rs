//! The discrete-event simulation: arrivals, disconnects and steps in the order of virtual time.
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
    Batch, Event, FinishReason, Micros, Plan, Request, Row, Sampled, Scheduler, SequenceId,
    TenantId, TenantPolicy,
};

use super::machine::{RowCosts, SimulatedMachine, batch_shape, row_shape};
use super::policies::PolicyPreset;
use super::record::{SimulatedRequest, SimulationRecorder, TurnKey};
use crate::workload::{ChatTurn, STOP, Session, Trace, Workload};

/// The scheduler, its simulated clients and machine, and the virtual clock.
pub(super) struct EventLoop {
    scheduler: Scheduler,
    machine: SimulatedMachine,
    trace: Trace,
    knows_tenants: bool,
    clients: Option<u32>, // Each opens its next session when its last one has ended.
    deadlines: Vec<Option<Micros>>, // The first token's deadline, by class.
    now: Micros,
    last_number: u64, // The last number given to a session or an event.
    pending: BinaryHeap<Reverse<(Micros, PendingEvent)>>,
    sessions: HashMap<u64, Session>,
    requests: HashMap<SequenceId, SimulatedRequest>,
    recorder: SimulationRecorder,
}

/// An event in the future. Events of the same time happen in the order of this type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PendingEvent {
    Arrival { number: u64, turn: TurnKey },
    Disconnect { number: u64, id: SequenceId },
}

impl EventLoop {
    /// Creates the simulation at time 0, before the first arrival.
    pub(super) fn new(
        workload: &Workload,
        trace: Trace,
        preset: PolicyPreset,
        mut machine: SimulatedMachine,
        recorder: SimulationRecorder,
    ) -> EventLoop {
        let mut scheduler = Scheduler::new(preset.limits, preset.policy);
        scheduler.calibrate(machine.calibrated());
        let tenant = |tenant| {
            let policy = TenantPolicy {
                weight: workload.weight(tenant),
                ..TenantPolicy::default()
            };
            (TenantId(tenant), policy)
        };
        let tenants: Vec<_> = (0..workload.tenants()).map(tenant).collect();
        let set = scheduler.set_tenants(&tenants);
        set.expect("weights are positive and no pages are guaranteed");
        let classes = workload.classes.iter();
        EventLoop {
            scheduler,
            machine,
            trace,
            knows_tenants: preset.knows_tenants,
            clients: None,
            deadlines: classes
                .map(|class| class.first_token_within.map(micros))
                .collect(),
            now: 0,
            last_number: 0,
            pending: BinaryHeap::new(),
            sessions: HashMap::new(),
            requests: HashMap::new(),
            recorder,
        }
    }

    /// Lets this many clients open the sessions one after the other. The sessions' own times do not
    /// count.
    pub(super) fn clients(mut self, clients: Option<u32>) -> EventLoop {
        self.clients = clients;
        self
    }

    /// Runs until every request has ended. After each step, calls `progress` with the time and the
    /// number of ended requests.
    pub(super) fn run(mut self, mut progress: impl FnMut(Micros, u64)) -> SimulationRecorder {
        for _ in 0..self.clients.unwrap_or(1) {
            self.open_next_session();
        }
        loop {
            self.handle_due_events();
            let has_stepped = self.step();
            let has_notices = self.handle_scheduler_events();
            progress(self.now, self.recorder.ended());
            if has_stepped || has_notices {
                continue;
            }
            match self.pending.peek() {
                Some(Reverse((at, _))) => self.now = *at,
                None => break,
            }
        }
        assert!(
            self.requests.is_empty(),
            "the scheduler is idle although requests are queued"
        );
        self.recorder.end(self.now, &self.scheduler.snapshot());
        self.recorder
    }

    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Adds the arrival of the trace's next session.
    fn open_next_session(&mut self) {
        if let Some(mut session) = self.trace.next() {
            if self.clients.is_some() {
                session.at = self.now as f64 / 1e6;
            }
            let number = self.next_number();
            let turn = TurnKey {
                session: number,
                index: 0,
            };
            let arrival = PendingEvent::Arrival { number, turn };
            self.pending.push(Reverse((micros(session.at), arrival)));
            self.sessions.insert(number, session);
        }
    }

    fn handle_due_events(&mut self) {
        while let Some(Reverse((at, event))) = self.pending.peek().copied() {
            if at > self.now {
                return;
            }
            self.pending.pop();
            match event {
                PendingEvent::Arrival { turn, .. } => self.submit(at, turn),
                PendingEvent::Disconnect { id, .. } => {
                    self.scheduler.cancel(id, FinishReason::Cancelled);
                }
            }
        }
    }

    /// Submits a turn that arrived at `at`.
    fn submit(&mut self, at: Micros, key: TurnKey) {
        // Without clients, the next session is always pending.
        if key.index == 0 && self.clients.is_none() {
            self.open_next_session();
        }
        let session = &self.sessions[&key.session];
        let turn = session.turns[key.index];
        let tenant = if self.knows_tenants {
            session.tenant
        } else {
            0
        };
        let deadline = self.deadlines[session.class];
        let request = Request {
            prompt: session.prompt(key.index),
            max_new_tokens: turn.max_tokens,
            stop_tokens: vec![STOP],
            tenant: TenantId(tenant),
            // The client has been waiting since `at`.
            first_token_within: deadline.map(|within| within.saturating_sub(self.now - at)),
            ..Request::default()
        };
        self.recorder.advance_to(self.now);
        match self.scheduler.submit(self.now, request) {
            Ok(id) => {
                let mut request = SimulatedRequest::new(session, key, at);
                self.recorder.submitted(&mut request, session);
                self.requests.insert(id, request);
                if let Some(after) = turn.disconnects_after {
                    let number = self.next_number();
                    let disconnect = PendingEvent::Disconnect { number, id };
                    self.pending.push(Reverse((at + micros(after), disconnect)));
                }
            }
            Err(refusal) => {
                self.recorder.rejected(&refusal);
                self.end_session(key.session);
            }
        }
    }

    /// Runs one step. Returns `false` if the scheduler is idle.
    fn step(&mut self) -> bool {
        let start = Instant::now();
        let Plan::Step(step) = self.scheduler.plan(self.now) else {
            return false;
        };
        let planning = start.elapsed();
        let batch = step.batch();
        let shape = batch_shape(batch, |row| step.prompt_len(row.sequence));
        let nanos = self.machine.run(shape, self.now);
        let end = self.now + nanos.div_ceil(1000);
        let costs = RowCosts::new(self.machine.cost(), shape);
        let mut sampled = Vec::new();
        for row in batch.rows() {
            let request = self.requests.get_mut(&row.sequence);
            let request = request.expect("a row belongs to a request that has not ended");
            let prompt_len = request.prompt_len;
            let service = costs.of(row_shape(row, prompt_len as usize));
            self.recorder.computed(request, row, service);
            for draw in sample(request.turn, prompt_len, batch, row) {
                if matches!(draw, Sampled::Token(_)) {
                    self.recorder.token(request, end);
                }
                sampled.push(draw);
            }
        }
        let predicted = step.predicted();
        let start = Instant::now();
        step.commit(end, &sampled);
        let scheduling = planning + start.elapsed();
        self.recorder.step(scheduling, predicted, nanos);
        self.now = end;
        true
    }

    /// Handles the scheduler's events. Returns whether there were any.
    fn handle_scheduler_events(&mut self) -> bool {
        let events: Vec<Event> = self.scheduler.events().collect();
        self.recorder.advance_to(self.now);
        for event in &events {
            match *event {
                Event::Admitted { id, cached_tokens } => {
                    // The end of a request comes later in the list than its admission.
                    let request = self
                        .requests
                        .get_mut(&id)
                        .expect("the request has not ended");
                    self.recorder.admitted(request, cached_tokens);
                }
                Event::Preempted { .. } => self.recorder.preempted(),
                Event::Displaced {
                    id, retry_after, ..
                } => {
                    let request = self.requests.remove(&id);
                    let request = request.expect("the request has not ended");
                    self.recorder.displaced(&request, retry_after);
                    self.sessions.remove(&request.key.session);
                }
                Event::Finished { id, reason, .. } => self.finish(id, reason),
            }
        }
        !events.is_empty()
    }

    /// Ends a request. If its answer is complete, adds the arrival of the session's next turn.
    fn finish(&mut self, id: SequenceId, reason: FinishReason) {
        let request = self.requests.remove(&id).expect("a request ends once");
        self.recorder.finished(&request, reason);
        let key = TurnKey {
            index: request.key.index + 1,
            ..request.key
        };
        let is_complete = matches!(reason, FinishReason::Stop | FinishReason::Length);
        let turn = self.sessions[&key.session].turns.get(key.index).copied();
        let Some(turn) = turn.filter(|_| is_complete) else {
            return self.end_session(key.session);
        };
        let number = self.next_number();
        let arrival = PendingEvent::Arrival { number, turn: key };
        let at = self.now + micros(turn.think);
        self.pending.push(Reverse((at, arrival)));
    }

    fn end_session(&mut self, number: u64) {
        self.sessions.remove(&number);
        if self.clients.is_some() {
            self.open_next_session();
        }
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

fn micros(seconds: f64) -> Micros {
    (seconds * 1e6) as Micros
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
