//! Checks that the engine computes the right tokens, before anything is timed.
//!
//! The checks compare greedy tokens and the bits of their log-probabilities, so one wrong sum
//! shows.

use std::error::Error;
use std::fmt;

use sterna_kernels::{Isa, Kernels, KvDtype};
use sterna_random::Random;
use sterna_scheduler::PAGE_TOKENS;

use super::workload::{random_tokens, untimed_limits, untimed_policy, with_states};
use crate::checkpoint::synthetic::{ExpertSizes, RecurrentHeads, Shape};
use crate::checkpoint::{LoadError, ModelConfig, Source};
use crate::demo;
use crate::engine::{Direct, Draw, DrawOutcome, Forward, SamplingParams, TokenId};
use crate::model::{LoadOptions, Model};

/// Three prompts and the demo's answers, as Hugging Face `transformers` computes them. Each answer
/// is cut before the first token that rounding errors could change (`tests/fixtures/demo`).
pub const DEMO_ANSWERS: [(&[TokenId], &[TokenId]); 3] = [
    (
        &[
            2040, 285, 257, 382, 357, 258, 677, 601, 13, 2042, 286, 257, 315, 263, 288, 339, 289,
            1538, 30, 2042, 284, 257,
        ],
        &[300, 339, 289, 1538, 263, 492, 310, 256, 13, 2042],
    ),
    (
        &[
            2040, 286, 257, 315, 263, 1051, 378, 1051, 30, 2042, 284, 257, 37, 336, 13, 2042, 286,
            257, 433, 1329, 680, 30, 2042, 284, 257,
        ],
        &[750, 409, 352, 574, 263, 1465, 13, 2042],
    ),
    (
        &[2040, 286, 257, 1186, 357, 298, 30, 2042, 284, 257],
        &[40, 371],
    ),
];

/// Up to this many bytes of weights, the model itself is computed a second time in plain Rust. A
/// larger model would take minutes, so one layer of the same widths is computed instead.
const SMALL_MODEL_BYTES: usize = 32 << 20;
/// The vocabulary of that layer's model.
const LAYER_VOCABULARY: usize = 512;

/// Lengths of the prompts: less than one page, more than one, more than two, none a multiple of
/// another.
const PROMPT_LENGTHS: [usize; 3] = [5, 23, 37];
const NEW_TOKENS: usize = 4;

/// The prefill chunk with which one step computes all prompts.
const WHOLE: usize = usize::MAX;

/// A greedy token and the bits of its log-probability; `None` if no token could be drawn.
type GreedyToken = Option<(TokenId, u32)>;

/// Two answers that should be equal differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// What was compared.
    pub check: &'static str,
    /// The index of the prompt.
    pub prompt: usize,
    /// The index of the token in the answer.
    pub token: usize,
    /// The right token.
    pub expected: Option<TokenId>,
    /// The computed token.
    pub computed: Option<TokenId>,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "The engine computes wrong tokens, so nothing was timed. \
             Check '{}', prompt {}, token {}: ",
            self.check, self.prompt, self.token
        )?;
        let name = |token: Option<TokenId>| token.map_or("none".to_owned(), |id| id.to_string());
        let (expected, computed) = (name(self.expected), name(self.computed));
        if expected == computed {
            write!(f, "token {expected} has another log-probability")
        } else {
            write!(f, "{computed} instead of {expected}")
        }
    }
}

impl Error for Mismatch {}

/// Checks `model`, loaded from `source` with `options`, and its instruction set. Returns a
/// description of each check that passed.
///
/// # Errors
/// A [`Mismatch`], or why a model to compare with cannot be loaded.
pub fn check(
    model: &mut Model,
    source: &Source,
    options: LoadOptions,
) -> Result<Vec<String>, Box<dyn Error>> {
    let isa = options.kernels.isa();
    let options = LoadOptions {
        progress: false,
        ..options
    };
    let mut passed = Vec::new();
    // The reference keeps keys and values in full precision, to which f16 is closest.
    let precise = LoadOptions {
        kv_dtype: KvDtype::F16,
        ..options
    };
    check_demo(&mut Model::load(&demo::source(), precise)?)?;
    passed.push("the demo model answers like the reference".to_owned());
    if isa != Isa::Scalar {
        let scalar = LoadOptions {
            kernels: Kernels::new(Isa::Scalar).expect("every machine runs plain Rust"),
            ..options
        };
        let compare = |source: &Source| -> Result<(), Box<dyn Error>> {
            let mut model = Model::load(source, options)?;
            let mut reference = Model::load(source, scalar)?;
            Ok(check_isa(&mut model, &mut reference)?)
        };
        if model.weight_bytes() <= SMALL_MODEL_BYTES {
            compare(source)?;
            passed.push(format!("{isa} computes the same bits as plain Rust"));
        } else {
            compare(&one_layer(model.config())?)?;
            passed.push(format!(
                "{isa} computes the same bits as plain Rust in one layer of these widths"
            ));
        }
    }
    check_batching(model)?;
    passed.push("answers are the same alone, batched and chunked".to_owned());
    Ok(passed)
}

/// Checks that the demo gives its recorded answers.
///
/// # Errors
/// If it does not.
pub fn check_demo<F: Forward>(demo: &mut F) -> Result<(), Mismatch> {
    for (index, (prompt, answer)) in DEMO_ANSWERS.iter().enumerate() {
        let prompts = [prompt.to_vec()];
        let drawn = answers(demo, &prompts, WHOLE, answer.len());
        let without_bits = |token: &GreedyToken| token.map(|(token, _)| (token, 0));
        let computed = drawn[0].iter().map(without_bits).collect();
        let expected = answer.iter().map(|&token| Some((token, 0))).collect();
        compare("the demo and its reference", &[expected], &[computed]).map_err(|mismatch| {
            Mismatch {
                prompt: index,
                ..mismatch
            }
        })?;
    }
    Ok(())
}

/// Checks that two models with the same weights give the same answers.
///
/// # Errors
/// If they do not. `reference` is the model that is right.
pub fn check_isa<F: Forward, G: Forward>(model: &mut F, reference: &mut G) -> Result<(), Mismatch> {
    let prompts = prompts(model.vocabulary());
    let computed = answers(model, &prompts, WHOLE, NEW_TOKENS);
    let expected = answers(reference, &prompts, WHOLE, NEW_TOKENS);
    compare("this instruction set and plain Rust", &expected, &computed)
}

/// Checks that answers depend neither on other requests in the batch nor on chunked prefill.
///
/// # Errors
/// If they do.
pub fn check_batching<F: Forward>(model: &mut F) -> Result<(), Mismatch> {
    let prompts = prompts(model.vocabulary());
    let mut alone = Vec::new();
    for prompt in prompts.chunks(1) {
        alone.extend(answers(model, prompt, WHOLE, NEW_TOKENS));
    }
    let batched = answers(model, &prompts, WHOLE, NEW_TOKENS);
    compare("alone and batched", &alone, &batched)?;
    let chunked = answers(model, &prompts, PAGE_TOKENS, NEW_TOKENS);
    compare("alone and chunked", &alone, &chunked)
}

/// Returns the greedy answers to `prompts`, submitted at once. A step prefills `chunk` tokens.
fn answers<F: Forward>(
    model: &mut F,
    prompts: &[Vec<TokenId>],
    chunk: usize,
    new_tokens: usize,
) -> Vec<Vec<GreedyToken>> {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) + new_tokens;
    let prompt_tokens = prompts.iter().map(Vec::len).sum::<usize>();
    let chunk = chunk.min(prompt_tokens).max(PAGE_TOKENS);
    let pages = prompts.len() * (longest.div_ceil(PAGE_TOKENS) + 1);
    let limits = untimed_limits(prompts.len(), pages, chunk, longest);
    let limits = with_states(limits, model);
    let mut direct = Direct::new(model, limits, untimed_policy());
    let submit = |prompt: &Vec<TokenId>| {
        let params = SamplingParams {
            logprobs: Some(0),
            ..SamplingParams::greedy()
        };
        let id = direct.submit(prompt.clone(), new_tokens as u32, params);
        id.expect("the limits allow it")
    };
    let ids: Vec<_> = prompts.iter().map(submit).collect();
    let mut answers = vec![Vec::new(); prompts.len()];
    while direct.step().is_some() {
        for draw in direct.draws() {
            let index = ids.iter().position(|&id| id == draw.sequence);
            answers[index.expect("no other request runs")].push(greedy_token(draw));
        }
    }
    answers
}

fn greedy_token(draw: &Draw) -> GreedyToken {
    match &draw.outcome {
        DrawOutcome::Token(output) => {
            let logprob = output.logprob.expect("the request wants it");
            Some((output.token, logprob.to_bits()))
        }
        DrawOutcome::Scored(_)
        | DrawOutcome::Unmasked { .. }
        | DrawOutcome::State { .. }
        | DrawOutcome::Failed(_)
        | DrawOutcome::Deferred
        | DrawOutcome::Void => None,
    }
}

fn compare(
    check: &'static str,
    expected: &[Vec<GreedyToken>],
    computed: &[Vec<GreedyToken>],
) -> Result<(), Mismatch> {
    for (prompt, (expected, computed)) in expected.iter().zip(computed).enumerate() {
        for token in 0..expected.len().max(computed.len()) {
            let at = |answer: &[GreedyToken]| answer.get(token).copied().flatten();
            let (expected, computed) = (at(expected), at(computed));
            if expected != computed || expected.is_none() {
                return Err(Mismatch {
                    check,
                    prompt,
                    token,
                    expected: expected.map(|(token, _)| token),
                    computed: computed.map(|(token, _)| token),
                });
            }
        }
    }
    Ok(())
}

fn prompts(vocabulary: usize) -> Vec<Vec<TokenId>> {
    let mut random = Random::new(4);
    let lengths = PROMPT_LENGTHS.iter();
    lengths
        .map(|&len| random_tokens(&mut random, len, vocabulary))
        .collect()
}

/// Returns a model of one layer with the widths of another model. If that has recurrent layers, the
/// model has one of them too.
fn one_layer(config: &ModelConfig) -> Result<Source, LoadError> {
    let recurrent = config.recurrent.as_ref().map(|heads| RecurrentHeads {
        interval: 2,
        key_heads: heads.key_heads,
        value_heads: heads.value_heads,
        head_dim: heads.key_dim,
        taps: heads.taps,
    });
    let shape = Shape {
        name: "stand-in",
        architecture: config.architecture,
        vocab: LAYER_VOCABULARY,
        hidden: config.hidden,
        intermediate: config.intermediate,
        layers: 1 + usize::from(recurrent.is_some()),
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        max_position: 256,
        rope_theta: config.rope_theta,
        tied: true,
        group: None,
        recurrent,
        experts: config.experts.as_ref().map(|experts| ExpertSizes {
            count: experts.count,
            used: experts.used,
            intermediate: experts.intermediate,
        }),
    };
    let source = shape.in_memory(1);
    ModelConfig::read(&source)?;
    Ok(source)
}
