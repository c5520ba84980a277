//! Worlds in which memory is scarce and newcomers never end: does who asks for much of it wait for ever?

use sterna_scheduler::{
    CostModel, Event, Limits, Micros, Plan, Policy, Request, Sampled, Scheduler, TenantId,
    TenantPolicy, TokenId,
};

use crate::model::Rng;

/// As the scheduler's: times that others go past who was once the first of its band.
const LONG_PATIENCE: u32 = 256;

const NEWCOMERS: u32 = 600;

/// A world of this kind.
pub(crate) struct CrowdedWorld {
    seed: u64,
    rng: Rng,
    pages: u32,
    scheduler: Scheduler,
    said: TokenId, // So that no two texts are alike.
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
        let mut rng = Rng(seed);
        let pages = rng.between(16, 32) as u32;
        let limits = Limits {
            pages,
            max_running: 16,
            max_queued: 1000,
            max_queued_time: Micros::MAX,
            step_tokens: 64,
            prefill_chunk: 64,
            max_sequence_tokens: 1000,
        };
        let mut scheduler = Scheduler::new(limits, Policy::default());
        scheduler.calibrate(CostModel::UNMEASURED);
        let all = (0..=NEWCOMERS).map(|id| (TenantId(id), TenantPolicy::default()));
        let all: Vec<_> = all.collect();
        assert_eq!(scheduler.set_tenants(&all), Ok(()));
        CrowdedWorld {
            seed,
            rng,
            pages,
            scheduler,
            said: 0,
            now: 0,
        }
    }

    /// S11: a request that was once the first of its band and lacks memory is passed by `LONG_PATIENCE` others at most,
    /// whoever they are. Its turn comes before the first hundred have gone by.
    pub(crate) fn run(mut self) {
        // Something to be ahead by, so that each newcomer comes before it.
        for _ in 0..20 {
            self.ask(0, 16, 8);
            self.step();
        }
        let most_tokens = 16 * u64::from(self.pages);
        let large = self.rng.between(most_tokens * 3 / 4, most_tokens - 20);
        self.ask(0, large, 4);
        let mut passed = 0;
        for newcomer in 1..=NEWCOMERS {
            let (prompt, answer) = (self.rng.between(10, 40), self.rng.between(4, 12));
            self.ask(newcomer, prompt, answer as u32);
            for _ in 0..2 {
                passed += self.step();
            }
            let own = self.scheduler.tenant(TenantId(0));
            if own.queued == 0 {
                break;
            }
            assert!(passed <= LONG_PATIENCE + 100, "S11: passed by {passed}");
        }
        let own = self.scheduler.tenant(TenantId(0));
        assert_eq!(own.queued, 0, "S11: it waits still");
    }

    fn ask(&mut self, tenant: u32, prompt: u64, answer: u32) {
        let first = self.said;
        self.said += prompt as TokenId;
        let request = Request {
            prompt: (first..self.said).collect(),
            max_new_tokens: answer,
            tenant: TenantId(tenant),
            ..Request::default()
        };
        let welcome = self.scheduler.submit(self.now, request);
        assert!(welcome.is_ok(), "{welcome:?}");
    }

    /// Returns how many were admitted.
    fn step(&mut self) -> u32 {
        if let Plan::Step(step) = self.scheduler.plan(self.now) {
            self.now += step.predicted();
            let mut sampled = Vec::new();
            for row in step.batch().rows().iter().filter(|row| row.logits > 0) {
                self.said += 1;
                sampled.push(Sampled::Token(self.said));
                sampled.extend((1..row.logits).map(|_| Sampled::Void));
            }
            step.commit(self.now, &sampled);
        }
        self.scheduler.check();
        let admitted = |event: &Event| matches!(event, Event::Admitted { .. });
        self.scheduler.events().filter(admitted).count() as u32
    }
}
