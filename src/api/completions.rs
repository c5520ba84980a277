//! `POST /v1/completions`: continues a prompt of text or tokens.

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::Value;

use super::app::Serving;
use super::choices::{Choices, FinishedChoice};
use super::endpoint::Endpoint;
use super::error::ApiError;
use super::fields::{Fields, wrong_type};
use super::generation::Piece;
use super::logprobs::CompletionLogprobs;
use super::params::{Params, token_id};
use super::parsed_request::{ParsedRequest, check_length};
use crate::engine::TokenId;
use crate::tenants::Tenant;

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: u32 = 16;
const MAX_LOGPROBS: u32 = 5;

/// `POST /v1/completions`.
#[derive(Default)]
pub(super) struct CompletionEndpoint {
    has_prompt: BTreeSet<u32>, // The choices whose chunks have shown the prompt's tokens.
}

impl Endpoint for CompletionEndpoint {
    const ID_PREFIX: &'static str = "cmpl-";
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";
    const PROMPT_BESIDE_CHOICES: bool = false;

    fn read(serving: &Serving, tenant: &Tenant, json: &Value) -> Result<ParsedRequest, ApiError> {
        let fields = Fields::of_body(json)?;
        let model = &serving.model;
        model.check(fields.string("model")?, tenant)?;
        let mut params = Params::read(&fields, model)?;
        params.sampling.logprobs = fields.count("logprobs", 0..=MAX_LOGPROBS)?;
        let prompt = prompt(&fields, serving)?;
        ParsedRequest::new(prompt, params, model, Some(DEFAULT_MAX_TOKENS), "prompt")
    }

    fn whole(&self, index: u32, choice: FinishedChoice, choices: &Choices) -> impl Serialize {
        CompletionChoice {
            finish_reason: choice.finish_reason,
            ..CompletionChoice::of_piece(index, choice.output, choices, choices.prompt())
        }
    }

    fn opening(&self, _: u32) -> Option<impl Serialize> {
        None::<()>
    }

    fn piece(&mut self, index: u32, piece: Piece, choices: &Choices) -> impl Serialize {
        let is_first = self.has_prompt.insert(index);
        let prompt = choices.prompt().filter(|_| is_first);
        CompletionChoice::of_piece(index, piece, choices, prompt)
    }

    fn end(&self, index: u32, finish_reason: &'static str) -> impl Serialize {
        CompletionChoice {
            index,
            finish_reason: Some(finish_reason),
            ..CompletionChoice::default()
        }
    }
}

/// Reads the prompt: a string, an array of token ids, or an array that holds one of those.
fn prompt(fields: &Fields<'_>, serving: &Serving) -> Result<Vec<TokenId>, ApiError> {
    let invalid = |message| Err(ApiError::invalid_value("prompt", message));
    let items = match fields.get("prompt") {
        None => return invalid("'prompt' is missing."),
        Some(Value::String(text)) => return encode(text, serving),
        Some(Value::Array(items)) => items.as_slice(),
        Some(other) => {
            let expected = "a string or an array of token ids";
            return Err(wrong_type("prompt", expected, other));
        }
    };
    let tokens = match items {
        [Value::String(text)] => return encode(text, serving),
        [Value::Array(tokens)] => tokens.as_slice(),
        [Value::String(_) | Value::Array(_), ..] => {
            let message = format!(
                "'prompt' contains {} prompts; this server accepts one prompt per request.",
                items.len()
            );
            return Err(ApiError::unsupported("prompt", message));
        }
        tokens => tokens,
    };
    if tokens.is_empty() {
        return invalid("'prompt' must not be an empty array.");
    }
    let token = |item| token_id(item, "prompt", &serving.model);
    tokens.iter().map(token).collect()
}

fn encode(text: &str, serving: &Serving) -> Result<Vec<TokenId>, ApiError> {
    check_length(text.len(), serving, "prompt")?;
    let tokens = serving.tokenizer.encode_prompt(text);
    tokens.map_err(|error| ApiError::internal(&error.to_string()))
}

#[derive(Default, Serialize)]
struct CompletionChoice<'a> {
    index: u32,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [TokenId]>,
}

impl<'a> CompletionChoice<'a> {
    fn of_piece(
        index: u32,
        piece: Piece,
        choices: &Choices,
        prompt: Option<&'a [TokenId]>,
    ) -> CompletionChoice<'a> {
        CompletionChoice {
            index,
            text: piece.text,
            logprobs: choices.logprobs(&piece.logprobs, CompletionLogprobs::new),
            finish_reason: None,
            token_ids: choices.wants_token_ids().then_some(piece.tokens),
            prompt_token_ids: prompt,
        }
    }
}
