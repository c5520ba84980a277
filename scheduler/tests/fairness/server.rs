//! A server on a virtual clock.

use std::collections::BTreeMap;

use sterna_scheduler::{
    Band, Budget, CostModel, Event, Limits, Micros, Nanos, Plan, Policy, Request, SAMPLING_UNIT,
    Sampled, Scheduler, SequenceId, StepShape, SubTenant, TenantId, TenantPolicy, TokenId,
};

pub(crate) const SECOND: Micros = 1_000_000;
pub(crate) const TARGET: Micros = 200_000;

/// The approximate costs of a model of two billion parameters on two cores.
pub(crate) const COST: CostModel = CostModel {
    rows: CostModel::roofline(40_000_000, 4_500_000),
    kilo_decode_keys: 600_000,
    kilo_chunk_keys: 500_000,
    head: 25_000_000,
    logit: 1_000_000,
    sampling: SAMPLING_UNIT,
};

/// A scheduler and a clock on which each step takes as long as the cost model predicts.
pub(crate) struct VirtualServer {
    pub(crate) scheduler: Scheduler,
    pub(crate) now: Micros,
    pub(crate) steps: u64,
    pub(crate) token: TokenId,
    pub(crate) draw_times: BTreeMap<TenantId, Nanos>, // Beyond plain draws.
    pub(crate) client: Option<SubTenant>,             // Of the requests that follow.
    pub(crate) requests: BTreeMap<SequenceId, RequestTimeline>,
    pub(crate) ended: Vec<RequestTimeline>,
}

impl VirtualServer {
    pub(crate) fn new(policies: &[TenantPolicy]) -> VirtualServer {
        VirtualServer::with_pages(4000, policies)
    }

    pub(crate) fn with_pages(pages: u32, policies: &[TenantPolicy]) -> VirtualServer {
        let budget = Budget::Time {
            inter_token_target: TARGET,
            min_step: 10_000,
            max_step: 250_000,
            is_strict: false,
        };
        VirtualServer::with_budget(pages, budget, policies)
    }

    /// Creates a server whose target holds however much throughput it costs.
    pub(crate) fn with_strict_target(target: Micros, policies: &[TenantPolicy]) -> VirtualServer {
        VirtualServer::with_budget(4000, Budget::strictly_within(target), policies)
    }

    pub(crate) fn with_budget(
        pages: u32,
        budget: Budget,
        policies: &[TenantPolicy],
    ) -> VirtualServer {
        let limits = Limits {
            pages,
            max_running: 64,
            max_queued: 10_000,
            max_queued_time: Micros::MAX,
            step_tokens: 512,
            prefill_chunk: 512,
            max_sequence_tokens: 8192,
            states: None,
            diffusion: None,
        };
        let policy = Policy {
            budget,
            max_draft: 0,
            ..Policy::default()
        };
        let mut scheduler = Scheduler::new(limits, policy);
        scheduler.calibrate(COST);
        let tenants: Vec<_> = (0..).map(TenantId).zip(policies.iter().cloned()).collect();
        assert_eq!(scheduler.set_tenants(&tenants), Ok(()));
        VirtualServer {
            scheduler,
            now: 0,
            steps: 0,
            token: 0,
            draw_times: BTreeMap::new(),
            client: None,
            requests: BTreeMap::new(),
            ended: Vec::new(),
        }
    }

    /// Submits a request with a prompt that no other request has.
    pub(crate) fn submit(&mut self, tenant: u32, prompt: usize, output: u32) -> SequenceId {
        self.token += 10_000;
        let prompt = (0..prompt as TokenId).map(|at| self.token + at).collect();
        self.submit_prompt(tenant, prompt, output)
    }

    pub(crate) fn submit_prompt(
        &mut self,
        tenant: u32,
        prompt: Vec<TokenId>,
        output: u32,
    ) -> SequenceId {
        let tenant = TenantId(tenant);
        let request = Request {
            prompt,
            max_new_tokens: output,
            draw_time: self.draw_times.get(&tenant).copied().unwrap_or(0),
            tenant,
            sub_tenant: self.client,
            ..Request::default()
        };
        let id = self
            .scheduler
            .submit(self.now, request)
            .expect("the request is accepted");
        let timeline = RequestTimeline {
            tenant,
            submitted: self.now,
            submitted_at_step: self.steps,
            cached_tokens: 0,
            tokens: Vec::new(),
            first_step: 0,
        };
        self.requests.insert(id, timeline);
        id
    }

    /// Runs a step if there is one. Returns its duration.
    pub(crate) fn step(&mut self) -> Micros {
        let Plan::Step(step) = self.scheduler.plan(self.now) else {
            self.now += 1000;
            return 0;
        };
        let mut shape = StepShape {
            sampling: 0,
            ..step.shape()
        };
        for row in step.batch().rows() {
            let tenant = self.requests[&row.sequence].tenant;
            let draw_time = self.draw_times.get(&tenant).copied().unwrap_or(0);
            shape.sampling += u64::from(row.logits) * draw_time;
        }
        let duration = COST.predict(shape).div_ceil(1000);
        self.now += duration;
        self.steps += 1;
        let mut sampled = Vec::new();
        for row in step.batch().rows().iter().filter(|row| row.logits > 0) {
            self.token += 1;
            sampled.push(Sampled::Token(self.token));
            let timeline = self
                .requests
                .get_mut(&row.sequence)
                .expect("the request has not ended");
            if timeline.tokens.is_empty() {
                timeline.first_step = self.steps;
            }
            timeline.tokens.push(self.now);
        }
        step.commit(self.now, &sampled);
        for event in self.scheduler.events() {
            match event {
                Event::Admitted { id, cached_tokens } => {
                    self.requests
                        .get_mut(&id)
                        .expect("the request has not ended")
                        .cached_tokens = cached_tokens;
                }
                Event::Finished { id, .. } => {
                    self.ended
                        .push(self.requests.remove(&id).expect("a request ends once"));
                }
                Event::Preempted { .. } | Event::Displaced { .. } => {}
            }
        }
        duration
    }

    /// Runs steps for `time`. Each of the `busy` tenants always has requests waiting; the numbers
    /// are the tenant, its prompt tokens and its output tokens.
    pub(crate) fn keep_busy(&mut self, busy: &[(u32, usize, u32)], time: Micros) {
        self.keep_queued(busy, 2, time);
    }

    /// As [`keep_busy`](Self::keep_busy), with `count` requests waiting before each step.
    pub(crate) fn keep_queued(&mut self, busy: &[(u32, usize, u32)], count: u32, time: Micros) {
        let end = self.now + time;
        while self.now < end {
            for &(tenant, prompt, output) in busy {
                while self.scheduler.tenant(TenantId(tenant)).queued < count {
                    self.submit(tenant, prompt, output);
                }
            }
            self.step();
        }
    }

    pub(crate) fn service(&self, tenant: u32) -> Micros {
        self.scheduler.tenant(TenantId(tenant)).service
    }
}

/// The times of a request's submission and tokens.
#[derive(Clone, Debug)]
pub(crate) struct RequestTimeline {
    pub(crate) tenant: TenantId,
    pub(crate) submitted: Micros,
    pub(crate) submitted_at_step: u64,
    pub(crate) cached_tokens: u32,
    pub(crate) tokens: Vec<Micros>, // The time of each output token.
    pub(crate) first_step: u64,     // The step of the first output token.
}

pub(crate) fn weight(weight: u32) -> TenantPolicy {
    TenantPolicy {
        weight,
        ..TenantPolicy::default()
    }
}

pub(crate) fn band(band: Band) -> TenantPolicy {
    TenantPolicy {
        band,
        ..TenantPolicy::default()
    }
}

/// Asserts that `part` of `whole` is within `error` percentage points of `expected` percent.
pub(crate) fn assert_percent(part: Micros, whole: Micros, expected: u64, error: u64) {
    let percent = (100 * part + whole / 2) / whole;
    assert!(
        percent.abs_diff(expected) <= error,
        "{percent} % instead of {expected} %"
    );
}
