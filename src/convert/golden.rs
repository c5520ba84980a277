//! Golden tokens: the greedy answers of a trusted run. A server that loads the model computes them
//! again before it is ready.

use std::error::Error;
use std::fs::{self, File};
use std::io;
use std::path::Path;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use sterna_scheduler::{Batch, PAGE_TOKENS, Page, SequenceId, TokenId};

use crate::model::Model;
use crate::text::Tokenizer;

/// The name of the file with golden tokens.
pub(super) const FILE: &str = "sterna_golden.json";

const PROMPTS: [&str; 4] = [
    "The capital of France is",
    "Once upon a time there was a small house at the end of a long road. In it lived",
    "Numbers: 1, 2, 3, 4,",
    "fn main() {\n    println!(",
];

/// The number of tokens of an answer.
const NEW_TOKENS: usize = 16;

/// A prompt and its greedy answer.
pub(super) struct GoldenAnswer {
    prompt: Vec<TokenId>,
    tokens: Vec<TokenId>,
}

/// Returns the prompts in a file, one in each line, or the built-in ones.
///
/// # Errors
/// If the file cannot be read or has no prompt.
pub(super) fn read_prompts(file: Option<&Path>) -> Result<Vec<String>, String> {
    let Some(file) = file else {
        return Ok(PROMPTS.map(str::to_owned).into());
    };
    let text = fs::read_to_string(file);
    let text = text.map_err(|error| format!("--golden {}: {error}", file.display()))?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let prompts: Vec<String> = lines.map(str::to_owned).collect();
    if prompts.is_empty() {
        return Err(format!("--golden {}: it has no prompt", file.display()));
    }
    Ok(prompts)
}

/// Computes the greedy answers of `model`.
///
/// # Errors
/// If a prompt cannot be encoded or is too long.
pub(super) fn answers(
    model: &mut Model,
    tokenizer: &Tokenizer,
    prompts: &[String],
) -> Result<Vec<GoldenAnswer>, Box<dyn Error>> {
    let answers = prompts.iter().map(|text| {
        let prompt = tokenizer.encode_prompt(text)?;
        let limit = model.config().max_position;
        if prompt.is_empty() || prompt.len() + NEW_TOKENS > limit {
            let tokens = prompt.len();
            return Err(format!(
                "--golden: a prompt must have 1 to {} tokens; {text:?} has {tokens}",
                limit.saturating_sub(NEW_TOKENS)
            )
            .into());
        }
        let tokens = greedy(model, &prompt)?;
        Ok(GoldenAnswer { prompt, tokens })
    });
    answers.collect()
}

/// Returns the tokens with the largest logits after a prompt, one after the other. Of equal ones
/// the lowest counts.
fn greedy(model: &mut Model, prompt: &[TokenId]) -> Result<Vec<TokenId>, Box<dyn Error>> {
    let longest = prompt.len() + NEW_TOKENS;
    let pages = (0..).map(Page::new).take(longest.div_ceil(PAGE_TOKENS));
    let pages: Vec<Page> = pages.collect();
    let mut kv = model.new_kv_store(pages.len())?;
    let mut logits = vec![0.0; model.config().vocab];
    let (mut batch, mut text) = (Batch::new(), prompt.to_vec());
    let mut computed = 0;
    while text.len() < longest {
        // Chunks of a page, so that a prompt may be longer than a step.
        let end = text.len().min(computed + PAGE_TOKENS);
        let is_last = end == text.len();
        batch.clear();
        batch.push_row(
            SequenceId::new(0, 0),
            computed,
            &text[computed..end],
            &pages[..end.div_ceil(PAGE_TOKENS)],
            usize::from(is_last),
        );
        let step = model.forward(&batch, &mut kv);
        if is_last {
            step.copy_row(0, &mut logits);
            let numbered = (0..).zip(&logits);
            let best = numbered.reduce(|best, next| if next.1 > best.1 { next } else { best });
            let (token, logit) = best.expect("a model has tokens");
            if !logit.is_finite() {
                return Err("--golden: the model computes infinities or NaN".into());
            }
            text.push(token);
        }
        computed = end;
    }
    Ok(text.split_off(prompt.len()))
}

/// Returns the content of the file. `weights` is the file of the model that it belongs to.
///
/// # Errors
/// If that file cannot be read.
pub(super) fn to_json(answers: &[GoldenAnswer], weights: &Path) -> io::Result<String> {
    let mut hash = Sha256::new();
    io::copy(&mut File::open(weights)?, &mut HashWriter(&mut hash))?;
    let hash: String = hash
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let cases = answers
        .iter()
        .map(|answer| json!({"prompt_tokens": answer.prompt, "tokens": answer.tokens}));
    let json = json!({
        "version": 1,
        "weights_sha256": hash,
        "cases": cases.collect::<Vec<Value>>(),
    });
    Ok(format!("{json}\n"))
}

/// Hashes what is written.
struct HashWriter<'a>(&'a mut Sha256);

impl io::Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
