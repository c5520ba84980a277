//! Golden tokens: the greedy answers of a trusted run, in `sterna_golden.json` beside a checkpoint.
//!
//! The file holds `{"version": 1, "cases": [{"prompt_tokens": […], "tokens": […]}]}`. `sterna
//! convert --golden` records it. A server that loads the model computes the answers again before it
//! is ready, and refuses to start if a token differs.

use std::error::Error;
use std::fs::File;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use sterna_kernels::KvDtype;
use sterna_scheduler::{Batch, PAGE_TOKENS, Page, SequenceId, TokenId};

use crate::checkpoint::Source;
use crate::model::{AlternatingSlabs, KvStore, Model};
use crate::text::Tokenizer;

/// The name of the file.
pub(crate) const FILE: &str = "sterna_golden.json";
const VERSION: u64 = 1;

/// The largest file that is read.
const MAX_BYTES: usize = 4 << 20;
/// The largest number of tokens of all cases. The model computes each before the server is ready.
const MAX_TOKENS: usize = 16_384;
/// The number of tokens of an answer that is recorded.
const NEW_TOKENS: usize = 16;

/// The recorded tokens of a checkpoint.
#[derive(Deserialize)]
pub(crate) struct GoldenTokens {
    cases: Vec<GoldenCase>,
}

/// A prompt and its greedy answer.
#[derive(Deserialize, Serialize)]
struct GoldenCase {
    prompt_tokens: Vec<TokenId>,
    tokens: Vec<TokenId>,
}

impl GoldenTokens {
    /// Computes the greedy answers of `model` to `prompts`.
    ///
    /// # Errors
    /// If a prompt cannot be encoded or is too long, or a logit is not finite.
    pub(crate) fn record(
        model: &mut Model,
        tokenizer: &Tokenizer,
        prompts: &[String],
    ) -> Result<GoldenTokens, Box<dyn Error>> {
        let cases = prompts.iter().map(|text| {
            let prompt_tokens = tokenizer.encode_prompt(text)?;
            let limit = model.config().max_position;
            if prompt_tokens.is_empty() || prompt_tokens.len() + NEW_TOKENS > limit {
                let tokens = prompt_tokens.len();
                return Err(format!(
                    "--golden: a prompt must have 1 to {} tokens; {text:?} has {tokens}",
                    limit.saturating_sub(NEW_TOKENS)
                )
                .into());
            }
            let tokens = answer(model, &prompt_tokens)?;
            Ok(GoldenCase {
                prompt_tokens,
                tokens,
            })
        });
        let cases = cases.collect::<Result<_, Box<dyn Error>>>()?;
        Ok(GoldenTokens { cases })
    }

    /// Returns the content of the file. `weights` is the file of the model that it belongs to.
    ///
    /// # Errors
    /// If that file cannot be read.
    pub(crate) fn to_json(&self, weights: &Path) -> io::Result<String> {
        let mut hash = Sha256::new();
        io::copy(&mut File::open(weights)?, &mut HashWriter(&mut hash))?;
        let bytes = hash.finalize();
        let hash: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let json = json!({"version": VERSION, "weights_sha256": hash, "cases": self.cases});
        Ok(format!("{json}\n"))
    }

    /// Reads the file of a checkpoint. Returns `None` if it has none.
    ///
    /// # Errors
    /// If the file is malformed, has an unknown version, or has a case that `model` cannot compute.
    pub(super) fn read(source: &Source, model: &Model) -> Result<Option<GoldenTokens>, String> {
        let Some(text) = source.read(FILE).map_err(|error| error.to_string())? else {
            return Ok(None);
        };
        let golden = parse(&text).and_then(|golden| {
            let config = model.config();
            golden.check_cases(config.vocab, config.max_position)?;
            Ok(golden)
        });
        golden
            .map(Some)
            .map_err(|problem| format!("{FILE}: {problem}"))
    }

    /// Returns the number of cases.
    pub(super) fn cases(&self) -> usize {
        self.cases.len()
    }

    /// Compares the greedy tokens of the model with the tokens in the file. A step computes at most
    /// `max_step` tokens, and as many rows of logits.
    ///
    /// # Errors
    /// If a token differs. The error names the case and the position.
    pub(super) fn check(&self, model: &mut Model, max_step: usize) -> Result<(), String> {
        let longest = self.cases.iter().map(GoldenCase::len).max().unwrap_or(0);
        let pages: Vec<Page> = (0..longest.div_ceil(PAGE_TOKENS) as u32)
            .map(Page::new)
            .collect();
        // The tokens are of a run with keys and values in half precision.
        let kv = model.new_kv_store_in(KvDtype::F16, pages.len());
        let mut kv =
            kv.map_err(|error| format!("{FILE}: no memory for keys and values: {error}"))?;
        for (index, case) in self.cases.iter().enumerate() {
            let wrong = case.first_wrong(model, &pages, &mut kv, max_step);
            let Some((position, token)) = wrong else {
                continue;
            };
            let recorded = case.tokens[position];
            let token = token.map_or("no token".to_owned(), |token| format!("token {token}"));
            return Err(format!(
                "{FILE}: case {index}, position {position} (both from 0): the model says {token}, \
                 but the file says {recorded}. The files of the checkpoint or this machine compute \
                 something else than the run that recorded the file. Fetch or convert the \
                 checkpoint again, or remove the file if it belongs to other weights"
            ));
        }
        Ok(())
    }

    fn check_cases(&self, vocabulary: usize, max_position: usize) -> Result<(), String> {
        if self.cases.is_empty() {
            return Err("it has no cases; remove the file if nothing is to be checked".to_owned());
        }
        let all = self.cases.iter().map(GoldenCase::len).sum::<usize>();
        if all > MAX_TOKENS {
            return Err(format!(
                "it has {all} tokens; at most {MAX_TOKENS} are checked"
            ));
        }
        for (index, case) in self.cases.iter().enumerate() {
            case.check(vocabulary, max_position)
                .map_err(|problem| format!("case {index}: {problem}"))?;
        }
        Ok(())
    }
}

fn parse(text: &[u8]) -> Result<GoldenTokens, String> {
    #[derive(Deserialize)]
    struct Version {
        version: Option<Value>,
    }
    if text.len() > MAX_BYTES {
        let bytes = text.len();
        return Err(format!("it has {bytes} bytes; the limit is {MAX_BYTES}"));
    }
    let Version { version } = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let version = version.unwrap_or_default();
    if version.as_u64() != Some(VERSION) {
        return Err(format!("'version' must be {VERSION}; got {version}"));
    }
    serde_json::from_slice(text).map_err(|error| error.to_string())
}

impl GoldenCase {
    /// Returns the number of tokens whose keys and values are computed, at most.
    fn len(&self) -> usize {
        self.prompt_tokens.len() + self.tokens.len()
    }

    fn check(&self, vocabulary: usize, max_position: usize) -> Result<(), String> {
        for (name, tokens) in [
            ("prompt_tokens", &self.prompt_tokens),
            ("tokens", &self.tokens),
        ] {
            if tokens.is_empty() {
                return Err(format!("'{name}' is empty"));
            }
            let unknown = tokens
                .iter()
                .position(|token| *token as usize >= vocabulary);
            if let Some(position) = unknown {
                let token = tokens[position];
                return Err(format!(
                    "'{name}', position {position}: the vocabulary of {vocabulary} tokens has no \
                     token {token}"
                ));
            }
        }
        let length = self.len();
        if length > max_position {
            return Err(format!(
                "it has {length} tokens, but the model has {max_position} positions"
            ));
        }
        Ok(())
    }

    /// Returns the first position at which the model says another token, and that token; `None`
    /// for a token if a logit is NaN.
    ///
    /// The recorded tokens are computed like a prompt. Up to the first difference that equals a
    /// decode of one token after the other, bit for bit, and takes less time.
    fn first_wrong(
        &self,
        model: &mut Model,
        pages: &[Page],
        kv: &mut KvStore,
        max_step: usize,
    ) -> Option<(usize, Option<TokenId>)> {
        let text = [&self.prompt_tokens[..], &self.tokens].concat();
        let first = self.prompt_tokens.len() - 1; // Its logits give the first token.
        let mut logits = vec![0.0; model.config().vocab];
        let mut batch = Batch::new();
        let (mut start, mut slabs) = (0, AlternatingSlabs::new(0));
        for chunk in text[..text.len() - 1].chunks(max_step) {
            let end = start + chunk.len();
            let rows = end.saturating_sub(first).min(chunk.len());
            let pages = &pages[..end.div_ceil(PAGE_TOKENS)];
            batch.clear();
            batch.push_row(SequenceId::new(0, 0), start, chunk, pages, rows);
            batch.set_states(slabs.next_row());
            let computed = model.forward(&batch, kv);
            for row in 0..rows {
                computed.copy_row(row, &mut logits);
                let (token, next) = (greedy(&logits), end - rows + row + 1);
                if token != Some(text[next]) {
                    return Some((next - self.prompt_tokens.len(), token));
                }
            }
            start = end;
        }
        None
    }
}

/// Returns the tokens with the largest logits after a prompt, one after the other.
fn answer(model: &mut Model, prompt: &[TokenId]) -> Result<Vec<TokenId>, Box<dyn Error>> {
    let longest = prompt.len() + NEW_TOKENS;
    let pages = (0..).map(Page::new).take(longest.div_ceil(PAGE_TOKENS));
    let pages: Vec<Page> = pages.collect();
    let mut kv = model.new_kv_store(pages.len())?;
    let mut logits = vec![0.0; model.config().vocab];
    let (mut batch, mut text) = (Batch::new(), prompt.to_vec());
    let (mut computed, mut slabs) = (0, AlternatingSlabs::new(0));
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
        batch.set_states(slabs.next_row());
        let step = model.forward(&batch, &mut kv);
        if is_last {
            step.copy_row(0, &mut logits);
            let token = greedy(&logits).filter(|&token| logits[token as usize].is_finite());
            text.push(token.ok_or("--golden: the model computes infinities or NaN")?);
        }
        computed = end;
    }
    Ok(text.split_off(prompt.len()))
}

/// Returns the token with the largest logit, the lowest of equal ones. `None` if a logit is NaN.
fn greedy(logits: &[f32]) -> Option<TokenId> {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if logit.is_nan() {
            return None;
        }
        if *logit > logits[best] {
            best = token;
        }
    }
    Some(best as TokenId)
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

#[cfg(test)]
mod tests {
    use serde_json::json;
    use sterna_kernels::Kernels;

    use super::*;
    use crate::demo;
    use crate::model::LoadOptions;

    /// What `transformers` says of the demo model.
    const REFERENCE: &str = include_str!("../../tests/fixtures/demo/expected.json");
    /// A smaller distance of the two largest logits may be due to rounding.
    const MIN_MARGIN: f64 = 0.9;

    #[derive(Deserialize)]
    struct Reference {
        prompts: Vec<ReferencePrompt>,
    }

    #[derive(Deserialize)]
    struct ReferencePrompt {
        prompt: Vec<TokenId>,
        continuation: Vec<TokenId>,
        margins: Vec<f64>,
    }

    fn demo_model() -> Model {
        Model::load(&demo::source(), LoadOptions::new(Kernels::best(), 2)).unwrap()
    }

    /// Returns the file that records the reference's clear tokens.
    fn recorded() -> Value {
        let reference: Reference = serde_json::from_str(REFERENCE).unwrap();
        let is_clear = |prompt: &&ReferencePrompt| prompt.margins[0] >= MIN_MARGIN;
        let cases = reference.prompts.iter().filter(is_clear).map(|prompt| {
            let clear = prompt
                .margins
                .iter()
                .take_while(|margin| **margin >= MIN_MARGIN);
            let tokens = &prompt.continuation[..clear.count()];
            json!({"prompt_tokens": prompt.prompt, "tokens": tokens})
        });
        json!({"version": 1, "cases": cases.collect::<Vec<_>>()})
    }

    /// Reads and checks a file, with steps of `max_step` tokens.
    fn check(model: &mut Model, file: &Value, max_step: usize) -> Result<(), String> {
        let file = (FILE.to_owned(), file.to_string().into_bytes());
        let golden = GoldenTokens::read(&Source::in_memory([file]), model)?;
        golden.expect("there is a file").check(model, max_step)
    }

    #[test]
    fn the_tokens_of_a_trusted_run_pass_in_steps_of_any_length() {
        let mut model = demo_model();
        for max_step in [1, 7, 21, 22, 23, 64] {
            assert_eq!(
                check(&mut model, &recorded(), max_step),
                Ok(()),
                "{max_step}"
            );
        }
        assert!(
            GoldenTokens::read(&demo::source(), &model)
                .unwrap()
                .is_none()
        );
    }

    #[test]
    fn a_wrong_token_is_named_by_case_and_position() {
        let mut model = demo_model();
        for (case, whole) in recorded()["cases"].as_array().unwrap().iter().enumerate() {
            let answer = whole["tokens"].as_array().unwrap();
            for position in [0, answer.len() / 2, answer.len() - 1] {
                let mut file = recorded();
                let right = answer[position].as_u64().unwrap();
                let wrong = right ^ 1;
                file["cases"][case]["tokens"][position] = wrong.into();
                let error = check(&mut model, &file, 8).unwrap_err();
                let place = format!("sterna_golden.json: case {case}, position {position} ");
                assert!(error.starts_with(&place), "{error}");
                let tokens = format!("says token {right}, but the file says {wrong}");
                assert!(error.contains(&tokens), "{error}");
            }
        }
    }

    #[test]
    fn a_file_that_cannot_be_checked_is_refused() {
        let mut model = demo_model();
        let vocabulary = model.config().vocab;
        let long = vec![1; model.config().max_position];
        let many = vec![json!({"prompt_tokens": vec![1; 200], "tokens": vec![1; 56]}); 65];
        let mut refused = |pointer: &str, value: Value, expected: &str| {
            let mut file = recorded();
            *file.pointer_mut(pointer).unwrap() = value;
            let error = check(&mut model, &file, 8).unwrap_err();
            assert!(error.contains(expected), "{expected}: {error}");
        };
        refused("/version", json!(2), "'version' must be 1; got 2");
        refused("/version", json!(null), "'version' must be 1; got null");
        refused("/cases", json!([]), "no cases");
        refused("/cases", json!(many), "16640 tokens; at most 16384");
        refused("/cases/1/tokens", json!([]), "case 1: 'tokens' is empty");
        refused("/cases/1/tokens/2", json!(-1), "-1");
        let expected =
            format!("case 2: 'prompt_tokens', position 4: the vocabulary of {vocabulary}");
        refused("/cases/2/prompt_tokens/4", json!(vocabulary), &expected);
        refused("/cases/0/prompt_tokens", json!(long), "positions");
        let mut unversioned = recorded();
        unversioned.as_object_mut().unwrap().remove("version");
        let error = check(&mut model, &unversioned, 8).unwrap_err();
        assert!(error.contains("'version' must be 1"), "{error}");
    }

    #[test]
    fn the_lowest_of_equal_tokens_is_greedy() {
        assert_eq!(greedy(&[0.0, 2.0, 2.0, -1.0]), Some(1));
        assert_eq!(greedy(&[0.0, f32::NAN, 2.0]), None);
    }
}
