//! Worlds in which one tenant fills the memory: another tenant still gets its guaranteed pages.

use sterna_random::Random;
use sterna_scheduler::{
    CostModel, Event, Growth, Limits, Micros, PAGE_TOKENS, Plan, Policy, Request, Sampled,
    Scheduler, SequenceId, TenantId, TenantPolicy, TokenId,
};

const STEPS: u64 = 1500;

/// The steps from a request of the guaranteed tenant to its end, at most: each of its tokens may
/// wait for a few steps of others.
const PATIENCE: u64 = 800;

/// The steps from a request of the guaranteed tenant to its admission, at most.
const ADMISSION: u64 = 20;

const HOG: TenantId = TenantId(0);
const GUARANTEED: TenantId = TenantId(1);

/// A scheduler whose first tenant always has long requests waiting.
pub(crate) struct GuaranteedWorld {
    seed: u64,
    random: Random,
    guaranteed: u32,
    scheduler: Scheduler,
    own: Option<(SequenceId, u64)>, // The guaranteed tenant's request, and the steps since.
    is_decoding: bool,              // That request has its first token.
    next_token: TokenId,            // Every token is a new one.
    now: Micros,
}

impl Drop for GuaranteedWorld {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to see this world again: STERNA_SEED={}", self.seed);
        }
    }
}

impl GuaranteedWorld {
    pub(crate) fn new(seed: u64) -> GuaranteedWorld {
        let mut random = Random::new(seed);
        let pages = random.between(16, 40) as u32;
        let guaranteed = random.between(4, u64::from(pages) * 3 / 4) as u32;
        let limits = Limits {
            pages,
            max_running: 64,
            max_queued: 16,
            max_queued_time: Micros::MAX,
            step_tokens: 64,
            prefill_chunk: 64,
            max_sequence_tokens: 16 * pages,
            states: None,
            diffusion: None,
        };
        let policy = Policy {
            growth: Growth::Minimal,
            max_draft: 0,
            ..Policy::default()
        };
        let mut scheduler = Scheduler::new(limits, policy);
        scheduler.calibrate(CostModel::UNMEASURED);
        let terms = TenantPolicy {
            guaranteed_pages: guaranteed,
            weight: 1000, // So that it never waits for its turn.
            ..TenantPolicy::default()
        };
        let tenants = [(HOG, TenantPolicy::default()), (GUARANTEED, terms)];
        assert_eq!(scheduler.set_tenants(&tenants), Ok(()));
        GuaranteedWorld {
            seed,
            random,
            guaranteed,
            scheduler,
            own: None,
            is_decoding: false,
            next_token: 0,
            now: 0,
        }
    }

    /// S15: The guaranteed tenant has one request at a time, which fits in its guarantee. It is
    /// never preempted, starts soon, decodes in every step, and ends in time.
    pub(crate) fn run(mut self) {
        let mut ended = 0;
        for _ in 0..STEPS {
            while self.scheduler.tenant(HOG).queued < 2 {
                let (prompt, output) = (self.random.between(1, 60), self.random.between(20, 200));
                self.submit(HOG, prompt, output);
            }
            if self.own.is_none() && self.random.percent(20) {
                let tokens = u64::from(self.guaranteed) * PAGE_TOKENS as u64;
                let prompt = self.random.between(1, tokens / 2);
                let output = self.random.between(1, tokens / 2);
                self.own = Some((self.submit(GUARANTEED, prompt, output), 0));
                self.is_decoding = false;
            }
            ended += self.step();
        }
        assert!(ended > 3, "S15: only {ended} guaranteed requests ended");
    }

    fn submit(&mut self, tenant: TenantId, prompt_tokens: u64, output_tokens: u64) -> SequenceId {
        let first = self.next_token;
        self.next_token += prompt_tokens as TokenId;
        let request = Request {
            prompt: (first..self.next_token).collect(),
            max_new_tokens: output_tokens as u32,
            tenant,
            ..Request::default()
        };
        let answer = self.scheduler.submit(self.now, request);
        answer.expect("the request fits alone, and the queue has room")
    }

    /// Runs a step. Returns the number of guaranteed requests that ended.
    fn step(&mut self) -> u32 {
        let waits = self.scheduler.tenant(GUARANTEED).queued > 0;
        let is_late = self.own.is_some_and(|(_, since)| since > ADMISSION);
        assert!(
            !waits || !is_late,
            "S15: a guaranteed request waits for memory"
        );
        let Plan::Step(step) = self.scheduler.plan(self.now) else {
            panic!("S3: the plan is idle although requests are waiting");
        };
        self.now += step.predicted();
        let rows = || step.batch().rows().iter();
        if let Some((id, since)) = &mut self.own {
            *since += 1;
            assert!(*since < PATIENCE, "S15: a guaranteed request does not end");
            let row = rows().find(|row| row.sequence == *id);
            assert!(
                row.is_some() || !self.is_decoding,
                "S15: a guaranteed decode waits for a page"
            );
            self.is_decoding |= row.is_some_and(|row| row.logits > 0);
        }
        let mut sampled = Vec::new();
        for _ in rows().filter(|row| row.logits > 0) {
            self.next_token += 1;
            sampled.push(Sampled::Token(self.next_token));
        }
        step.commit(self.now, &sampled);
        self.scheduler.check();
        let mut ended = 0;
        let own = self.own.map(|(id, _)| id);
        for event in self.scheduler.events() {
            match event {
                Event::Preempted { id } => assert_ne!(
                    Some(id),
                    own,
                    "S15: a request is preempted within its guarantee"
                ),
                Event::Finished { id, .. } if Some(id) == own => {
                    self.own = None;
                    ended += 1;
                }
                _ => {}
            }
        }
        ended
    }
}
