//! Does the engine compute what it should? Asked before anything is timed: a fast wrong answer is no figure.
//!
//! Greedy tokens and the bits of their log-probabilities are compared, so one wrong sum shows.

use std::error::Error;
use std::fmt;

use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::PAGE_TOKENS;

use super::measure::unhurried;
use super::seeded::Seeded;
use crate::demo;
use crate::engine::{Direct, Forward, Limits, SamplingParams, TokenId};
use crate::model::synthetic::Shape;
use crate::model::{LoadError, LoadOptions, Model, ModelConfig, Source, toy};

/// What the demo answers to three prompts, as Hugging Face `transformers` computes it: as far as its lead over the second best is beyond
/// doubt (`tests/fixtures/demo`).
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
        &[300, 651, 289, 950, 263, 630, 346, 304, 13, 2042],
    ),
    (
        &[2040, 286, 257, 1186, 357, 298, 30, 2042, 284, 257],
        &[
            40, 371, 288, 530, 815, 454, 11, 258, 474, 589, 454, 551, 695, 763, 13,
        ],
    ),
];

/// A model of up to so many bytes of weights is itself computed a second time in plain Rust. A larger one would take minutes: a single
/// layer of its widths stands for it.
const SMALL: usize = 32 << 20;
/// Token ids of that stand-in.
const STAND_IN_VOCABULARY: usize = 512;

/// Lengths of the prompts: less than a page, more than one, more than two, and none in step with another.
const PROMPTS: [usize; 3] = [5, 23, 37];
const NEW_TOKENS: usize = 4;

/// One greedy token and the bits of its log-probability; nothing where the logits allowed none.
type Drawn = Option<(TokenId, u32)>;

/// Two answers that should be equal are not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// What was compared.
    pub check: &'static str,
    /// Which of the prompts.
    pub prompt: usize,
    /// Which token of the answer.
    pub token: usize,
    /// What it should be.
    pub expected: Option<TokenId>,
    /// What was computed.
    pub computed: Option<TokenId>,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mismatch {
            check,
            prompt,
            token,
            ..
        } = self;
        write!(
            f,
            "nothing was timed, for what is computed is wrong: {check}, prompt {prompt}, token {token}: "
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

/// Checks `model`, loaded from `source` with `options`, and the instruction set that it uses. Returns what was found to hold.
///
/// # Errors
/// A [`Mismatch`], or what keeps a model to compare with from being loaded.
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
    let mut held = Vec::new();
    demo_answers(&mut Model::load(&demo::source(), options)?)?;
    held.push("the demo model answers as its reference does".to_owned());
    if isa != Isa::Scalar {
        let plain = Kernels::new(Isa::Scalar).expect("every machine runs plain Rust");
        let plain = LoadOptions {
            kernels: plain,
            ..options
        };
        let of_same = |source: &Source| -> Result<(), Box<dyn Error>> {
            let mut one = Model::load(source, options)?;
            let mut other = Model::load(source, plain)?;
            Ok(equal_models(&mut one, &mut other)?)
        };
        if model.weight_bytes() <= SMALL {
            of_same(source)?;
            held.push(format!("{isa} computes the bits of plain Rust"));
        } else {
            of_same(&stand_in(model.config())?)?;
            held.push(format!(
                "{isa} computes the bits of plain Rust in a layer of these widths"
            ));
        }
    }
    company_changes_nothing(model)?;
    held.push("answers are equal alone, batched and chunked".to_owned());
    Ok(held)
}

/// The demo gives its committed answers.
///
/// # Errors
/// If it does not.
pub fn demo_answers<F: Forward>(demo: &mut F) -> Result<(), Mismatch> {
    for (index, (prompt, answer)) in DEMO_ANSWERS.iter().enumerate() {
        let prompts = [prompt.to_vec()];
        let drawn = answers(demo, &prompts, Chunks::Whole, answer.len());
        let bitless = |drawn: &Drawn| drawn.map(|(token, _)| (token, 0));
        let computed = drawn[0].iter().map(bitless).collect();
        let expected = answer.iter().map(|&token| Some((token, 0))).collect();
        equal("the demo and its reference", &[expected], &[computed]).map_err(|mismatch| {
            Mismatch {
                prompt: index,
                ..mismatch
            }
        })?;
    }
    Ok(())
}

/// Two models of the same weights compute the same.
///
/// # Errors
/// If they do not; `other` is what should be.
pub fn equal_models<F: Forward, G: Forward>(one: &mut F, other: &mut G) -> Result<(), Mismatch> {
    let prompts = prompts(one.vocabulary());
    let computed = answers(one, &prompts, Chunks::Whole, NEW_TOKENS);
    let expected = answers(other, &prompts, Chunks::Whole, NEW_TOKENS);
    equal("this instruction set and plain Rust", &expected, &computed)
}

/// Answers depend neither on who else is answered, nor on how prompts are cut.
///
/// # Errors
/// If they do.
pub fn company_changes_nothing<F: Forward>(model: &mut F) -> Result<(), Mismatch> {
    let prompts = prompts(model.vocabulary());
    let mut alone = Vec::new();
    for prompt in prompts.chunks(1) {
        alone.extend(answers(model, prompt, Chunks::Whole, NEW_TOKENS));
    }
    let batched = answers(model, &prompts, Chunks::Whole, NEW_TOKENS);
    equal("alone and batched", &alone, &batched)?;
    let chunked = answers(model, &prompts, Chunks::Pages, NEW_TOKENS);
    equal("alone and chunked", &alone, &chunked)
}

/// How prompts are cut.
#[derive(Clone, Copy)]
enum Chunks {
    Whole,
    Pages,
}

/// The greedy answers to `prompts`, asked all at once.
fn answers<F: Forward>(
    model: &mut F,
    prompts: &[Vec<TokenId>],
    chunks: Chunks,
    new_tokens: usize,
) -> Vec<Vec<Drawn>> {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) + new_tokens;
    let chunk = match chunks {
        Chunks::Whole => prompts.iter().map(Vec::len).sum::<usize>(),
        Chunks::Pages => PAGE_TOKENS,
    };
    let chunk = chunk.max(PAGE_TOKENS) as u32;
    let count = prompts.len() as u32;
    let limits = Limits {
        pages: count * (longest.div_ceil(PAGE_TOKENS) as u32 + 1),
        max_running: count,
        max_queued: count,
        max_queued_time: u64::MAX,
        step_tokens: chunk,
        prefill_chunk: chunk,
        max_sequence_tokens: longest as u32,
    };
    let mut direct = Direct::new(model, limits, unhurried());
    let ask = |prompt: &Vec<TokenId>| {
        let greedy = SamplingParams {
            temperature: 0.0,
            logprobs: Some(0),
            ..SamplingParams::default()
        };
        let id = direct.submit(prompt.clone(), new_tokens as u32, greedy);
        id.expect("the limits were made for it")
    };
    let ids: Vec<_> = prompts.iter().map(ask).collect();
    let mut answers = vec![Vec::new(); prompts.len()];
    while direct.step().is_some() {
        for (id, output) in direct.outputs() {
            let place = ids.iter().position(|&asked| asked == id);
            let drawn = output.map(|output| {
                let logprob = output.logprob.expect("it was asked for");
                (output.token, logprob.to_bits())
            });
            answers[place.expect("nobody else asked")].push(drawn);
        }
    }
    answers
}

fn equal(
    check: &'static str,
    expected: &[Vec<Drawn>],
    computed: &[Vec<Drawn>],
) -> Result<(), Mismatch> {
    for (prompt, (expected, computed)) in expected.iter().zip(computed).enumerate() {
        for token in 0..expected.len().max(computed.len()) {
            let at = |drawn: &[Drawn]| drawn.get(token).copied().flatten();
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
    let mut seeded = Seeded::new(4);
    let prompts = PROMPTS.iter().map(|&len| seeded.tokens(len, vocabulary));
    prompts.collect()
}

/// A model of one layer with the widths of another.
fn stand_in(config: &ModelConfig) -> Result<Source, LoadError> {
    let shape = Shape {
        name: "stand-in",
        architecture: config.architecture,
        vocab: STAND_IN_VOCABULARY,
        hidden: config.hidden,
        intermediate: config.intermediate,
        layers: 1,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        max_position: 256,
        rope_theta: config.rotary.theta,
        tied: true,
    };
    let source = toy::of_shape(&shape, 1);
    ModelConfig::read(&source)?;
    Ok(source)
}
