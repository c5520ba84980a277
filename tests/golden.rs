//! Sterna computes what Hugging Face `transformers` computes: logits, greedy tokens, each layer,
//! prompts.
//!
//! `tests/make_fixtures.py` wrote the checkpoints and the reference's results in `tests/fixtures`,
//! and explains how they are compared. `STERNA_FIXTURES=DIR` names a folder of further fixtures.
//! Every check runs with every instruction set of this machine.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use sterna::model::{KvStore, LoadOptions, Model, Source};
use sterna::text::{ChatTemplate, Message, TemplateArguments, TextFiles, Tokenizer};
use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::{Batch, PAGE_TOKENS, Page, SequenceId, TokenId};

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
/// The chunk size of prompts, in tokens. It is no multiple of a page or span.
const CHUNK: usize = 90;

/// A checkpoint and what the reference computes with it.
struct Fixture {
    name: String,
    checkpoint: PathBuf,
    expected: Expected,
    tensors: Vec<u8>,
}

/// The content of `expected.json`.
#[derive(Deserialize)]
struct Expected {
    weights_crc32: u32,
    spread_worst: f64,
    spread_mean: f64,
    stop_tokens: BTreeSet<TokenId>,
    /// By layer, the tokens whose stored output depends on the last bits of its input.
    layer_unstable_tokens: Vec<Vec<usize>>,
    prompts: Vec<Prompt>,
    texts: Vec<Text>,
    chats: Vec<Chat>,
}

#[derive(Deserialize)]
struct Prompt {
    prompt: Vec<TokenId>,
    /// Greedy tokens.
    continuation: Vec<TokenId>,
    /// By how much the logit of each greedy token exceeds the second best.
    margins: Vec<f64>,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    tokens: Vec<TokenId>,
    decoded: String,
}

#[derive(Deserialize)]
struct Chat {
    messages: Vec<ChatMessage>,
    rendered: String,
    tokens: Vec<TokenId>,
}

#[derive(Deserialize)]
struct ChatMessage {
    role: String,
    content: String,
}

#[test]
fn log_probabilities_stay_within_the_spread_of_the_reference() {
    for_each_fixture(|fixture, kernels| {
        let mut model = fixture.model(kernels);
        let prompts = &fixture.expected.prompts;
        let wanted: Vec<_> = (0..prompts.len())
            .map(|index| fixture.tensor(&format!("prompt.{index}.logits")))
            .collect();
        let vocab = model.config().vocab;
        let (mut worst, mut sum, mut count) = (0.0_f64, 0.0, 0.0);
        // All prompts side by side, their continuations one token at a time.
        for (index, rows) in follow(&mut model, prompts).iter().enumerate() {
            for (got, wanted) in rows.iter().zip(wanted[index].chunks(vocab)) {
                for (got, wanted) in log_softmax(got).zip(log_softmax(wanted)) {
                    worst = worst.max((got - wanted).abs());
                    sum += (got - wanted).abs();
                    count += 1.0;
                }
            }
        }
        let (worst_limit, mean_limit) =
            (fixture.expected.spread_worst, fixture.expected.spread_mean);
        let (worst, mean) = (worst / worst_limit, sum / count / mean_limit);
        println!(
            "{}: worst {worst:.2} and mean {mean:.2} of the reference's spread",
            fixture.name
        );
        (worst <= WORST_OF_SPREAD && mean <= MEAN_OF_SPREAD)
            .then_some(())
            .ok_or(format!(
                "worst {worst:.3} of {worst_limit:.3e}, mean {mean:.3} of {mean_limit:.3e}"
            ))
    });
}

#[test]
fn greedy_tokens_equal_the_references_if_its_margin_exceeds_the_spread() {
    for_each_fixture(|fixture, kernels| {
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
    for_each_fixture(|fixture, kernels| {
        let screened = LoadOptions {
            exact_head_bytes: 0,
            ..LoadOptions::new(kernels, 2)
        };
        let source = Source::Directory(fixture.checkpoint.clone());
        let mut screened = Model::load(&source, screened).unwrap();
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
    for_each_fixture(|fixture, kernels| {
        let mut model = fixture.model(kernels);
        let prompts = &fixture.expected.prompts;
        let single = follow(&mut model, prompts);
        for (prompt, single) in prompts.iter().zip(&single) {
            // The whole continuation consists of accepted draft tokens.
            let drafts = &prompt.continuation[..prompt.continuation.len() - 1];
            let tokens = [prompt.prompt.as_slice(), drafts].concat();
            let known = prompt.prompt.len() - 1;
            let mut sequence = Sequence::new(0, tokens);
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
    for_each_fixture(|fixture, kernels| {
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
    });
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

/// Runs `check` on each fixture with each instruction set. Panics with a list of all failures.
fn for_each_fixture(check: impl Fn(&Fixture, Kernels) -> Result<(), String>) {
    let mut failures = Vec::new();
    for fixture in fixtures() {
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

/// Returns the committed fixtures, including the demo's, and those that the environment names.
fn fixtures() -> Vec<Fixture> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec![root.join("tests/fixtures")];
    folders.extend(std::env::var_os("STERNA_FIXTURES").map(PathBuf::from));
    let mut found = Vec::new();
    for folder in folders {
        let entries =
            fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let mut entries: Vec<PathBuf> = entries
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_dir())
            .collect();
        entries.sort();
        assert!(!entries.is_empty(), "{} holds no fixture", folder.display());
        for expected in entries {
            let is_demo = expected == root.join("tests/fixtures/demo");
            let checkpoint = if is_demo {
                root.join("src/demo")
            } else {
                expected.clone()
            };
            found.push(Fixture::read(&checkpoint, &expected));
        }
    }
    found
}

impl Fixture {
    fn read(checkpoint: &Path, expected: &Path) -> Fixture {
        let name = expected.file_name().unwrap().to_string_lossy().into_owned();
        let json = fs::read(expected.join("expected.json"))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let tensors = fs::read(expected.join("expected.safetensors"))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let expected: Expected =
            serde_json::from_slice(&json).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(
            weights_crc32(checkpoint),
            expected.weights_crc32,
            "{name}: the weights in {} have changed since the reference ran; run \
             tests/make_fixtures.py again",
            checkpoint.display(),
        );
        Fixture {
            name,
            checkpoint: checkpoint.to_owned(),
            expected,
            tensors,
        }
    }

    fn model(&self, kernels: Kernels) -> Model {
        let source = Source::Directory(self.checkpoint.clone());
        Model::load(&source, LoadOptions::new(kernels, 2))
            .unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    fn text(&self) -> (Tokenizer, ChatTemplate) {
        let tokenizer = fs::read(self.checkpoint.join("tokenizer.json")).unwrap();
        let config = fs::read(self.checkpoint.join("tokenizer_config.json")).unwrap();
        let chat_template = fs::read_to_string(self.checkpoint.join("chat_template.jinja")).ok();
        let files = TextFiles {
            tokenizer: &tokenizer,
            config: Some(&config),
            chat_template: chat_template.as_deref(),
        };
        let vocabulary = self
            .model(Kernels::new(Isa::best()).unwrap())
            .config()
            .vocab;
        let (tokenizer, template) = files.load(u32::try_from(vocabulary).unwrap()).unwrap();
        (
            tokenizer,
            template.expect("each fixture has a chat template"),
        )
    }

    /// Returns the values of a stored tensor.
    fn tensor(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.tensors).unwrap();
        let view = file
            .tensor(name)
            .unwrap_or_else(|error| panic!("{}: {name}: {error}", self.name));
        assert_eq!(view.dtype(), Dtype::F32, "{name}");
        view.data()
            .as_chunks()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect()
    }
}

/// Returns the checksum that `weights_crc32` of the script computes.
fn weights_crc32(checkpoint: &Path) -> u32 {
    let is_weights = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("model") && name.ends_with(".safetensors")
    };
    let entries = fs::read_dir(checkpoint)
        .unwrap_or_else(|error| panic!("{}: {error}", checkpoint.display()));
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(is_weights)
        .collect();
    files.sort();
    let bytes = files.iter().flat_map(|file| fs::read(file).unwrap());
    !bytes.fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg())
        })
    })
}

/// A sequence's tokens and the pages that hold its keys and values.
struct Sequence {
    id: SequenceId,
    tokens: Vec<TokenId>,
    computed: usize,
    pages: Vec<Page>,
}

impl Sequence {
    /// The pages of different `first_page`s must not overlap.
    fn new(first_page: usize, tokens: Vec<TokenId>) -> Sequence {
        let pages = first_page..first_page + tokens.len().div_ceil(PAGE_TOKENS);
        let pages = pages
            .map(|page| Page::new(u32::try_from(page).unwrap()))
            .collect();
        Sequence {
            id: SequenceId::new(u32::try_from(first_page).unwrap(), 0),
            tokens,
            computed: 0,
            pages,
        }
    }

    /// Adds the next tokens to a step, at most `limit`, with logits after the last `logits` of
    /// them. Returns the position of the last one, or `None` if no token is left.
    fn push_row(&mut self, batch: &mut Batch, limit: usize, logits: usize) -> Option<usize> {
        let end = self.tokens.len().min(self.computed.saturating_add(limit));
        if end == self.computed {
            return None;
        }
        let pages = &self.pages[..end.div_ceil(PAGE_TOKENS)];
        batch.push_row(
            self.id,
            self.computed,
            &self.tokens[self.computed..end],
            pages,
            logits,
        );
        self.computed = end;
        Some(end - 1)
    }
}

/// Returns the logits after each prompt and after each token of its continuation except the last.
/// All prompts run side by side: the prompts in chunks, the continuations token by token.
fn follow(model: &mut Model, prompts: &[Prompt]) -> Vec<Vec<Vec<f32>>> {
    let mut pages = 0;
    let mut sequences = Vec::new();
    for Prompt {
        prompt,
        continuation,
        ..
    } in prompts
    {
        let tokens = [prompt.as_slice(), &continuation[..continuation.len() - 1]].concat();
        sequences.push(Sequence::new(pages, tokens));
        pages += sequences.last().unwrap().pages.len();
    }
    let mut kv = model.new_kv_store(pages).unwrap();
    let mut rows = vec![Vec::new(); prompts.len()];
    let mut batch = Batch::new();
    loop {
        batch.clear();
        let mut computed = Vec::new();
        for (index, sequence) in sequences.iter_mut().enumerate() {
            let prompt_left = prompts[index]
                .prompt
                .len()
                .saturating_sub(sequence.computed);
            let last = sequence.push_row(&mut batch, prompt_left.clamp(1, CHUNK), 1);
            computed.extend(last.map(|last| (index, last)));
        }
        if computed.is_empty() {
            return rows;
        }
        step(model, &batch, &mut kv, |row, logits| {
            let (index, last) = computed[row];
            if last + 1 >= prompts[index].prompt.len() {
                rows[index].push(logits);
            }
        });
    }
}

/// Runs one layer on `hidden`, the hidden states of a sequence from its beginning.
fn run_layer(model: &mut Model, layer: usize, hidden: &mut [f32]) {
    let mut sequence = Sequence::new(0, vec![0; hidden.len() / model.config().hidden]);
    let mut batch = Batch::new();
    sequence.push_row(&mut batch, usize::MAX, 1);
    let mut kv = model.new_kv_store(sequence.pages.len()).unwrap();
    model.run_layers(layer..layer + 1, hidden, &batch, &mut kv);
}

/// Computes one step and calls `each` with every row of logits.
fn step(model: &mut Model, batch: &Batch, kv: &mut KvStore, mut each: impl FnMut(usize, Vec<f32>)) {
    let vocab = model.config().vocab;
    let logits = model.forward(batch, kv);
    for row in 0..logits.rows() {
        let mut values = vec![0.0; vocab];
        logits.copy_row(row, &mut values);
        each(row, values);
    }
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
