//! Block diffusion: the tokens and the number of passes of the reference, which computes everything
//! again in each pass, with and without the block cache. The demo was trained for causal keys and
//! values, and any model can be run with those of whole blocks too.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use sterna::checkpoint::ModelConfig;
use sterna::engine::{
    Diffusion, Direct, DrawOutcome, Limits, Policy, SamplingParams, TokenId, Unmasking,
};
use sterna::model::{LoadOptions, Model};
use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::{Batch, PAGE_TOKENS, SequenceId};

use super::log_softmax;
use super::steps::{Sequence, step};

/// What the reference did.
#[derive(Deserialize)]
struct Expected {
    text: Vec<TokenId>,
    cases: Vec<Case>,
    parts: Vec<Part>,
}

#[derive(Deserialize)]
struct Case {
    block: u32,
    part: u32,
    threshold: f32,
    is_causal: bool,
    has_cache: bool,
    /// The length of the prompt, which is the beginning of the text.
    prompt: usize,
    passes: usize,
    output: Vec<TokenId>,
}

/// A pass over a part of the block after the first `begin` tokens of the text.
#[derive(Clone, Deserialize)]
struct Part {
    is_causal: bool,
    block: u32,
    begin: usize,
    /// The tokens of the block in an earlier pass over all of it.
    seen: Vec<TokenId>,
    /// The position of the part.
    start: usize,
    tokens: Vec<TokenId>,
    /// By token of the part: the likeliest next tokens, and their log-probabilities.
    best: Vec<Vec<TokenId>>,
    logprobs: Vec<Vec<f32>>,
}

impl Case {
    /// Returns the number of steps of a request that runs alone: each pass of the reference, and
    /// the whole blocks of a prompt that has a rest.
    fn steps(&self) -> usize {
        let block = self.block as usize;
        let has_both = self.prompt > block && !self.prompt.is_multiple_of(block);
        self.passes + usize::from(has_both)
    }

    fn limits(&self, mask_token: TokenId) -> Limits {
        Limits {
            pages: 256,
            max_running: 8,
            max_queued: 8,
            max_queued_time: u64::MAX,
            step_tokens: 512,
            prefill_chunk: 512,
            max_sequence_tokens: 1024,
            states: None,
            diffusion: Some(Diffusion {
                block: self.block,
                part: self.part,
                mask_token,
                is_causal: self.is_causal,
                has_block_cache: self.has_cache,
            }),
        }
    }
}

/// The mean difference in log-probability that rounding may make.
const CLOSE: f64 = 0.1;

/// Returns the output of a request, and the number of steps.
fn run(
    model: &mut Model,
    limits: Limits,
    (prompt, threshold): (&[TokenId], f32),
    output: usize,
) -> (Vec<TokenId>, usize) {
    let mask_token = limits.diffusion.unwrap().mask_token;
    let unmasking = Unmasking {
        threshold,
        mask_token,
    };
    let params = SamplingParams::greedy().by_diffusion(unmasking);
    let mut direct = Direct::new(model, limits, Policy::default());
    let id = direct
        .submit(prompt.to_vec(), output as u32, params)
        .unwrap();
    let (mut tokens, mut steps, mut next) = (BTreeMap::new(), 0, prompt.len());
    while direct.step().is_some() {
        steps += 1;
        for draw in direct.draws() {
            assert_eq!(draw.sequence, id);
            let (position, token) = match &draw.outcome {
                DrawOutcome::Token(output) => (next, output.token),
                DrawOutcome::Unmasked {
                    position, output, ..
                } => (*position, output.token),
                DrawOutcome::Void => continue,
                other => panic!("{other:?}"),
            };
            tokens.insert(position, token);
        }
        next = prompt.len() + tokens.len(); // The draw after whole blocks is of the next token.
    }
    let tokens: Vec<TokenId> = tokens.into_values().take(output).collect();
    (tokens, steps)
}

/// Reads what the reference did.
fn expected() -> Expected {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/demo/blocks.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn demo(isa: Isa) -> Model {
    let options = LoadOptions {
        max_step_tokens: 512,
        max_logits_rows: 128,
        ..LoadOptions::new(Kernels::new(isa).unwrap(), 2)
    };
    Model::load(&sterna::demo::source(), options).unwrap()
}

#[test]
fn blocks_are_filled_as_the_reference_fills_them() {
    let expected = expected();
    let config = ModelConfig::read(&sterna::demo::source()).unwrap();
    let mask_token = config.masked_blocks.unwrap().mask_token.unwrap();
    assert!(expected.cases.len() > 40, "enough cases");
    for isa in Isa::available() {
        let mut model = demo(isa);
        // The other instruction sets differ by no bit, as other tests say.
        let step = if isa == Isa::best() { 1 } else { 20 };
        for case in expected.cases.iter().step_by(step) {
            let prompt = &expected.text[..case.prompt];
            let limits = case.limits(mask_token);
            let (output, steps) = run(
                &mut model,
                limits,
                (prompt, case.threshold),
                case.output.len(),
            );
            let what = format!(
                "{isa}: {} tokens, blocks of {}/{}, above {}, causal {}, cache {}",
                case.prompt, case.block, case.part, case.threshold, case.is_causal, case.has_cache
            );
            assert_eq!(output, case.output, "{what}");
            assert_eq!(steps, case.steps(), "{what}");
        }
    }
}

#[test]
fn a_part_of_a_block_attends_to_the_rest_as_the_last_pass_over_the_block_left_it() {
    let Expected { text, parts, .. } = expected();
    for isa in Isa::available() {
        let mut model = demo(isa);
        for part in &parts {
            let what = format!("{isa}: causal {}", part.is_causal);
            let mean = mean_difference(part, &part_logits(&mut model, &text, part));
            println!("{what}: {mean:.3}");
            assert!(mean < CLOSE, "{what}: {mean}");
            // The pass that left the rest matters: else a wrong one would be as close.
            let seen = text[part.begin..part.begin + part.seen.len()].to_vec();
            let other = Part {
                seen,
                ..part.clone()
            };
            let mean = mean_difference(part, &part_logits(&mut model, &text, &other));
            assert!(mean > 4.0 * CLOSE, "{what}: {mean} with another rest");
        }
    }
}

/// Returns the logits of a pass over a part of a block, after the passes before it.
fn part_logits(model: &mut Model, text: &[TokenId], part: &Part) -> Vec<Vec<f32>> {
    let size = part.block as usize;
    let pages = Sequence::new(0, 0, vec![0; part.begin + size]).pages;
    let mut kv = model.new_kv_store(pages.len()).unwrap();
    let id = SequenceId::new(0, 0);
    let covered = |end: usize| &pages[..end.div_ceil(PAGE_TOKENS)];
    let mut batch = Batch::new();
    let mut rows = Vec::new();
    batch.push_row(id, 0, &text[..part.begin], covered(part.begin), 0);
    batch.set_block(if part.is_causal { 0 } else { part.block });
    step(model, &batch, &mut kv, |_, _| ());
    batch.clear();
    batch.push_part(id, part.begin, &part.seen, &pages, size);
    step(model, &batch, &mut kv, |_, _| ());
    batch.clear();
    batch.push_part(id, part.start, &part.tokens, &pages, size);
    step(model, &batch, &mut kv, |_, logits| rows.push(logits));
    rows
}

/// Returns the mean difference in log-probability from the reference's likeliest tokens.
fn mean_difference(part: &Part, logits: &[Vec<f32>]) -> f64 {
    assert_eq!(logits.len(), part.tokens.len());
    let mut differences = Vec::new();
    for ((row, best), wanted) in logits.iter().zip(&part.best).zip(&part.logprobs) {
        let got: Vec<f64> = log_softmax(row).collect();
        let pairs = best.iter().zip(wanted);
        differences
            .extend(pairs.map(|(&token, wanted)| (got[token as usize] - f64::from(*wanted)).abs()));
    }
    differences.iter().sum::<f64>() / differences.len() as f64
}
