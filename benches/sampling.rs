//! Measures how long it takes to draw a token from a row of logits, with a vocabulary of 128,256.
//!
//! `cargo bench --bench sampling` prints the fastest of many rows for each set of parameters.
//! Without `--bench`, as in `cargo test --benches`, or with `--test`, everything runs once with a
//! small vocabulary and prints nothing, since the times would mean nothing.

use std::time::{Duration, Instant};

use sterna::engine::{BatchSampler, Continuation, LogitRows, SamplingParams};
use sterna_random::Random;
use sterna_scheduler::{Batch, OutputRules, PAGE_TOKENS, Page, SequenceId, TokenId};

const VOCABULARY: usize = 128_256;
const KNOWN_TOKENS: usize = 256;

/// The same row of logits for every step.
struct FixedRow(Vec<f32>);

impl LogitRows for &FixedRow {
    fn copy_row(&self, _: usize, logits: &mut [f32]) {
        logits.copy_from_slice(&self.0[..logits.len()]);
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |name: &str| arguments.iter().any(|argument| argument == name);
    let smoke = given("--test") || !given("--bench");
    let (vocabulary, draws) = if smoke { (1_000, 2) } else { (VOCABULARY, 100) };
    // The standard deviation of the logits. It is large if the model is sure of the next token.
    let spreads = [1.0, 3.0, 6.0];
    let rows = spreads.map(|spread| FixedRow(normal(vocabulary, spread)));
    if !smoke {
        println!("{:<28}{:>12}{:>12}{:>12}", "µs a row, spread", 1, 3, 6);
    }
    for (name, params) in parameter_sets() {
        let times = rows.each_ref().map(|row| fastest(row, &params, draws));
        let [flat, middle, peaked] = times.map(|time| time.as_nanos() as f64 / 1e3);
        if !smoke {
            println!("{name:<28}{flat:>12.1}{middle:>12.1}{peaked:>12.1}");
        }
    }
}

fn parameter_sets() -> Vec<(&'static str, SamplingParams)> {
    let with = |change: fn(&mut SamplingParams)| {
        let mut params = SamplingParams::default();
        change(&mut params);
        params
    };
    vec![
        ("greedy", SamplingParams::greedy()),
        (
            "greedy, 5 log-probabilities",
            with(|params| (params.temperature, params.logprobs) = (0.0, Some(5))),
        ),
        ("temperature 0.8", with(|params| params.temperature = 0.8)),
        ("top-p 0.9", with(|params| params.top_p = 0.9)),
        (
            "top-k 40, top-p 0.9",
            with(|params| (params.top_k, params.top_p) = (40, 0.9)),
        ),
        ("top-k 2,000", with(|params| params.top_k = 2_000)),
        ("top-k 100,000", with(|params| params.top_k = 100_000)),
        (
            "top-k 100,000, top-p, min-p",
            with(|params| {
                (params.top_k, params.top_p, params.min_p) = (100_000, 0.95, 0.01);
            }),
        ),
        ("min-p 0.05", with(|params| params.min_p = 0.05)),
        (
            "top-p 0.9, repetition 1.1",
            with(|params| (params.top_p, params.repetition_penalty) = (0.9, 1.1)),
        ),
    ]
}

fn fastest(row: &FixedRow, params: &SamplingParams, draws: u64) -> Duration {
    let known: Vec<TokenId> = (0..KNOWN_TOKENS as TokenId).collect();
    let pages: Vec<Page> = (0..)
        .map(Page::new)
        .take(KNOWN_TOKENS.div_ceil(PAGE_TOKENS))
        .collect();
    let mut batch = Batch::new();
    batch.push_row(
        SequenceId::new(0, 0),
        KNOWN_TOKENS - 1,
        &known[..1],
        &pages,
        1,
    );
    let mut sampler = BatchSampler::new(row.0.len());
    let rules = OutputRules {
        max_new_tokens: 1_000,
        ..OutputRules::default()
    };
    let draw = |seed| {
        let params = SamplingParams {
            seed,
            ..params.clone()
        };
        let started = Instant::now();
        sampler.sample(&batch, &mut &*row, |_| Continuation {
            params: &params,
            rules: &rules,
            known: &known,
            ahead: &[],
            prompt_tokens: KNOWN_TOKENS / 2,
            masks: None,
        });
        started.elapsed()
    };
    (0..draws).map(draw).min().unwrap_or_default()
}

/// Returns normally distributed numbers with mean 0, from a fixed seed.
fn normal(count: usize, spread: f64) -> Vec<f32> {
    let mut random = Random::new(1);
    let mut uniform = || ((random.next_u64() >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
    let one = |_| {
        let (radius, angle) = (uniform(), uniform());
        (spread * (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()) as f32
    };
    (0..count).map(one).collect()
}
