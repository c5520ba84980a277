//! Worlds in which every tenant always has something waiting: does each get what its weight says?

use sterna_scheduler::{
    Band, Budget, CostModel, Growth, Limits, Micros, Order, Plan, Policy, Request, Sampled,
    Scheduler, StepShape, TenantId, TenantPolicy, TokenId,
};

use crate::model::Rng;
use crate::rules::PREFILL_FLOOR;

const STEPS: u64 = 300;

/// Tokens of an answer, and of a prompt, at most; sequences that run at the same time.
const LONGEST_ANSWER: u64 = 12;
const LONGEST_PROMPT: u64 = 80;
const MOST_RUNNING: u32 = 4;

const COST: CostModel = CostModel {
    rows: CostModel::roofline(1_000_000, 100_000),
    kilo_decode_keys: 50_000,
    kilo_chunk_keys: 50_000,
    head: 500_000,
    logit: 50_000,
};

/// A world of this kind.
pub(crate) struct FairWorld {
    seed: u64,
    rng: Rng,
    slack: Micros,
    weights: Vec<u64>,
    scheduler: Scheduler,
    shared: Vec<TokenId>, // Begins the first tenant's prompts.
    asked: TokenId,
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
        let mut rng = Rng(seed);
        let tenants = rng.between(2, 4);
        let scale = *rng.pick(&[1, 1, 1000]);
        let weights: Vec<u64> = (0..tenants).map(|_| scale * rng.between(1, 4)).collect();
        let slack = *rng.pick(&[0, 1_000, 20_000]);
        let limits = Limits {
            pages: 64,
            max_running: MOST_RUNNING,
            max_queued: 100,
            max_queued_time: Micros::MAX,
            step_tokens: 64,
            prefill_chunk: 64,
            max_sequence_tokens: 1000,
        };
        let policy = Policy {
            order: Order::FairShare { slack },
            budget: Budget::Time {
                inter_token_target: 8_000,
                least: 1_000,
                most: 10_000,
            },
            growth: Growth::Expected,
            max_draft: 0,
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
            scheduler,
            shared: (0..48).collect(),
            asked: 1000,
            now: 0,
            rng,
        }
    }

    pub(crate) fn run(mut self) {
        for _ in 0..STEPS {
            for tenant in 0..self.weights.len() as u32 {
                while self.scheduler.tenant(TenantId(tenant)).queued < MOST_RUNNING + 1 {
                    self.ask(tenant);
                }
            }
            self.step();
            self.scheduler.check();
            self.scheduler.events().for_each(drop);
            self.check_lag();
        }
    }

    fn ask(&mut self, tenant: u32) {
        let mut prompt = Vec::new();
        if tenant == 0 {
            prompt.extend_from_slice(&self.shared);
        }
        let left = LONGEST_PROMPT - prompt.len() as u64;
        for _ in 0..self.rng.between(1, left) {
            self.asked += 1;
            prompt.push(self.asked);
        }
        let request = Request {
            prompt,
            max_new_tokens: self.rng.between(1, LONGEST_ANSWER) as u32,
            tenant: TenantId(tenant),
            ..Request::default()
        };
        let welcome = self.scheduler.submit(self.now, request);
        assert!(welcome.is_ok(), "{welcome:?}");
    }

    fn step(&mut self) {
        let Plan::Step(step) = self.scheduler.plan(self.now) else {
            panic!("S3: idle, and somebody waits");
        };
        self.now += COST.predict(step.shape()) / 1000;
        let mut sampled = Vec::new();
        for _ in 0..step.batch().logits_count() {
            self.asked += 1;
            sampled.push(Sampled::Token(self.asked));
        }
        step.commit(self.now, &sampled);
    }

    /// S5: of tenants of one band that always have something waiting, none is ahead of another by more than the slack and
    /// what it may have running, each in machine time divided by the weight of the one that is ahead.
    fn check_lag(&self) {
        // A request by itself, its prompt in the smallest parts, at the highest factor that the correction learns here.
        let longest = (LONGEST_PROMPT + LONGEST_ANSWER) as usize;
        let part = COST.predict(StepShape::chunk(longest, PREFILL_FLOOR, 0));
        let parts = LONGEST_PROMPT.div_ceil(PREFILL_FLOOR as u64);
        let token = COST.predict(StepShape::decode(longest));
        let request = (part * parts + token * LONGEST_ANSWER) * 104 / 100 / 1000;
        let ahead = self.slack + request * u64::from(MOST_RUNNING);
        let served: Vec<Micros> = (0..self.weights.len() as u32)
            .map(|tenant| self.scheduler.tenant(TenantId(tenant)).service)
            .collect();
        for (a, b) in pairs(self.weights.len()) {
            // Served[a] / weight[a] <= served[b] / weight[b] + ahead / weight[a], without fractions.
            let due = u128::from(served[b] + 1) * u128::from(self.weights[a]);
            let most = due + u128::from(ahead) * u128::from(self.weights[b]);
            let has = u128::from(served[a]) * u128::from(self.weights[b]);
            assert!(
                has <= most,
                "S5: of weights {:?} tenant {a} is ahead of {b}: {served:?} µs",
                self.weights
            );
        }
    }
}

fn pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
    let all = (0..count).flat_map(move |a| (0..count).map(move |b| (a, b)));
    all.filter(|(a, b)| a != b)
}
