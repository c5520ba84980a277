//! A request that is cancelled in a step holds no page in the next one.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use sterna::engine::{
    CostModel, Engine, EngineConfig, EngineHandle, EventStream, GenerationRequest, Limits, Policy,
    SamplingParams, TenantId, TokenId,
};
use sterna::metrics::{Identity, Metrics};
use sterna_random::Random;
use sterna_scheduler::PAGE_TOKENS;

use crate::model::{PageModel, Rule};
use crate::requests::words;
use crate::server::ROOMY;
use crate::{PATIENCE, effort};

/// The first token of the request that waits for pages. The model never says it.
const MARK: TokenId = 0;

/// An engine whose steps report whether a row computes [`MARK`], then wait.
struct Stepped {
    handle: EngineHandle,
    steps: Receiver<bool>,
    pass: Sender<()>,
}

fn start(pages: u32) -> Stepped {
    let (entered, steps) = channel();
    let (pass, passed) = channel();
    let model = PageModel::watched(Rule::Hash, move |batch| {
        let is_marked = |row| batch.tokens(row).contains(&MARK);
        // Both channels are closed when the test has ended.
        let _ = entered.send(batch.rows().iter().any(is_marked));
        let _ = passed.recv();
    });
    let limits = Limits {
        pages,
        max_sequence_tokens: pages * PAGE_TOKENS as u32,
        ..ROOMY
    };
    let config = EngineConfig {
        limits,
        policy: Policy {
            max_draft: 0,
            ..Policy::default()
        },
        public_prefixes: Vec::new(),
        cost: Some(CostModel::UNMEASURED),
        submit_queue: 64,
        drain_limit: PATIENCE,
        stall_limit: PATIENCE,
        pin: false,
    };
    let metrics = Metrics::new(&Identity::default());
    let (handle, _threads) = Engine::start(model, config, metrics).unwrap();
    Stepped {
        handle,
        steps,
        pass,
    }
}

impl Stepped {
    fn submit(&self, prompt: Vec<TokenId>, max_new_tokens: u32) -> EventStream {
        let request = GenerationRequest {
            prompt,
            sampling: SamplingParams::greedy(),
            max_new_tokens,
            is_length_given: false,
            min_new_tokens: max_new_tokens,
            stop_tokens: Vec::new(),
            tenant: TenantId(0),
            sub_tenant: None,
            band: None,
            arrived: Instant::now(),
            first_token_within: None,
            ends_within: None,
        };
        self.handle.submit(request).unwrap()
    }

    /// Waits until the next step has begun. Returns whether it computes the marked request.
    fn next_step(&self) -> bool {
        self.steps.recv_timeout(PATIENCE).expect("a step begins")
    }

    fn let_pass(&self) {
        self.pass.send(()).unwrap();
    }
}

#[test]
fn the_pages_of_a_cancelled_request_are_usable_in_the_next_step() {
    let mut random = Random::from_env();
    for _ in 0..effort("STERNA_CANCELS", 100) {
        let pages = random.between(3, 12) as u32;
        let engine = start(pages);
        // These requests hold all pages and need all of them.
        let tokens = u64::from(pages) * PAGE_TOKENS as u64;
        let prompt = words(&mut random, tokens - PAGE_TOKENS as u64 + 1);
        let holding = engine.submit(prompt, PAGE_TOKENS as u32 - 1);
        assert!(!engine.next_step());
        let mut prompt = words(&mut random, tokens / 2);
        prompt[0] = MARK;
        let _waiting = engine.submit(prompt, 2);
        for _ in 0..random.between(1, 6) {
            engine.let_pass();
            assert!(!engine.next_step(), "{pages} pages: there is no page left");
        }
        drop(holding);
        engine.let_pass();
        assert!(engine.next_step(), "{pages} pages: a page is still held");
    }
}
