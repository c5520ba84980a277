//! Worlds in which every tenant always has requests waiting: each gets service by its weight.

use sterna_random::Random;
use sterna_scheduler::{
    Band, Budget, CostModel, Growth, Limits, Micros, Nanos, Order, Plan, Policy, Request,
    SAMPLING_UNIT, Sampled, Scheduler, StepShape, TenantId, TenantPolicy, TokenId,
};

use crate::rules::PREFILL_FLOOR;

const STEPS: u64 = 300;

const MAX_OUTPUT_TOKENS: u64 = 12;
const MAX_PROMPT_TOKENS: u64 = 80;
const MAX_RUNNING: u32 = 4;
const MAX_DRAW_TIME: Nanos = 2_000_000;

pub(crate) const COST: CostModel = CostModel {
    rows: CostModel::roofline(1_000_000, 100_000),
    kilo_decode_keys: 50_000,
    kilo_chunk_keys: 50_000,
    head: 500_000,
    logit: 50_000,
    sampling: SAMPLING_UNIT,
};

/// A scheduler with two to four busy tenants.
pub(crate) struct FairWorld {
    seed: u64,
    random: Random,
    slack: Micros,
    weights: Vec<u64>,
    draw_times: Vec<Nanos>, // By tenant.
    scheduler: Scheduler,
    shared: Vec<TokenId>, // The start of the first tenant's prompts.
    last_token: TokenId,  // Every other token is a new one.
    now: Micros,
}

impl Drop for FairWorld {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to see this world again: STERNA_SEED={}", self.seed);
        }
    }
}

impl FairWorld {
    pub(crate) fn new(seed: u64) -> FairWorld {
        let mut random = Random::new(seed);
        let tenants = random.between(2, 4);
        let scale = random.pick(&[1, 1, 1000]);
        let weights: Vec<u64> = (0..tenants).map(|_| scale * random.between(1, 4)).collect();
        let draw_time = |_| random.pick(&[0, 0, MAX_DRAW_TIME]);
        let draw_times: Vec<Nanos> = (0..tenants).map(draw_time).collect();
        let slack = random.pick(&[0, 1_000, 20_000]);
        let limits = Limits {
            pages: 64,
            max_running: MAX_RUNNING,
            max_queued: 100,
            max_queued_time: Micros::MAX,
            step_tokens: 64,
            prefill_chunk: 64,
            max_sequence_tokens: 1000,
            states: None,
            diffusion: None,
        };
        let policy = Policy {
            order: Order::FairShare { slack },
            budget: Budget::Time {
                inter_token_target: 8_000,
                min_step: 1_000,
                max_step: 10_000,
                is_strict: false,
            },
            growth: Growth::Expected,
            max_draft: 0,
            own_drafts: None,
        };
        let mut scheduler = Scheduler::new(limits, policy);
        scheduler.calibrate(COST);
        let terms = |&weight: &u64| TenantPolicy {
            band: Band::Standard,
            weight: weight as u32,
            ..TenantPolicy::default()
        };
        let all: Vec<_> = (0..).map(TenantId).zip(weights.iter().map(terms)).collect();
        assert_eq!(scheduler.set_tenants(&all), Ok(()));
        FairWorld {
            seed,
            slack,
            weights,
            draw_times,
            scheduler,
            shared: (0..48).collect(),
            last_token: 1000,
            now: 0,
            random,
        }
    }

    pub(crate) fn run(mut self) {
        for _ in 0..STEPS {
            for tenant in 0..self.weights.len() as u32 {
                while self.scheduler.tenant(TenantId(tenant)).queued < MAX_RUNNING + 1 {
                    self.submit(tenant);
                }
            }
            run_step(&mut self.scheduler, &mut self.now, &mut self.last_token);
            self.scheduler.check();
            self.scheduler.events().for_each(drop);
            self.check_lead();
        }
    }

    fn submit(&mut self, tenant: u32) {
        let mut prompt = Vec::new();
        if tenant == 0 {
            prompt.extend_from_slice(&self.shared);
        }
        let left = MAX_PROMPT_TOKENS - prompt.len() as u64;
        for _ in 0..self.random.between(1, left) {
            self.last_token += 1;
            prompt.push(self.last_token);
        }
        let request = Request {
            prompt,
            max_new_tokens: self.random.between(1, MAX_OUTPUT_TOKENS) as u32,
            draw_time: self.draw_times[tenant as usize],
            tenant: TenantId(tenant),
            ..Request::default()
        };
        let answer = self.scheduler.submit(self.now, request);
        assert!(answer.is_ok(), "{answer:?}");
    }

    /// S5: Between two tenants of one band that always have requests waiting, the lead in service
    /// per weight is at most the slack and the cost of `MAX_RUNNING` requests, divided by the
    /// weight of the leading tenant.
    fn check_lead(&self) {
        // The cost of a request that runs alone in the smallest chunks. The correction learns a
        // factor of at most 1.04 here.
        let longest = (MAX_PROMPT_TOKENS + MAX_OUTPUT_TOKENS) as usize;
        let chunk = COST.predict(StepShape::chunk(longest, PREFILL_FLOOR, 0));
        let chunks = MAX_PROMPT_TOKENS.div_ceil(PREFILL_FLOOR as u64);
        let decode = COST.predict(StepShape::decode(longest).with_draws(MAX_DRAW_TIME));
        let request = (chunk * chunks + decode * MAX_OUTPUT_TOKENS) * 104 / 100 / 1000;
        let max_lead = self.slack + request * u64::from(MAX_RUNNING);
        let served: Vec<Micros> = (0..self.weights.len() as u32)
            .map(|tenant| self.scheduler.tenant(TenantId(tenant)).service)
            .collect();
        for (a, b) in pairs(self.weights.len()) {
            // served[a] / weight[a] <= served[b] / weight[b] + max_lead / weight[a], without
            // fractions.
            let due = u128::from(served[b] + 1) * u128::from(self.weights[a]);
            let limit = due + u128::from(max_lead) * u128::from(self.weights[b]);
            let actual = u128::from(served[a]) * u128::from(self.weights[b]);
            assert!(
                actual <= limit,
                "S5: tenant {a} leads tenant {b} too far: weights {:?}, service {served:?} µs",
                self.weights
            );
        }
    }
}

/// Runs a step that takes as long as [`COST`] predicts. Each token that it draws is a new one.
pub(crate) fn run_step(scheduler: &mut Scheduler, now: &mut Micros, last_token: &mut TokenId) {
    let Plan::Step(step) = scheduler.plan(*now) else {
        panic!("S3: the plan is idle although requests are waiting");
    };
    *now += COST.predict(step.shape()) / 1000;
    let mut sampled = Vec::new();
    for _ in 0..step.batch().logits_count() {
        *last_token += 1;
        sampled.push(Sampled::Token(*last_token));
    }
    step.commit(*now, &sampled);
}

fn pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
    let all = (0..count).flat_map(move |a| (0..count).map(move |b| (a, b)));
    all.filter(|(a, b)| a != b)
}
