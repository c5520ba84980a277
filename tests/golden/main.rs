//! Sterna computes what Hugging Face `transformers` computes: logits, greedy tokens, each layer,
//! prompts.
//!
//! `tests/make_fixtures.py` wrote the checkpoints and the reference's results in `tests/fixtures`,
//! and explains how they are compared. `STERNA_FIXTURES=DIR` names a folder of further fixtures.
//! Every check runs with every instruction set of this machine.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod blocks;
mod embeddings;
mod fixture;
mod groups;
mod steps;
mod windows;

use std::collections::BTreeSet;

use sterna::model::{LoadOptions, Model};
use sterna::text::{Message, TemplateArguments};
use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::{Batch, TokenId};

use fixture::{ChatMessage, Fixture, Text, fixtures};
use steps::{CHUNK, Sequence, follow, run_layer, step};

/// The limit of the worst difference in log-probability, in units of the reference's worst spread.
const WORST_OF_SPREAD: f64 = 2.0;
/// The limit of the mean difference in log-probability, in units of the reference's mean spread.
const MEAN_OF_SPREAD: f64 = 1.5;
/// The fraction of a layer's values that must be within [`LAYER_TOLERANCE`].
const LAYER_SHARE: f64 = 0.99;
/// The tolerance of a layer's values, relative to their root mean square.
const LAYER_TOLERANCE: f64 = 1e-3;
/// The limit of the change in log-probability if only the best rows of the head are exact.
const SCREENED_TOLERANCE: f64 = 2e-3;

#[test]
fn log_probabilities_stay_within_the_spread_of_the_reference() {
    for_each_fixture(true, |fixture, kernels| {
        let mut model = fixture.model(kernels);
        let prompts = &fixture.expected.prompts;
        let wanted: Vec<_> = (0..prompts.len())
            .map(|index| fixture.tensor(&format!("prompt.{index}.logits")))
            .collect();
        let vocab = model.config().vocab;
        let mut differences = Vec::new();
        // All prompts side by side, their continuations one token at a time.
        for (index, rows) in follow(&mut model, prompts).iter().enumerate() {
            for (got, wanted) in rows.iter().zip(wanted[index].chunks(vocab)) {
                let pairs = log_softmax(got).zip(log_softmax(wanted));
                differences.extend(pairs.map(|(got, wanted)| (got - wanted).abs()));
            }
        }
        within_spread(fixture, differences)
    });
}

#[test]
fn greedy_tokens_equal_the_references_if_its_margin_exceeds_the_spread() {
    for_each_fixture(true, |fixture, kernels| {
        let mut model = fixture.model(kernels);
        let prompts = &fixture.expected.prompts;
        let (mut clear, mut wrong) = (0, Vec::new());
        for (prompt, rows) in prompts.iter().zip(follow(&mut model, prompts)) {
            for (place, (row, wanted)) in rows.iter().zip(&prompt.continuation).enumerate() {
                if prompt.margins[place] > fixture.expected.spread_worst {
                    clear += 1;
                    if greedy(row) != *wanted {
                        wrong.push((prompt.prompt.len(), place));
                    }
                }
            }
        }
        assert!(
            clear >= 20,
            "{}: only {clear} tokens are clear enough to compare",
            fixture.name
        );
        wrong.is_empty().then_some(()).ok_or(format!(
            "of {clear} tokens these differ (prompt length, place): {wrong:?}"
        ))
    });
}

/// A request may see the log-probabilities of up to 20 most likely tokens.
#[test]
fn a_screened_head_keeps_the_visible_log_probabilities() {
    const SEEN: usize = 20;
    for_each_fixture(true, |fixture, kernels| {
        let screened = LoadOptions {
            exact_head_bytes: 0,
            ..LoadOptions::new(kernels, 2)
        };
        let mut screened = Model::load(&fixture.source(), screened).unwrap();
        let prompts = &fixture.expected.prompts;
        let exact = follow(&mut fixture.model(kernels), prompts);
        let mut worst = 0.0_f64;
        for (exact, screened) in exact.iter().zip(follow(&mut screened, prompts)) {
            for (exact, screened) in exact.iter().zip(&screened) {
                let best = most_likely(exact, SEEN);
                if most_likely(screened, SEEN) != best {
                    return Err("other tokens are the most likely".to_owned());
                }
                let exact: Vec<f64> = log_softmax(exact).collect();
                let screened: Vec<f64> = log_softmax(screened).collect();
                for token in best {
                    worst = worst.max((exact[token] - screened[token]).abs());
                }
            }
        }
        println!("{}: log-probabilities differ by {worst:.1e}", fixture.name);
        (worst <= SCREENED_TOLERANCE)
            .then_some(())
            .ok_or(format!("a log-probability differs by {worst:.4}"))
    });
}

#[test]
fn drafted_tokens_have_the_logits_of_single_decodes() {
    for_each_fixture(true, |fixture, kernels| {
        let mut model = fixture.model(kernels);
        let prompts = &fixture.expected.prompts;
        let single = follow(&mut model, prompts);
        for (prompt, single) in prompts.iter().zip(&single) {
            // The whole continuation consists of accepted draft tokens.
            let drafts = &prompt.continuation[..prompt.continuation.len() - 1];
            let tokens = [prompt.prompt.as_slice(), drafts].concat();
            let known = prompt.prompt.len() - 1;
            let mut sequence = Sequence::new(0, 0, tokens);
            let mut kv = model.new_kv_store(sequence.pages.len()).unwrap();
            let mut batch = Batch::new();
            while sequence.computed < known {
                batch.clear();
                sequence.push_row(&mut batch, CHUNK.min(known - sequence.computed), 0);
                model.forward(&batch, &mut kv);
            }
            batch.clear();
            sequence.push_row(&mut batch, usize::MAX, 1 + drafts.len());
            let mut drafted = Vec::new();
            step(&mut model, &batch, &mut kv, |_, logits| {
                drafted.push(logits)
            });
            if drafted != *single {
                return Err(format!(
                    "a prompt of {} tokens, {} drafts",
                    prompt.prompt.len(),
                    drafts.len()
                ));
            }
        }
        Ok(())
    });
}

#[test]
fn each_layer_fed_the_references_input_computes_its_output() {
    for has_head in [true, false] {
        for_each_fixture(has_head, check_layers);
    }
}

fn check_layers(fixture: &Fixture, kernels: Kernels) -> Result<(), String> {
    let mut model = fixture.model(kernels);
    let width = model.config().hidden;
    let mut compared = Vec::new();
    for (layer, unstable) in fixture.expected.layer_unstable_tokens.iter().enumerate() {
        let mut hidden = fixture.tensor(&format!("state.{layer}"));
        let wanted = fixture.tensor(&format!("state.{}", layer + 1));
        run_layer(&mut model, layer, &mut hidden);

        let square = wanted
            .iter()
            .map(|value| f64::from(*value).powi(2))
            .sum::<f64>();
        let tolerance = LAYER_TOLERANCE * (square / wanted.len() as f64).sqrt();
        // Only tokens whose values the reference itself reproduces.
        let tokens = hidden.chunks(width).zip(wanted.chunks(width)).enumerate();
        let tokens = tokens.filter(|(token, _)| !unstable.contains(token));
        let differences: Vec<f64> = tokens
            .flat_map(|(_, (got, wanted))| {
                got.iter()
                    .zip(wanted)
                    .map(|(got, wanted)| f64::from((got - wanted).abs()))
            })
            .collect();
        let close = differences
            .iter()
            .filter(|difference| **difference <= tolerance)
            .count();
        compared.push(differences.len());
        let share = close as f64 / differences.len().max(1) as f64;
        if share < LAYER_SHARE && !differences.is_empty() {
            let worst = differences.iter().copied().fold(0.0, f64::max) / tolerance;
            return Err(format!(
                "layer {layer}: only {:.2} % agree, the worst misses by {worst:.1}",
                100.0 * share
            ));
        }
    }
    let all = compared.len() * fixture.tensor("state.0").len();
    assert!(
        compared.iter().sum::<usize>() >= all / 3,
        "{}: too few values are stable enough to compare",
        fixture.name
    );
    Ok(())
}

#[test]
fn prompts_become_the_tokens_of_the_reference() {
    for fixture in fixtures() {
        let (tokenizer, template) = fixture.text();
        for Text {
            text,
            tokens,
            decoded,
        } in &fixture.expected.texts
        {
            assert_eq!(
                tokenizer.encode_prompt(text).unwrap(),
                *tokens,
                "{}: {text:?}",
                fixture.name
            );
            assert_eq!(
                tokenizer.decode(tokens, true),
                *decoded,
                "{}: {text:?} decoded",
                fixture.name
            );
        }
        for chat in &fixture.expected.chats {
            let message = |message: &ChatMessage| Message {
                role: message.role.clone(),
                content: message.content.clone(),
                ..Message::default()
            };
            let messages: Vec<Message> = chat.messages.iter().map(message).collect();
            let none = TemplateArguments::default();
            assert_eq!(
                template.render(&messages, &none).unwrap(),
                chat.rendered,
                "{}",
                fixture.name
            );
            assert_eq!(
                template
                    .prompt(&tokenizer, &messages, &none)
                    .unwrap()
                    .tokens,
                chat.tokens,
                "{}: {:?}",
                fixture.name,
                chat.rendered
            );
        }
    }
}

#[test]
fn the_stop_tokens_are_those_of_the_reference() {
    for fixture in fixtures() {
        let model = fixture.model(Kernels::new(Isa::best()).unwrap());
        let stops: BTreeSet<TokenId> = model.config().eos_tokens.iter().copied().collect();
        assert_eq!(stops, fixture.expected.stop_tokens, "{}", fixture.name);
    }
}

/// Runs `check` on each fixture with or without an output head, with each instruction set. Panics
/// with a list of all failures.
fn for_each_fixture(
    has_head: bool,
    mut check: impl FnMut(&Fixture, Kernels) -> Result<(), String>,
) {
    let mut failures = Vec::new();
    let all = fixtures().into_iter();
    for fixture in all.filter(|fixture| fixture.has_head() == has_head) {
        for isa in Isa::available() {
            if let Err(failure) = check(&fixture, Kernels::new(isa).unwrap()) {
                failures.push(format!("{} ({isa}): {failure}", fixture.name));
            }
        }
    }
    assert!(
        failures.is_empty(),
        "differs from the reference:\n{}",
        failures.join("\n")
    );
}

/// Compares differences to the reference with its own spread.
fn within_spread(fixture: &Fixture, differences: Vec<f64>) -> Result<(), String> {
    let worst = differences.iter().copied().fold(0.0, f64::max);
    let mean = differences.iter().sum::<f64>() / differences.len() as f64;
    let (worst_limit, mean_limit) = (fixture.expected.spread_worst, fixture.expected.spread_mean);
    let (worst, mean) = (worst / worst_limit, mean / mean_limit);
    println!(
        "{}: worst {worst:.2} and mean {mean:.2} of the reference's spread",
        fixture.name
    );
    (worst <= WORST_OF_SPREAD && mean <= MEAN_OF_SPREAD)
        .then_some(())
        .ok_or(format!(
            "worst {worst:.3} of {worst_limit:.3e}, mean {mean:.3} of {mean_limit:.3e}"
        ))
}

fn log_softmax(logits: &[f32]) -> impl Iterator<Item = f64> {
    let largest = logits.iter().copied().fold(f32::MIN, f32::max);
    let shifted = move |logit: &f32| f64::from(*logit) - f64::from(largest);
    let log_sum = logits
        .iter()
        .map(|logit| shifted(logit).exp())
        .sum::<f64>()
        .ln();
    logits.iter().map(move |logit| shifted(logit) - log_sum)
}

/// Returns the tokens of the `count` largest logits, largest first.
fn most_likely(logits: &[f32], count: usize) -> Vec<usize> {
    let mut tokens: Vec<usize> = (0..logits.len()).collect();
    tokens.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    tokens.truncate(count);
    tokens
}

/// Returns the first token with the largest logit.
fn greedy(logits: &[f32]) -> TokenId {
    let best = logits.iter().enumerate().fold(
        0,
        |best, (token, logit)| if *logit > logits[best] { token } else { best },
    );
    u32::try_from(best).unwrap()
}
