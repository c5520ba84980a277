//! Records the measurements of a running simulation.
//!
//! Invariant: memory does not grow with the number of steps.
//!
//! Invariant: the work per step does not grow with the number of tenants.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use hdrhistogram::Histogram;
use sterna_scheduler::{FinishReason, Micros, Refusal, Row};

use super::disturbance::{Disturbance, RunPhase};
use super::fairness::Fairness;
use crate::latency::{Latencies, histogram};
use crate::workload::{ChatTurn, Session, SessionClass, Workload};

/// The latency objective. A complete answer that meets it is good.
#[derive(Clone, Copy, Debug)]
pub(super) struct Objective {
    /// The limit of the time to first token.
    pub(super) first_token: Micros,
    /// The limit of the mean inter-token latency of an answer.
    pub(super) inter_token: Micros,
}

/// Identifies a turn of a running session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TurnKey {
    /// The number of the session.
    pub(super) session: u64,
    /// The index of the turn in the session.
    pub(super) index: usize,
}

/// A request that has not ended.
pub(super) struct SimulatedRequest {
    /// The turn that the request belongs to.
    pub(super) key: TurnKey,
    /// The question and the answer.
    pub(super) turn: ChatTurn,
    /// The length of the prompt.
    pub(super) prompt_len: u32,
    /// When the request arrived.
    pub(super) submitted: Micros,
    tenant: u32,
    class: usize,
    steps_before: u64,   // The steps of the server before the submission.
    cacheable: u32,      // Prompt tokens that an infinite cache would have.
    cached: Option<u32>, // Prompt tokens from the cache. `None`: not admitted yet.
    computed: u32,       // The end of the positions that were ever computed.
    answer: AnswerProgress,
    service: u64, // Nanoseconds of machine time.
}

/// The tokens of an answer so far.
#[derive(Default)]
struct AnswerProgress {
    time_to_first_token: Option<Micros>,
    last_token: Micros,
    tokens: u32,
}

/// The measurements of one class.
pub(super) struct ClassRecord {
    pub(super) name: &'static str,
    pub(super) first_token: Latencies,
    pub(super) inter_token: Latencies,
    pub(super) steps_to_first_token: Histogram<u64>,
    pub(super) complete: u64,
    pub(super) prefix: PrefixTokens,
}

/// Prompt tokens of admitted requests.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PrefixTokens {
    pub(super) prompt: u64,
    pub(super) cached: u64,
    /// What a cache would have that evicts nothing.
    pub(super) cacheable: u64,
}

/// Sums over the whole run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    /// Complete requests that met the objective.
    pub(super) good: u64,
    pub(super) output_tokens: u64,
    pub(super) prefill_tokens: u64,
    /// Prefill tokens that were computed before and lost by a preemption.
    pub(super) recomputed_tokens: u64,
    pub(super) preemptions: u64,
    pub(super) evictions: u64,
    /// Machines that failed.
    pub(super) failures: u64,
    /// Requests that were sent again because their machine failed before their first token.
    pub(super) sent_again: u64,
    pub(super) steps: u64,
    /// Machine time of all steps.
    pub(super) busy_nanos: u64,
    /// Machine time of requests that did not complete.
    pub(super) wasted_nanos: u64,
    /// The end of the run.
    pub(super) end: Micros,
}

/// Histograms over all steps.
pub(super) struct StepHistograms {
    /// Real time of plan and commit in this process, in nanoseconds.
    pub(super) scheduling: Histogram<u64>,
    /// Actual time over predicted time, in thousandths.
    pub(super) prediction: Histogram<u64>,
}

/// The measurements before, during and after the disturbance.
pub(super) struct PhaseRecords {
    pub(super) disturbance: Disturbance,
    pub(super) records: [PhaseRecord; 3], // In the order of `RunPhase`.
}

/// The measurements of one phase.
#[derive(Default)]
pub(super) struct PhaseRecord {
    pub(super) output_tokens: u64,
    pub(super) first_token: Latencies,
    pub(super) inter_token: Latencies,
}

/// Everything measured so far.
pub(super) struct SimulationRecorder {
    objective: Objective,
    pub(super) phases: Option<PhaseRecords>,
    pub(super) classes: Vec<ClassRecord>,
    pub(super) first_tokens: Vec<(u32, f32)>, // Tenants and seconds.
    pub(super) fairness: Fairness,
    pub(super) ends: BTreeMap<&'static str, u64>,
    pub(super) refusals: BTreeMap<&'static str, u64>,
    pub(super) totals: Totals,
    pub(super) steps: StepHistograms,
    seen: HashSet<(u32, u64)>, // Tenants and the shared texts that they have sent.
}

impl PhaseRecords {
    fn at(&mut self, at: Micros) -> &mut PhaseRecord {
        // A token at the end of a phase belongs to it.
        match self.disturbance.phase(at - 1) {
            RunPhase::Before => &mut self.records[0],
            RunPhase::During => &mut self.records[1],
            RunPhase::After => &mut self.records[2],
        }
    }

    /// Returns the length of each phase of a run that ended at `end`, in seconds.
    pub(super) fn seconds(&self, end: Micros) -> [f64; 3] {
        let Disturbance { from, until, .. } = self.disturbance;
        let (from, until) = (from.min(end), until.min(end));
        [from, until - from, end - until].map(|micros| micros as f64 / 1e6)
    }
}

impl SimulatedRequest {
    /// Creates the request of the turn `key` of `session`, submitted at `submitted`.
    pub(super) fn new(session: &Session, key: TurnKey, submitted: Micros) -> SimulatedRequest {
        SimulatedRequest {
            key,
            turn: session.turns[key.index],
            prompt_len: session.prompt_len(key.index),
            tenant: session.tenant,
            class: session.class,
            submitted,
            steps_before: 0,
            cacheable: 0,
            cached: None,
            computed: 0,
            answer: AnswerProgress::default(),
            service: 0,
        }
    }

    /// Returns whether the answer has a token.
    pub(super) fn has_begun(&self) -> bool {
        self.answer.time_to_first_token.is_some()
    }
}

impl SimulationRecorder {
    /// Creates an empty record.
    pub(super) fn new(workload: &Workload, objective: Objective) -> SimulationRecorder {
        let class = |class: &SessionClass| ClassRecord {
            name: class.name,
            first_token: Latencies::default(),
            inter_token: Latencies::default(),
            steps_to_first_token: histogram(),
            complete: 0,
            prefix: PrefixTokens::default(),
        };
        SimulationRecorder {
            objective,
            phases: None,
            classes: workload.classes.iter().map(class).collect(),
            first_tokens: Vec::new(),
            fairness: Fairness::new(workload),
            ends: BTreeMap::new(),
            refusals: BTreeMap::new(),
            totals: Totals::default(),
            steps: StepHistograms {
                scheduling: histogram(),
                prediction: histogram(),
            },
            seen: HashSet::new(),
        }
    }

    /// Also records the phases around a disturbance.
    pub(super) fn disturbed(mut self, disturbance: Option<Disturbance>) -> SimulationRecorder {
        self.phases = disturbance.map(|disturbance| PhaseRecords {
            disturbance,
            records: Default::default(),
        });
        self
    }

    /// Returns the number of requests that have ended or were rejected.
    pub(super) fn ended(&self) -> u64 {
        self.ends.values().chain(self.refusals.values()).sum()
    }

    /// Sets the time of the following events.
    pub(super) fn advance_to(&mut self, now: Micros) {
        self.fairness.advance_to(now);
    }

    /// Records that the scheduler of a server accepted a request, after `steps` steps.
    pub(super) fn submitted(
        &mut self,
        request: &mut SimulatedRequest,
        session: &Session,
        steps: u64,
    ) {
        let mut known_tokens = 0;
        let mut is_known = true;
        for text in &session.shared {
            is_known &= !self.seen.insert((request.tenant, text.seed));
            known_tokens += if is_known { text.tokens } else { 0 };
        }
        let known = match request.key.index.checked_sub(1) {
            // The stop token of the previous answer is never computed, so it is not cached.
            Some(before) => session.prompt_len(before) + session.turns[before].answer.tokens - 1,
            None => known_tokens,
        };
        request.steps_before = steps;
        request.cacheable = known.min(request.prompt_len - 1);
        self.fairness.queued(request.tenant);
    }

    /// Records that the scheduler rejected a request.
    pub(super) fn rejected(&mut self, refusal: &Refusal) {
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

    /// Records that a request left the full queue for one of another tenant.
    pub(super) fn displaced(&mut self, request: &SimulatedRequest, retry_after: Micros) {
        self.fairness.dequeued(request.tenant);
        self.rejected(&Refusal::Overloaded { retry_after });
    }

    /// Records that the router refused a request because no machine is alive.
    pub(super) fn unrouted(&mut self) {
        *self.refusals.entry("no_machine").or_default() += 1;
    }

    /// Records that a machine failed.
    pub(super) fn failed(&mut self) {
        self.totals.failures += 1;
    }

    /// Records that a request without a token was lost with its machine.
    pub(super) fn lost(&mut self, request: &SimulatedRequest) {
        if request.cached.is_none() {
            self.fairness.dequeued(request.tenant);
        }
        self.totals.wasted_nanos += request.service;
    }

    /// Records that the router sends a request again.
    pub(super) fn sent_again(&mut self) {
        self.totals.sent_again += 1;
    }

    /// Records the first admission of a request.
    pub(super) fn admitted(&mut self, request: &mut SimulatedRequest, cached: u32) {
        request.cached = Some(cached);
        self.fairness.dequeued(request.tenant);
    }

    /// Records a preemption.
    pub(super) fn preempted(&mut self) {
        self.totals.preemptions += 1;
    }

    /// Records that a row of a request was computed, at a cost of `service` nanoseconds.
    pub(super) fn computed(&mut self, request: &mut SimulatedRequest, row: &Row, service: u64) {
        request.service += service;
        self.fairness.serve(request.tenant, service);
        let (start, end) = (row.start, row.end() as u32);
        let is_prompt = start < request.prompt_len;
        let again = request.computed.min(end).saturating_sub(start);
        if is_prompt || again > 0 {
            self.totals.prefill_tokens += u64::from(end - start);
            self.totals.recomputed_tokens += u64::from(again);
        }
        request.computed = request.computed.max(end - (row.logits.max(1) - 1));
    }

    /// Records that an answer grew by one token, at the end of the step `step` of its server.
    pub(super) fn token(&mut self, request: &mut SimulatedRequest, at: Micros, step: u64) {
        let class = &mut self.classes[request.class];
        let mut phase = self.phases.as_mut().map(|phases| phases.at(at));
        if let Some(phase) = &mut phase {
            phase.output_tokens += 1;
        }
        let answer = &mut request.answer;
        if answer.time_to_first_token.is_none() {
            let wait = at - request.submitted;
            answer.time_to_first_token = Some(wait);
            class.first_token.record_micros(wait);
            if let Some(phase) = phase {
                phase.first_token.record_micros(wait);
            }
            class.steps_to_first_token += step - request.steps_before;
            self.first_tokens.push((request.tenant, wait as f32 / 1e6));
        } else {
            let wait = at - answer.last_token;
            class.inter_token.record_micros(wait);
            if let Some(phase) = phase {
                phase.inter_token.record_micros(wait);
            }
        }
        answer.last_token = at;
        answer.tokens += 1;
        self.totals.output_tokens += 1;
    }

    /// Records the end of a step: the real time of plan and commit, and the step's predicted and
    /// actual time.
    pub(super) fn step(&mut self, scheduling: Duration, predicted: Micros, nanos: u64) {
        self.totals.steps += 1;
        self.totals.busy_nanos += nanos;
        self.steps.scheduling += scheduling.as_nanos() as u64;
        if let Some(ratio) = nanos.checked_div(predicted) {
            self.steps.prediction += ratio;
        }
    }

    /// Records the end of a request.
    pub(super) fn finished(&mut self, request: &SimulatedRequest, reason: FinishReason) {
        let end = match reason {
            FinishReason::Stop | FinishReason::Length => "complete",
            FinishReason::Cancelled => "cancelled",
            FinishReason::Error => "error",
            FinishReason::Deadline => "missed_deadline",
            FinishReason::Shutdown => "shutdown",
        };
        *self.ends.entry(end).or_default() += 1;
        if let Some(cached) = request.cached {
            let prefix = &mut self.classes[request.class].prefix;
            prefix.prompt += u64::from(request.prompt_len);
            prefix.cached += u64::from(cached);
            prefix.cacheable += u64::from(request.cacheable);
        } else {
            self.fairness.dequeued(request.tenant);
        }
        if end == "complete" {
            self.classes[request.class].complete += 1;
            self.totals.good += u64::from(self.is_good(request));
        } else {
            self.totals.wasted_nanos += request.service;
        }
    }

    fn is_good(&self, request: &SimulatedRequest) -> bool {
        let answer = &request.answer;
        let Some(first) = answer.time_to_first_token else {
            return false;
        };
        let gaps = u64::from(answer.tokens - 1);
        let between = answer.last_token - request.submitted - first;
        first <= self.objective.first_token && between <= gaps * self.objective.inter_token
    }

    /// Records the end of the run, and the evictions of all servers.
    pub(super) fn end(&mut self, now: Micros, evictions: u64) {
        self.totals.end = now;
        self.totals.evictions = evictions;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Trace, named};

    #[test]
    fn an_infinite_cache_has_the_conversation_so_far() {
        let workload = named("chat").unwrap();
        let objective = Objective {
            first_token: 1,
            inter_token: 1,
        };
        let mut record = SimulationRecorder::new(&workload, objective);
        let mut sessions = Trace::new(&workload, 1, 1.0).requests(1000);
        let session = sessions.find(|session| session.turns.len() > 1).unwrap();
        let mut cacheable = |index| {
            let key = TurnKey { session: 0, index };
            let mut request = SimulatedRequest::new(&session, key, 0);
            record.submitted(&mut request, &session, 0);
            request.cacheable
        };
        assert_eq!(cacheable(0), 0, "the first request of the tenant");
        let conversation = session.prompt_len(0) + session.turns[0].answer.tokens;
        assert_eq!(cacheable(1), conversation - 1, "all but the stop token");
        assert_eq!(cacheable(0), session.shared_tokens(), "the system prompt");
    }
}
