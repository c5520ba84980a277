//! What is measured while a simulation runs.
//!
//! Always true: nothing here grows with the number of steps, and a step's part of the work does not depend on how many
//! tenants there are.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use hdrhistogram::Histogram;
use sterna_scheduler::{FinishReason, Micros, Refusal, Row, Snapshot};

use super::fairness::Fairness;
use crate::latency::Latencies;
use crate::workload::{Class, Session, Turn, Workload};

const GROWS: &str = "the histogram grows with its values";

/// What a client wants: an answer that is slower is no good.
#[derive(Clone, Copy, Debug)]
pub(super) struct Objective {
    /// To the first token.
    pub(super) first_token: Micros,
    /// Between two tokens, on average over the answer.
    pub(super) inter_token: Micros,
}

/// A request that has not ended.
pub(super) struct Live {
    /// The session's number.
    pub(super) session: u64,
    /// The turn's place in it.
    pub(super) place: usize,
    /// What was asked.
    pub(super) turn: Turn,
    /// Tokens of the prompt.
    pub(super) prompt_len: u32,
    tenant: u32,
    class: usize,
    asked: Micros,
    asked_before_step: u64,
    admitted: bool,
    cached: u32,
    cacheable: u32, // By a cache that forgets nothing.
    computed: u32,  // The furthest position ever computed.
    first_token: Option<Micros>,
    last_token: Micros,
    tokens: u32,
    service: u64,
}

/// Latencies of one class.
pub(super) struct ClassRecord {
    pub(super) class: Class,
    pub(super) first_token: Latencies,
    pub(super) inter_token: Latencies,
    pub(super) steps_to_first_token: Histogram<u64>,
    pub(super) complete: u64,
    pub(super) prefix: PrefixTokens,
}

/// Prompt tokens of admitted requests.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PrefixTokens {
    pub(super) asked: u64,
    pub(super) cached: u64,
    pub(super) cacheable: u64, // By a cache that forgets nothing.
}

/// Everything measured so far. Times of the machine are in nanoseconds.
pub(super) struct Recorder {
    objective: Objective,
    pub(super) classes: Vec<ClassRecord>,
    pub(super) first_tokens: Vec<(u32, f32)>, // Tenant, seconds.
    pub(super) fairness: Fairness,
    pub(super) ends: BTreeMap<&'static str, u64>,
    pub(super) refusals: BTreeMap<&'static str, u64>,
    pub(super) good: u64,
    pub(super) output_tokens: u64,
    pub(super) prefill_tokens: u64,
    pub(super) recomputed_tokens: u64,
    pub(super) preemptions: u64,
    pub(super) evictions: u64,
    pub(super) steps: u64,
    pub(super) busy: u64,
    pub(super) wasted: u64,
    pub(super) deciding: Histogram<u64>, // Nanoseconds of this process.
    pub(super) prediction: Histogram<u64>, // Actual ÷ predicted, in thousandths.
    pub(super) until: Micros,
    seen: HashSet<(u32, u64)>, // Tenants and the shared texts that they have used.
}

impl Live {
    /// Asked at `asked`, as the turn `place` of session number `session`.
    pub(super) fn new(session: &Session, (number, place): (u64, usize), asked: Micros) -> Live {
        Live {
            session: number,
            place,
            turn: session.turns[place],
            prompt_len: session.prompt_len(place),
            tenant: session.tenant,
            class: session.class,
            asked,
            asked_before_step: 0,
            admitted: false,
            cached: 0,
            cacheable: 0,
            computed: 0,
            first_token: None,
            last_token: 0,
            tokens: 0,
            service: 0,
        }
    }
}

impl Recorder {
    /// Nothing measured yet.
    pub(super) fn new(workload: &Workload, objective: Objective) -> Recorder {
        let three_digits = || Histogram::new(3).expect("three digits are in the histogram's range");
        let class = |class: &Class| ClassRecord {
            class: class.clone(),
            first_token: Latencies::new(),
            inter_token: Latencies::new(),
            steps_to_first_token: three_digits(),
            complete: 0,
            prefix: PrefixTokens::default(),
        };
        Recorder {
            objective,
            classes: workload.classes.iter().map(class).collect(),
            first_tokens: Vec::new(),
            fairness: Fairness::new(workload),
            ends: BTreeMap::new(),
            refusals: BTreeMap::new(),
            good: 0,
            output_tokens: 0,
            prefill_tokens: 0,
            recomputed_tokens: 0,
            preemptions: 0,
            evictions: 0,
            steps: 0,
            busy: 0,
            wasted: 0,
            deciding: three_digits(),
            prediction: three_digits(),
            until: 0,
            seen: HashSet::new(),
        }
    }

    /// A class of the workload.
    pub(super) fn class(&self, place: usize) -> &Class {
        &self.classes[place].class
    }

    /// Requests that came to an end of any kind.
    pub(super) fn ended(&self) -> u64 {
        self.ends.values().chain(self.refusals.values()).sum()
    }

    /// It is `now`; whatever is told next happens now.
    pub(super) fn tell_time(&mut self, now: Micros) {
        self.fairness.tell_time(now);
    }

    /// A request was accepted.
    pub(super) fn asked(&mut self, live: &mut Live, session: &Session) {
        let is_known = !self.seen.insert((live.tenant, session.shared.seed));
        let known = match live.place.checked_sub(1) {
            // The stop token of the answer before is computed by nobody.
            Some(before) => session.prompt_len(before) + session.turns[before].answer.tokens - 1,
            None if is_known => session.shared.tokens,
            None => 0,
        };
        live.asked_before_step = self.steps;
        live.cacheable = known.min(live.prompt_len - 1);
        self.fairness.waits(live.tenant);
    }

    /// A request was not accepted.
    pub(super) fn refused(&mut self, refusal: &Refusal) {
        let reason = match refusal {
            Refusal::EmptyPrompt | Refusal::NothingToGenerate => "empty",
            Refusal::TooLong { .. } => "too_long",
            Refusal::RateLimited { .. } => "rate_limited",
            Refusal::TenantQueueFull { .. } => "tenant_queue_full",
            Refusal::Overloaded { .. } => "overloaded",
            Refusal::Deadline { .. } => "deadline",
            Refusal::Draining => "draining",
        };
        *self.refusals.entry(reason).or_default() += 1;
    }

    /// A request runs for the first time.
    pub(super) fn admitted(&mut self, live: &mut Live, cached: u32) {
        live.admitted = true;
        live.cached = cached;
        self.fairness.waits_no_more(live.tenant);
    }

    /// A request lost its pages.
    pub(super) fn preempted(&mut self) {
        self.preemptions += 1;
    }

    /// A row of a request was computed for so many nanoseconds.
    pub(super) fn computed(&mut self, live: &mut Live, row: &Row, service: u64) {
        live.service += service;
        self.fairness.serve(live.tenant, service);
        let (start, end) = (row.start, row.end() as u32);
        let is_prompt = start < live.prompt_len;
        let again = live.computed.min(end).saturating_sub(start);
        if is_prompt || again > 0 {
            self.prefill_tokens += u64::from(end - start);
            self.recomputed_tokens += u64::from(again);
        }
        live.computed = live.computed.max(end - (row.logits.max(1) - 1));
    }

    /// A request's answer has one more token, at the end of a step.
    pub(super) fn token(&mut self, live: &mut Live, at: Micros) {
        let class = &mut self.classes[live.class];
        if live.first_token.is_none() {
            let wait = at - live.asked;
            live.first_token = Some(wait);
            class.first_token.record_micros(wait);
            // The step that draws the token is not counted yet.
            let steps = self.steps + 1 - live.asked_before_step;
            class.steps_to_first_token.record(steps).expect(GROWS);
            self.first_tokens.push((live.tenant, wait as f32 / 1e6));
        } else {
            class.inter_token.record_micros(at - live.last_token);
        }
        live.last_token = at;
        live.tokens += 1;
        self.output_tokens += 1;
    }

    /// A step ended.
    pub(super) fn step(&mut self, deciding: Duration, predicted: Micros, took: u64) {
        self.steps += 1;
        self.busy += took;
        self.deciding
            .record(deciding.as_nanos() as u64)
            .expect(GROWS);
        if let Some(ratio) = took.checked_div(predicted) {
            self.prediction.record(ratio).expect(GROWS);
        }
    }

    /// A request ended.
    pub(super) fn finished(&mut self, live: &Live, reason: FinishReason) {
        let end = match reason {
            FinishReason::Stop | FinishReason::Length => "complete",
            FinishReason::Cancelled => "cancelled",
            FinishReason::Error => "error",
            FinishReason::Deadline => "missed_deadline",
            FinishReason::Shutdown => "shutdown",
        };
        *self.ends.entry(end).or_default() += 1;
        if live.admitted {
            let prefix = &mut self.classes[live.class].prefix;
            prefix.asked += u64::from(live.prompt_len);
            prefix.cached += u64::from(live.cached);
            prefix.cacheable += u64::from(live.cacheable);
        } else {
            self.fairness.waits_no_more(live.tenant);
        }
        if end == "complete" {
            self.classes[live.class].complete += 1;
            self.good += u64::from(self.is_good(live));
        } else {
            self.wasted += live.service;
        }
    }

    fn is_good(&self, live: &Live) -> bool {
        let Some(first) = live.first_token else {
            return false;
        };
        let gaps = u64::from(live.tokens - 1);
        let between = live.last_token - live.asked - first;
        first <= self.objective.first_token && between <= gaps * self.objective.inter_token
    }

    /// Everything has ended.
    pub(super) fn end(&mut self, now: Micros, snapshot: &Snapshot) {
        self.until = now;
        self.evictions = snapshot.evictions;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Trace, named};

    #[test]
    fn a_cache_that_forgets_nothing_knows_what_was_said() {
        let workload = named("chat").unwrap();
        let objective = Objective {
            first_token: 1,
            inter_token: 1,
        };
        let mut record = Recorder::new(&workload, objective);
        let mut sessions = Trace::new(&workload, 1, 1.0, 1000, f64::INFINITY);
        let session = sessions.find(|session| session.turns.len() > 1).unwrap();
        let mut cacheable = |place| {
            let mut live = Live::new(&session, (0, place), 0);
            record.asked(&mut live, &session);
            live.cacheable
        };
        assert_eq!(cacheable(0), 0, "the first to ask");
        let said = session.prompt_len(0) + session.turns[0].answer.tokens;
        assert_eq!(cacheable(1), said - 1, "all but the stop token");
        assert_eq!(cacheable(0), session.shared.tokens, "the system prompt");
    }
}
