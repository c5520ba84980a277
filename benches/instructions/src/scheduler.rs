//! The scheduler's cases: steady decoding, one request admitted and cancelled, and one prompt found
//! in the prefix tree.

use std::hint::black_box;

use sterna_scheduler::{
    CostModel, Event, FinishReason, Limits, PAGE_TOKENS, Plan, Policy, Request, SAMPLING_UNIT,
    Sampled, Scheduler, SequenceId, TokenId,
};

use crate::{Case, Round};

const PROMPT_TOKENS: usize = 100;
const PREFIX_TOKENS: usize = 1024;
const MAX_NEW_TOKENS: u32 = 1_000;
const STEP_MICROS: u64 = 20_000;

/// Every sequence fills some pages in these rounds.
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
    let mut case = SchedulerCase::decoding(running);
    Box::new(move || {
        assert_eq!(
            case.step(),
            running as usize,
            "every sequence decodes, and nothing else happens"
        )
    })
}

/// Submits, admits and cancels one request beside 64 decodes.
fn come_and_go() -> Round {
    let mut case = SchedulerCase::decoding(64);
    Box::new(move || {
        let prompt = case.new_prompt(PROMPT_TOKENS);
        let id = case.submit(prompt);
        assert_eq!(
            case.step(),
            64 + PROMPT_TOKENS,
            "the whole prompt is in the step"
        );
        case.cancel(id);
    })
}

/// Submits and admits a request whose prompt is cached except the last token.
fn prefix_match() -> Round {
    let mut case = SchedulerCase::decoding(1);
    let prompt = case.new_prompt(PREFIX_TOKENS + 1);
    let first = case.submit(prompt.clone());
    while case.step() != 2 {}
    case.cancel(first);
    Box::new(move || {
        let id = case.submit(prompt.clone());
        assert_eq!(case.step(), 2, "one prompt token and one decode");
        let found = case.scheduler.events().any(|event| match event {
            Event::Admitted { cached_tokens, .. } => cached_tokens as usize == PREFIX_TOKENS,
            _ => false,
        });
        assert!(found, "the prefix is in the tree");
        case.cancel(id);
    })
}

/// A scheduler, its clock, and the memory for a step's samples.
struct SchedulerCase {
    scheduler: Scheduler,
    now: u64,
    prompts: u32,
    sampled: Vec<Sampled>,
}

impl SchedulerCase {
    /// Creates a scheduler in which `running` sequences decode.
    fn decoding(running: u32) -> SchedulerCase {
        let longest = 2 * PREFIX_TOKENS as u32;
        let limits = Limits {
            pages: (running + 8) * longest.div_ceil(PAGE_TOKENS as u32),
            max_running: running + 8,
            max_queued: running + 8,
            max_queued_time: u64::MAX,
            step_tokens: (running + 8) * PROMPT_TOKENS as u32,
            prefill_chunk: 512,
            max_sequence_tokens: longest,
            states: None,
            diffusion: None,
        };
        let mut scheduler = Scheduler::new(limits, Policy::default());
        // Steps cost almost nothing, so that time never limits admission.
        scheduler.calibrate(CostModel {
            rows: CostModel::roofline(1_000_000, 1_000),
            kilo_decode_keys: 0,
            kilo_chunk_keys: 0,
            head: 0,
            logit: 0,
            sampling: SAMPLING_UNIT,
        });
        let mut case = SchedulerCase {
            scheduler,
            now: 0,
            prompts: 0,
            sampled: Vec::new(),
        };
        for _ in 0..running {
            let prompt = case.new_prompt(PROMPT_TOKENS);
            case.submit(prompt);
        }
        while case.step() != running as usize {}
        case.scheduler.events().for_each(drop);
        case
    }

    /// Returns a prompt that no request had before.
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
            max_new_tokens: MAX_NEW_TOKENS,
            ..Request::default()
        };
        self.scheduler
            .submit(self.now, request)
            .expect("the queue has a free place")
    }

    /// Runs a step in which every sequence gets a new token. Returns the number of tokens in the
    /// step.
    fn step(&mut self) -> usize {
        self.now += STEP_MICROS;
        let Plan::Step(step) = self.scheduler.plan(self.now) else {
            panic!("the plan is idle");
        };
        let tokens = step.batch().token_count();
        self.sampled.clear();
        // All sampled tokens differ, so that no token is drafted.
        let tokens_drawn = (0..step.batch().logits_count())
            .map(|row| Sampled::Token(0x8000_0000 | (self.now as u32).wrapping_add(row as u32)));
        self.sampled.extend(tokens_drawn);
        step.commit(self.now, black_box(&self.sampled));
        tokens
    }

    fn cancel(&mut self, id: SequenceId) {
        assert!(self.scheduler.cancel(id, FinishReason::Cancelled));
        self.scheduler.events().for_each(drop);
    }
}
