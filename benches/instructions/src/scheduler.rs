//! The scheduler: steady decoding, a request that comes and goes, a prompt that is found in the prefix tree.

use std::hint::black_box;

use sterna_scheduler::{
    CostModel, Event, FinishReason, Limits, PAGE_TOKENS, Plan, Policy, Request, Sampled, Scheduler,
    SequenceId, TokenId,
};

use crate::{Case, Round};

const PROMPT_TOKENS: usize = 100;
const PREFIX_TOKENS: usize = 1024;
const MOST_NEW_TOKENS: u32 = 1_000;
const STEP_MICROS: u64 = 20_000;

/// Every sequence fills some pages in these, as in any other rounds.
const DECODE_ROUNDS: u32 = 4 * PAGE_TOKENS as u32;

pub(crate) fn cases() -> impl Iterator<Item = Case> {
    let decodes = [64, 256].map(|running| Case {
        name: format!("scheduler/decode/running={running}"),
        rounds: DECODE_ROUNDS,
        prepare: Box::new(move || decode(running)),
    });
    let come_and_go = Case {
        name: "scheduler/come_and_go/running=64".to_owned(),
        rounds: PAGE_TOKENS as u32,
        prepare: Box::new(come_and_go),
    };
    let prefix_match = Case {
        name: format!("scheduler/prefix_match/tokens={PREFIX_TOKENS}"),
        rounds: PAGE_TOKENS as u32,
        prepare: Box::new(prefix_match),
    };
    decodes.into_iter().chain([come_and_go, prefix_match])
}

/// Plans and commits a step in which `running` sequences decode and nothing else happens.
fn decode(running: u32) -> Round {
    let mut world = World::decoding(running);
    Box::new(move || assert_eq!(world.step(), running as usize, "nothing else happens"))
}

/// Beside 64 that decode, a request comes, is admitted, and is cancelled.
fn come_and_go() -> Round {
    let mut world = World::decoding(64);
    Box::new(move || {
        let prompt = world.new_prompt(PROMPT_TOKENS);
        let id = world.submit(prompt);
        assert_eq!(
            world.step(),
            64 + PROMPT_TOKENS,
            "it is admitted, and whole"
        );
        world.cancel(id);
    })
}

/// A request comes whose prompt was computed before, but for the last token.
fn prefix_match() -> Round {
    let mut world = World::decoding(1);
    let prompt = world.new_prompt(PREFIX_TOKENS + 1);
    let first = world.submit(prompt.clone());
    while world.step() != 2 {}
    world.cancel(first);
    Box::new(move || {
        let id = world.submit(prompt.clone());
        assert_eq!(world.step(), 2, "one token is new, and another decodes");
        let found = world.scheduler.events().any(|event| {
            matches!(event, Event::Admitted { cached_tokens, .. } if cached_tokens as usize == PREFIX_TOKENS)
        });
        assert!(found, "the prefix is in the tree");
        world.cancel(id);
    })
}

/// A scheduler, its clock, and the memory for a step's results.
struct World {
    scheduler: Scheduler,
    now: u64,
    prompts: u32,
    sampled: Vec<Sampled>,
}

impl World {
    /// With so many sequences, all of which decode.
    fn decoding(running: u32) -> World {
        let longest = 2 * PREFIX_TOKENS as u32;
        let limits = Limits {
            pages: (running + 8) * longest.div_ceil(PAGE_TOKENS as u32),
            max_running: running + 8,
            max_queued: running + 8,
            max_queued_time: u64::MAX,
            step_tokens: (running + 8) * PROMPT_TOKENS as u32,
            prefill_chunk: 512,
            max_sequence_tokens: longest,
        };
        let mut scheduler = Scheduler::new(limits, Policy::default());
        // A machine so fast that its time never keeps anybody out.
        scheduler.calibrate(CostModel {
            rows: CostModel::roofline(1_000_000, 1_000),
            kilo_decode_keys: 0,
            kilo_chunk_keys: 0,
            head: 0,
            logit: 0,
        });
        let mut world = World {
            scheduler,
            now: 0,
            prompts: 0,
            sampled: Vec::new(),
        };
        for _ in 0..running {
            let prompt = world.new_prompt(PROMPT_TOKENS);
            world.submit(prompt);
        }
        while world.step() != running as usize {}
        world.scheduler.events().for_each(drop);
        world
    }

    /// A prompt that nobody had before.
    fn new_prompt(&mut self, tokens: usize) -> Vec<TokenId> {
        self.prompts += 1;
        let first = self.prompts.wrapping_mul(7919);
        (0..tokens as u32)
            .map(|position| first ^ position)
            .collect()
    }

    fn submit(&mut self, prompt: Vec<TokenId>) -> SequenceId {
        let request = Request {
            prompt,
            max_new_tokens: MOST_NEW_TOKENS,
            ..Request::default()
        };
        self.scheduler
            .submit(self.now, request)
            .expect("there is room")
    }

    /// One step, in which every sequence that wants a token gets a new one; how many tokens it had.
    fn step(&mut self) -> usize {
        self.now += STEP_MICROS;
        let Plan::Step(step) = self.scheduler.plan(self.now) else {
            panic!("there is work");
        };
        let tokens = step.batch().token_count();
        self.sampled.clear();
        // No two sequences say the same, nor one the same twice, so that nothing can be drafted.
        let said = (0..step.batch().logits_count())
            .map(|row| Sampled::Token(0x8000_0000 | (self.now as u32).wrapping_add(row as u32)));
        self.sampled.extend(said);
        step.commit(self.now, black_box(&self.sampled));
        tokens
    }

    fn cancel(&mut self, id: SequenceId) {
        assert!(self.scheduler.cancel(id, FinishReason::Cancelled));
        self.scheduler.events().for_each(drop);
    }
}
