//! Virtual time: arrivals, departures and the ends of steps, in their order.
//!
//! Always true: the scheduler is the product's; only the clock, the clients and the model's answers are made up. As in the
//! server, what happens during a step is told to the scheduler at its end; latencies count from when it happened.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Instant;

use sterna_scheduler::{
    Batch, CostModel, Event, FinishReason, Micros, Plan, Request, Row, Sampled, Scheduler,
    SequenceId, StepShape, TenantId, TenantPolicy,
};

use super::machine::{Bill, Machine, batch_shape, shape};
use super::policies::Choice;
use super::record::{Live, Recorder};
use crate::workload::{STOP, Session, Trace, Turn, Workload};

/// All that there is: the scheduler, who asks of it, and the time.
pub(super) struct World {
    scheduler: Scheduler,
    machine: Machine,
    cost: CostModel,
    trace: Trace,
    only: Option<usize>, // The one class whose sessions take place.
    knows_tenants: bool,
    now: Micros,
    numbers: u64,
    coming: BinaryHeap<Reverse<(Micros, Coming)>>,
    sessions: HashMap<u64, Session>,
    live: HashMap<SequenceId, Live>,
    recorder: Recorder,
    sampled: Vec<Sampled>, // As a field, to use its memory again.
    events: Vec<Event>,    // Likewise.
}

/// What will happen; at the same time, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Coming {
    Arrival {
        number: u64,
        session: u64,
        turn: usize,
    },
    Cancel {
        number: u64,
        id: SequenceId,
    },
}

impl World {
    /// Before the first arrival.
    pub(super) fn new(
        workload: &Workload,
        (trace, only): (Trace, Option<usize>),
        choice: Choice,
        (cost, machine): (CostModel, Machine),
        recorder: Recorder,
    ) -> World {
        let mut scheduler = Scheduler::new(choice.limits, choice.policy);
        scheduler.calibrate(cost);
        let tenant = |tenant| {
            let policy = TenantPolicy {
                weight: workload.weight(tenant),
                ..TenantPolicy::default()
            };
            (TenantId(tenant), policy)
        };
        let tenants: Vec<_> = (0..workload.tenants()).map(tenant).collect();
        let set = scheduler.set_tenants(&tenants);
        set.expect("weights are positive and nothing is guaranteed");
        World {
            scheduler,
            machine,
            cost,
            trace,
            only,
            knows_tenants: choice.knows_tenants,
            now: 0,
            numbers: 0,
            coming: BinaryHeap::new(),
            sessions: HashMap::new(),
            live: HashMap::new(),
            recorder,
            sampled: Vec::new(),
            events: Vec::new(),
        }
    }

    /// Runs until everybody has gone, and tells `progress` the time and the requests that have ended, after each step.
    pub(super) fn run(mut self, mut progress: impl FnMut(Micros, u64)) -> Recorder {
        self.open_next_session();
        loop {
            self.tell_what_came();
            let worked = self.step();
            self.note_events();
            progress(self.now, self.recorder.ended());
            if worked || !self.events.is_empty() {
                continue;
            }
            match self.coming.peek() {
                Some(Reverse((at, _))) => self.now = *at,
                None => break,
            }
        }
        assert!(
            self.live.is_empty(),
            "the scheduler is idle, and requests wait"
        );
        self.recorder.end(self.now, &self.scheduler.snapshot());
        self.recorder
    }

    /// The next session of the trace is always among what comes.
    fn open_next_session(&mut self) {
        let only = self.only;
        let wanted = |session: &Session| only.is_none_or(|class| session.class == class);
        if let Some(session) = self.trace.by_ref().find(wanted) {
            self.numbers += 1;
            let arrival = Coming::Arrival {
                number: self.numbers,
                session: self.numbers,
                turn: 0,
            };
            self.coming.push(Reverse((micros(session.at), arrival)));
            self.sessions.insert(self.numbers, session);
        }
    }

    fn tell_what_came(&mut self) {
        while let Some(Reverse((at, coming))) = self.coming.peek().copied() {
            if at > self.now {
                return;
            }
            self.coming.pop();
            match coming {
                Coming::Arrival { session, turn, .. } => self.ask(at, session, turn),
                Coming::Cancel { id, .. } => {
                    self.scheduler.cancel(id, FinishReason::Cancelled);
                }
            }
        }
    }

    fn ask(&mut self, at: Micros, number: u64, place: usize) {
        if place == 0 {
            self.open_next_session();
        }
        let session = &self.sessions[&number];
        let turn = session.turns[place];
        let within = self.recorder.class(session.class).first_token_within;
        let request = Request {
            prompt: session.prompt(place),
            max_new_tokens: turn.max_tokens,
            min_new_tokens: 0,
            stop_tokens: vec![STOP],
            tenant: TenantId(if self.knows_tenants {
                session.tenant
            } else {
                0
            }),
            // The client has been waiting since the step began.
            is_another_choice: false,
            first_token_within: within.map(|within| micros(within).saturating_sub(self.now - at)),
            ends_within: None,
        };
        self.recorder.tell_time(self.now);
        match self.scheduler.submit(self.now, request) {
            Ok(id) => {
                let mut live = Live::new(session, (number, place), at);
                self.recorder.asked(&mut live, session);
                self.live.insert(id, live);
                if let Some(leaves) = turn.leaves {
                    self.numbers += 1;
                    let number = self.numbers;
                    let cancel = Coming::Cancel { number, id };
                    self.coming.push(Reverse((at + micros(leaves), cancel)));
                }
            }
            Err(refusal) => {
                self.recorder.refused(&refusal);
                self.sessions.remove(&number);
            }
        }
    }

    /// `false` if there was nothing to do.
    fn step(&mut self) -> bool {
        let began = Instant::now();
        let Plan::Step(step) = self.scheduler.plan(self.now) else {
            return false;
        };
        let planning = began.elapsed();
        let batch = step.batch();
        let whole = batch_shape(batch, |row| step.prompt_len(row.sequence));
        let took = self.machine.run(whole);
        let end = self.now + took.div_ceil(1000);
        let bill = Bill::new(self.cost, whole);
        self.sampled.clear();
        for row in batch.rows() {
            let live = self.live.get_mut(&row.sequence);
            let live = live.expect("a row is of a living request");
            let drawn = draw(&live.turn, live.prompt_len, (batch, row), &mut self.sampled);
            let part: StepShape = shape(row, live.prompt_len as usize);
            self.recorder.computed(live, row, bill.of(part));
            (0..drawn).for_each(|_| self.recorder.token(live, end));
        }
        let predicted = step.predicted();
        let began = Instant::now();
        step.commit(end, &self.sampled);
        let deciding = planning + began.elapsed();
        self.recorder.step(deciding, predicted, took);
        self.now = end;
        true
    }

    fn note_events(&mut self) {
        self.events.clear();
        self.events.extend(self.scheduler.events());
        self.recorder.tell_time(self.now);
        for index in 0..self.events.len() {
            match self.events[index] {
                Event::Admitted { id, cached_tokens } => {
                    // One that ended in the same step is still known: its end comes later in the list.
                    let live = self.live.get_mut(&id).expect("it has not ended");
                    self.recorder.admitted(live, cached_tokens);
                }
                Event::Preempted { .. } => self.recorder.preempted(),
                Event::Finished { id, reason, .. } => self.end(id, reason),
            }
        }
    }

    fn end(&mut self, id: SequenceId, reason: FinishReason) {
        let live = self.live.remove(&id).expect("a request ends once");
        self.recorder.finished(&live, reason);
        let next = live.place + 1;
        let answered = matches!(reason, FinishReason::Stop | FinishReason::Length);
        let turn = self.sessions[&live.session].turns.get(next).copied();
        let Some(turn) = turn.filter(|_| answered) else {
            self.sessions.remove(&live.session);
            return;
        };
        self.numbers += 1;
        let arrival = Coming::Arrival {
            number: self.numbers,
            session: live.session,
            turn: next,
        };
        let at = self.now + micros(turn.think);
        self.coming.push(Reverse((at, arrival)));
    }
}

/// What the model says after a row, a [`Sampled`] for each of its logits. Returns how many tokens the answer has grown.
fn draw(
    turn: &Turn,
    prompt_len: u32,
    (batch, row): (&Batch, &Row),
    sampled: &mut Vec<Sampled>,
) -> usize {
    let logits = row.logits as usize;
    let drafted = &batch.tokens(row)[row.len() - logits..];
    let first = row.end() - logits + 1 - prompt_len as usize * usize::from(logits > 0);
    let mut drawn = 0;
    let mut goes_on = true;
    for place in 0..logits {
        if !goes_on {
            sampled.push(Sampled::Void);
            continue;
        }
        let token = turn.answer_token((first + place) as u32);
        sampled.push(Sampled::Token(token));
        drawn += 1;
        goes_on = token != STOP && drafted.get(place + 1) == Some(&token);
    }
    drawn
}

fn micros(seconds: f64) -> Micros {
    (seconds * 1e6) as Micros
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Segment, token};
    use sterna_scheduler::Page;

    /// What is drawn after a row of these tokens at `start`, after a prompt of 4 and before an answer of 5.
    fn drawn(start: usize, tokens: &[u32], logits: usize) -> (usize, Vec<Sampled>) {
        let text = |seed, tokens| Segment { seed, tokens };
        let turn = Turn {
            think: 0.0,
            prompt: text(1, 4),
            answer: text(2, 5),
            max_tokens: 5,
            leaves: None,
        };
        let mut batch = Batch::new();
        let page = [Page::new(0)];
        batch.push_row(SequenceId::new(0, 0), start, tokens, &page, logits);
        let mut sampled = Vec::new();
        let count = draw(&turn, 4, (&batch, &batch.rows()[0]), &mut sampled);
        (count, sampled)
    }

    #[test]
    fn the_answer_is_the_same_however_it_is_computed() {
        let answer: Vec<u32> = (0..4).map(|place| token(2, place)).chain([STOP]).collect();
        let [a, b, c, d, stop] = answer[..] else {
            unreachable!("five were made")
        };
        let said = Sampled::Token;
        assert_eq!(drawn(0, &[9, 9, 9, 9], 1), (1, vec![said(a)]));
        assert_eq!(drawn(0, &[9, 9], 0), (0, vec![]));
        assert_eq!(drawn(4, &[a], 1), (1, vec![said(b)]));
        // Computed again after a preemption.
        assert_eq!(drawn(0, &[9, 9, 9, 9, a, b], 1), (1, vec![said(c)]));
        // Drafts: right ones count, and the first wrong one ends it.
        let right = (3, vec![said(b), said(c), said(d)]);
        assert_eq!(drawn(4, &[a, b, c], 3), right);
        let wrong = (2, vec![said(b), said(c), Sampled::Void]);
        assert_eq!(drawn(4, &[a, b, 7], 3), wrong);
        // Nothing follows the stop token.
        let ended = (2, vec![said(d), said(stop), Sampled::Void]);
        assert_eq!(drawn(6, &[c, d, STOP], 3), ended);
    }
}
