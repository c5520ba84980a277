//! Worlds in which memory is scarce and newcomers never end: a large request still gets its turn.

use sterna_random::Random;
use sterna_scheduler::{
    CostModel, Event, Limits, Micros, Plan, Policy, Request, Sampled, Scheduler, TenantId,
    TenantPolicy, TokenId,
};

/// A copy of the scheduler's constant: the number of times that others may bypass a request that
/// was first in its band.
const LONG_PATIENCE: u32 = 256;

const NEWCOMERS: u32 = 600;

/// A scheduler with one large request and a new tenant every two steps.
pub(crate) struct CrowdedWorld {
    seed: u64,
    random: Random,
    pages: u32,
    scheduler: Scheduler,
    next_token: TokenId, // Every token is a new one.
    now: Micros,
}

impl Drop for CrowdedWorld {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to see this world again: STERNA_SEED={}", self.seed);
        }
    }
}

impl CrowdedWorld {
    pub(crate) fn new(seed: u64) -> CrowdedWorld {
        let mut random = Random::new(seed);
        let pages = random.between(16, 32) as u32;
        let limits = Limits {
            pages,
            max_running: 16,
            max_queued: 1000,
            max_queued_time: Micros::MAX,
            step_tokens: 64,
            prefill_chunk: 64,
            max_sequence_tokens: 1000,
            states: None,
            diffusion: None,
        };
        let mut scheduler = Scheduler::new(limits, Policy::default());
        scheduler.calibrate(CostModel::UNMEASURED);
        let all = (0..=NEWCOMERS).map(|id| (TenantId(id), TenantPolicy::default()));
        let all: Vec<_> = all.collect();
        assert_eq!(scheduler.set_tenants(&all), Ok(()));
        CrowdedWorld {
            seed,
            random,
            pages,
            scheduler,
            next_token: 0,
            now: 0,
        }
    }

    /// S11: A request that was first in its band and lacks memory is bypassed at most
    /// `LONG_PATIENCE` times. It becomes first before a hundred newcomers have bypassed it.
    pub(crate) fn run(mut self) {
        // Tenant 0 gets service first, so that every newcomer comes before it.
        for _ in 0..20 {
            self.submit(0, 16, 8);
            self.step();
        }
        let all_tokens = 16 * u64::from(self.pages);
        let large = self.random.between(all_tokens * 3 / 4, all_tokens - 20);
        self.submit(0, large, 4);
        let mut times_bypassed = 0;
        for newcomer in 1..=NEWCOMERS {
            let (prompt, output) = (self.random.between(10, 40), self.random.between(4, 12));
            self.submit(newcomer, prompt, output as u32);
            for _ in 0..2 {
                times_bypassed += self.step();
            }
            let own = self.scheduler.tenant(TenantId(0));
            if own.queued == 0 {
                break;
            }
            assert!(
                times_bypassed <= LONG_PATIENCE + 100,
                "S11: the large request was bypassed {times_bypassed} times"
            );
        }
        let own = self.scheduler.tenant(TenantId(0));
        assert_eq!(own.queued, 0, "S11: the large request is still waiting");
    }

    fn submit(&mut self, tenant: u32, prompt_tokens: u64, output_tokens: u32) {
        let first = self.next_token;
        self.next_token += prompt_tokens as TokenId;
        let request = Request {
            prompt: (first..self.next_token).collect(),
            max_new_tokens: output_tokens,
            tenant: TenantId(tenant),
            ..Request::default()
        };
        let answer = self.scheduler.submit(self.now, request);
        assert!(answer.is_ok(), "{answer:?}");
    }

    /// Runs a step. Returns the number of admissions.
    fn step(&mut self) -> u32 {
        if let Plan::Step(step) = self.scheduler.plan(self.now) {
            self.now += step.predicted();
            let mut sampled = Vec::new();
            for row in step.batch().rows().iter().filter(|row| row.logits > 0) {
                self.next_token += 1;
                sampled.push(Sampled::Token(self.next_token));
                sampled.extend((1..row.logits).map(|_| Sampled::Void));
            }
            step.commit(self.now, &sampled);
        }
        self.scheduler.check();
        let is_admission = |event: &Event| matches!(event, Event::Admitted { .. });
        self.scheduler.events().filter(is_admission).count() as u32
    }
}
