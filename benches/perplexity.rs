//! Perplexity of the demo model on held-out text, for each number format of keys and values.
//!
//! The text comes from `benches/training/heldout.json`. "answers" are the tokens of the reference
//! answers, which the model was trained to predict. "joined" puts the conversations of single
//! questions one after the other, up to the model's context, so that its tokens read many keys.

#![allow(
    clippy::unwrap_used,
    reason = "a benchmark may panic, and its files are part of the repository"
)]

use serde_json::Value;
use sterna::demo;
use sterna::model::{AlternatingSlabs, KvStore, LoadOptions, Model};
use sterna::text::{ChatTemplate, Message, TemplateArguments, TextFiles, Tokenizer};
use sterna_kernels::{Kernels, KvDtype};
use sterna_scheduler::{Batch, PAGE_TOKENS, Page, SequenceId};

/// Tokens of the longest joined text.
const JOINED_TOKENS: usize = 1000;

/// Tokens, and which of them count.
#[derive(Clone, Default)]
struct Text {
    tokens: Vec<u32>,
    is_answer: Vec<bool>,
}

/// Log-probabilities of the tokens that count, and the most likely token at each.
#[derive(Default)]
struct Predictions {
    log_probabilities: Vec<f64>,
    likeliest: Vec<usize>,
}

fn main() {
    let is_smoke = std::env::args().any(|argument| argument == "--test");
    let (mut singles, mut joined) = texts();
    if is_smoke {
        singles.truncate(3);
        joined.truncate(1);
    }
    println!("| Format | bytes a token | answers | joined | same token as f16 | mean difference |");
    println!("|---|---|---|---|---|---|");
    let mut exact = None;
    for dtype in KvDtype::ALL {
        let mut model = load(dtype);
        let bytes = model.kv_bytes_per_page() / PAGE_TOKENS;
        let answers = predict(&mut model, &singles);
        let joined = predict(&mut model, &joined);
        let reference = exact.get_or_insert(Predictions {
            log_probabilities: joined.log_probabilities.clone(),
            likeliest: joined.likeliest.clone(),
        });
        println!(
            "| {dtype} | {bytes} | {:.4} | {:.4} | {:.2} % | {:.4} |",
            answers.perplexity(),
            joined.perplexity(),
            100.0 * joined.agreement(reference),
            joined.mean_difference(reference),
        );
    }
}

fn load(kv_dtype: KvDtype) -> Model {
    let options = LoadOptions {
        kv_dtype,
        max_step_tokens: 1024,
        max_logits_rows: 1024,
        ..LoadOptions::new(Kernels::best(), 2)
    };
    Model::load(&demo::source(), options).unwrap()
}

/// Returns the conversations, each by itself, and joined to long ones.
fn texts() -> (Vec<Text>, Vec<Text>) {
    let source = demo::source();
    let file = |name| source.read(name).unwrap().unwrap();
    let (tokenizer, config) = (file("tokenizer.json"), file("tokenizer_config.json"));
    let files = TextFiles {
        tokenizer: &tokenizer,
        config: Some(&config),
        chat_template: None,
        tool_template: None,
    };
    let vocabulary = load(KvDtype::F16).config().vocab;
    let (tokenizer, template) = files.load(u32::try_from(vocabulary).unwrap()).unwrap();
    let template = template.unwrap();
    let held_out = include_str!("training/heldout.json");
    let held_out: Value = serde_json::from_str(held_out).unwrap();
    let questions = held_out["singles"].as_array().unwrap().iter();
    let singles: Vec<Text> = questions
        .map(|turn| text(&template, &tokenizer, turn))
        .collect();
    let mut joined = vec![Text::default()];
    for single in &singles {
        let last = joined.last_mut().unwrap();
        if last.tokens.len() + single.tokens.len() > JOINED_TOKENS {
            joined.push(single.clone());
        } else {
            last.tokens
                .extend(&single.tokens[usize::from(!last.tokens.is_empty())..]);
            last.is_answer
                .extend(&single.is_answer[usize::from(!last.is_answer.is_empty())..]);
        }
    }
    (singles, joined)
}

/// Returns a question and its answer, up to the token that ends the answer.
fn text(template: &ChatTemplate, tokenizer: &Tokenizer, turn: &Value) -> Text {
    let message = |role: &str, key: &str| Message {
        role: role.to_owned(),
        content: turn[key].as_str().unwrap().to_owned(),
        ..Message::default()
    };
    let (question, answer) = (message("user", "question"), message("assistant", "answer"));
    let rendered = |messages: &[Message]| {
        let arguments = TemplateArguments::default();
        let prompt = template.prompt(tokenizer, messages, &arguments);
        prompt.unwrap().tokens
    };
    let prompt = rendered(std::slice::from_ref(&question));
    let mut tokens = rendered(&[question, answer]);
    let end = tokens
        .iter()
        .rposition(|&token| tokenizer.is_special(token))
        .unwrap();
    tokens.truncate(end + 1);
    assert_eq!(
        tokens[..prompt.len()],
        prompt,
        "an answer follows its prompt"
    );
    let is_answer = (0..tokens.len()).map(|i| i >= prompt.len()).collect();
    Text { tokens, is_answer }
}

/// Computes each text in one step.
fn predict(model: &mut Model, texts: &[Text]) -> Predictions {
    let pages: Vec<Page> = (0..1024 / PAGE_TOKENS as u32).map(Page::new).collect();
    let mut kv = model.new_kv_store(pages.len()).unwrap();
    let mut predictions = Predictions::default();
    for text in texts {
        predictions.add(model, &mut kv, text, &pages);
    }
    predictions
}

impl Predictions {
    fn add(&mut self, model: &mut Model, kv: &mut KvStore, text: &Text, pages: &[Page]) {
        let count = text.tokens.len();
        let mut batch = Batch::new();
        let pages = &pages[..count.div_ceil(PAGE_TOKENS)];
        batch.push_row(SequenceId::new(0, 0), 0, &text.tokens, pages, count);
        batch.set_states(AlternatingSlabs::new(0).next_row());
        let mut logits = vec![0.0; model.config().vocab];
        let rows = model.forward(&batch, kv);
        for i in (1..count).filter(|&i| text.is_answer[i]) {
            rows.copy_row(i - 1, &mut logits);
            let likeliest = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
            let largest = f64::from(logits[likeliest.unwrap()]);
            let weight = |logit: &f32| (f64::from(*logit) - largest).exp();
            let sum: f64 = logits.iter().map(weight).sum();
            let logit = f64::from(logits[text.tokens[i] as usize]);
            self.log_probabilities.push(logit - largest - sum.ln());
            self.likeliest.push(likeliest.unwrap());
        }
    }

    fn perplexity(&self) -> f64 {
        let sum: f64 = self.log_probabilities.iter().sum();
        (-sum / self.log_probabilities.len() as f64).exp()
    }

    /// Returns the share of tokens at which the most likely token is the same.
    fn agreement(&self, other: &Predictions) -> f64 {
        let pairs = self.likeliest.iter().zip(&other.likeliest);
        pairs.filter(|(a, b)| a == b).count() as f64 / self.likeliest.len() as f64
    }

    /// Returns the mean magnitude of the difference between log-probabilities.
    fn mean_difference(&self, other: &Predictions) -> f64 {
        let pairs = self.log_probabilities.iter().zip(&other.log_probabilities);
        let sum: f64 = pairs.map(|(a, b)| (a - b).abs()).sum();
        sum / self.log_probabilities.len() as f64
    }
}
