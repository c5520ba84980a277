//! A steady step allocates nothing: not in the plan, the forward pass, the draws or the commit, and
//! not when it hands work to threads.
//!
//! The test runs the engine's step loop without the engine thread. Around each step, that thread
//! allocates the list of updates for its one message, and the channel allocates a block for every
//! few messages.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

#[path = "harness/grammars.rs"]
mod grammars;

use std::alloc::System;
use std::path::Path;
use std::sync::Arc;

use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use sterna::checkpoint::Source;
use sterna::constraint::{Grammar, GrammarSource};
use sterna::engine::{
    Diffusion, Direct, DrawOutcome, Forward, Limits, LogitRows, Policy, SamplingParams,
    StepOutcome, Unmasking,
};
use sterna::model::{HeadChoice, KvStore, LoadOptions, Model, WantedLogits, toy};
use sterna::text::TextFiles;
use sterna_kernels::{Isa, Kernels, KvDtype};
use sterna_scheduler::{Batch, PAGE_TOKENS, StateLimits, TokenId};
use tokio::runtime::Builder;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// The number of counted steps, over several pages of every sequence.
const STEPS: usize = 5 * PAGE_TOKENS;

const LIMITS: Limits = Limits {
    pages: 512,
    max_running: 16,
    max_queued: 16,
    max_queued_time: u64::MAX,
    step_tokens: 256,
    prefill_chunk: 64,
    max_sequence_tokens: 1000,
    states: None,
    diffusion: None,
};

/// For models with recurrent layers. A slab stays at the end of an answer, and none of these ends.
const STATES: StateLimits = StateLimits {
    slabs: 32,
    in_place_tokens: 1,
    trial_interval: 2048,
};

/// A model that, after each forward pass, hands an empty job to every thread.
struct JobsForAll(Model);

impl Forward for JobsForAll {
    type KvStore = KvStore;

    fn vocabulary(&self) -> usize {
        Forward::vocabulary(&self.0)
    }

    fn new_kv_store(&self, limits: &Limits) -> std::io::Result<KvStore> {
        Forward::new_kv_store(&self.0, limits)
    }

    fn prepare(&mut self) -> bool {
        Forward::prepare(&mut self.0)
    }

    fn max_wanted_rows(&self) -> usize {
        Forward::max_wanted_rows(&self.0)
    }

    fn want_logits(&mut self, wanted: &WantedLogits) {
        Forward::want_logits(&mut self.0, wanted);
    }

    fn forward(&mut self, batch: &Batch, kv_store: &mut KvStore) -> impl LogitRows {
        let mut logits = Forward::forward(&mut self.0, batch, kv_store);
        let jobs = 0..logits.workers();
        logits.share(jobs, |job, _| assert!(job < 8));
        logits
    }
}

/// Compiles a grammar without an end for a model with `vocabulary` tokens.
fn grammar(vocabulary: usize) -> Grammar {
    let files = TextFiles {
        tokenizer: include_bytes!("fixtures/bitnet-packed/tokenizer.json"),
        config: None,
        chat_template: None,
        tool_template: None,
    };
    let (tokenizer, _) = files.load(vocabulary as u32).unwrap();
    let grammars = grammars::start(&Arc::new(tokenizer), &[]);
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    let source = GrammarSource::regex("([a-z]{1,8} )*").unwrap();
    runtime.block_on(grammars.compile(0, source)).unwrap()
}

/// Returns greedy and plain sampling, each filter and penalty, and a grammar. None reports
/// log-probabilities, which leave with the token.
fn parameter_sets(vocabulary: usize) -> Vec<SamplingParams> {
    let plain = SamplingParams::default();
    let mut sets = vec![plain; 8];
    sets[0].temperature = 0.0;
    sets[1].temperature = 0.7;
    sets[2].top_k = 5;
    sets[3].top_p = 0.9;
    sets[4].min_p = 0.1;
    (sets[5].repetition_penalty, sets[5].top_p) = (1.2, 0.8);
    (sets[6].frequency_penalty, sets[6].top_k) = (0.3, 40);
    (sets[6].top_p, sets[6].logit_bias) = (0.7, vec![(3, 1.0)]);
    sets[7].grammar = Some(grammar(vocabulary));
    sets
}

fn model(
    source: &Source,
    threads: usize,
    exact_head_bytes: usize,
    kv_dtype: KvDtype,
) -> JobsForAll {
    let kernels = Kernels::new(Isa::best()).unwrap();
    let options = LoadOptions {
        exact_head_bytes,
        head_choice: HeadChoice::LikelyRows,
        kv_dtype,
        ..LoadOptions::new(kernels, threads)
    };
    JobsForAll(Model::load(source, options).unwrap())
}

/// Runs one step. Returns whether all of `sequences` decoded.
fn step(direct: &mut Direct<'_, JobsForAll>, sequences: usize) -> bool {
    let StepOutcome { size, .. } = direct.step().expect("no sequence has ended");
    let draws = direct.draws();
    assert_eq!(draws.len(), size.logits, "each row of logits has a draw");
    let mut draws = draws.iter();
    assert!(draws.all(|draw| matches!(draw.outcome, DrawOutcome::Token(_))));
    (size.tokens, size.logits) == (sequences, sequences)
}

/// Fails if a pass over blocks of `model` allocates in a steady state.
fn check_blocks(mut model: JobsForAll, rules: Diffusion) {
    const SEQUENCES: usize = 4;
    let limits = Limits {
        diffusion: Some(rules),
        ..LIMITS
    };
    let vocabulary = model.vocabulary();
    let mut direct = Direct::new(&mut model, limits, Policy::default());
    for index in 0..SEQUENCES {
        let params = SamplingParams {
            temperature: index as f32 / 4.0,
            ..SamplingParams::default()
        };
        let params = params.by_diffusion(Unmasking {
            mask_token: rules.mask_token,
            threshold: 0.9,
        });
        let token = |i: usize| ((i * 7 + 31 * index) % (vocabulary - 1)) as TokenId;
        direct
            .submit((0..20).map(token).collect(), 900, params)
            .unwrap();
    }
    // Without logits, a pass computes the keys and values of a whole block.
    let mut pass = || direct.step().expect("no sequence has ended").size.logits;
    for _ in 0..3 * PAGE_TOKENS {
        pass();
    }
    let (mut count, mut logits) = (0, 0);
    for _ in 0..STEPS {
        let allocations = Region::new(ALLOCATOR);
        logits += pass();
        count += allocations.change().allocations;
    }
    assert_eq!(count, 0, "{rules:?}");
    assert!(logits > SEQUENCES * STEPS, "all sequences fill blocks");
}

/// Fails if a steady step of `model` allocates.
fn check(mut model: JobsForAll, case: &str) {
    let sets = parameter_sets(model.vocabulary());
    check_sets(&mut model, sets, case);
}

/// Checks sequences with these parameters. What makes steps faster is prepared before.
fn check_sets(model: &mut JobsForAll, sets: Vec<SamplingParams>, case: &str) {
    let policy = Policy {
        max_draft: 0, // Checking draft tokens copies the history, which grows.
        ..Policy::default()
    };
    let vocabulary = model.vocabulary();
    let limits = Limits {
        states: model.0.config().recurrent.as_ref().map(|_| STATES),
        ..LIMITS
    };
    let mut direct = Direct::new(model, limits, policy);
    let sequences = sets.len();
    for (index, params) in (0..).zip(sets) {
        let token = |i: usize| ((i * 7 + 31 * index) % vocabulary) as TokenId;
        direct
            .submit((0..20).map(token).collect(), 900, params)
            .unwrap();
    }
    // Steady once all sequences have decoded for a few pages.
    let mut quiet = 0;
    while quiet < 3 * PAGE_TOKENS {
        let all_decode = step(&mut direct, sequences);
        quiet = if all_decode { quiet + 1 } else { 0 };
        while direct.model().prepare() {}
    }
    let mut count = 0;
    for _ in 0..STEPS {
        direct.wait_for_masks(); // The mask thread allocates.
        let allocations = Region::new(ALLOCATOR);
        assert!(step(&mut direct, sequences), "all sequences decode");
        count += allocations.change().allocations;
    }
    assert_eq!(count, 0, "{case}");
}

#[test]
fn a_steady_step_allocates_nothing() {
    // The exact head, and the head that is screened in 8 bits first.
    let cases = [(1, usize::MAX), (2, usize::MAX), (1, 0), (2, 0), (3, 0)];
    let cases = cases.map(|(threads, head)| (threads, head, KvDtype::F16));
    let formats = KvDtype::ALL[1..]
        .iter()
        .map(|&dtype| (2, usize::MAX, dtype));
    for (threads, exact_head_bytes, kv_dtype) in cases.into_iter().chain(formats) {
        let model = model(&toy::source(), threads, exact_head_bytes, kv_dtype);
        let case = format!("{threads} threads, head {exact_head_bytes}, {kv_dtype}");
        check(model, &case);
    }
    // These draws need few logits. The first steps show which columns of the head are large.
    for threads in [1, 2] {
        let mut model = model(&toy::source(), threads, 0, KvDtype::F16);
        let mut sets = vec![SamplingParams::greedy(); 4];
        (sets[1].temperature, sets[1].top_k) = (0.8, 20);
        (sets[2].temperature, sets[2].top_p) = (0.5, 0.99);
        (sets[3].repetition_penalty, sets[3].presence_penalty) = (1.1, 0.5);
        check_sets(&mut model, sets, &format!("{threads} threads, likely rows"));
        assert!(model.0.likely_use().steps >= STEPS as u64);
    }
    // The counts are of the whole process, so all cases are one test.
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    for name in ["bitnet-low-rank", "qwen35-group64-tied"] {
        let source = Source::directory(fixtures.join(name));
        for threads in [1, 2] {
            let model = model(&source, threads, usize::MAX, KvDtype::F16);
            check(model, &format!("{threads} threads, {name}"));
        }
    }
    for (is_causal, has_block_cache) in [(true, false), (true, true), (false, true)] {
        let model = model(&toy::source(), 2, usize::MAX, KvDtype::F16);
        let rules = Diffusion {
            block: PAGE_TOKENS as u32, // The tokens behind a page in a longer block are copied.
            part: 4,
            mask_token: model.vocabulary() as TokenId - 1,
            is_causal,
            has_block_cache,
        };
        check_blocks(model, rules);
    }
}
