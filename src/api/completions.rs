//! `POST /v1/completions`: a prompt of text or tokens, continued.

use std::collections::BTreeSet;
use std::time::Instant;

use axum::extract::{Extension, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::authentication::Caller;
use super::choices::{Choices, FinishedChoice};
use super::error::ApiError;
use super::fields::{Fields, wrong_kind};
use super::generation::{
    ParsedRequest, Piece, TokenLogprob, check_length, finite, spelled, with_logprobs,
};
use super::params::{Params, token_id};
use super::sse::{self, ChunkFormat, ResponseIdentity};
use super::{App, Serving, body};
use crate::engine::TokenId;
use crate::tenants::Tenant;
use crate::text::Tokenizer;

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: u32 = 16;
const MAX_LOGPROBS: i64 = 5;
const BYTES: &str = "bytes:";

/// Continues a prompt, at once or as a stream.
pub(super) async fn create(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let call = body::read(&app, &caller, request, read).await?;
    let serving = app.serving()?;
    let header = ResponseIdentity::new("cmpl-", "text_completion", &serving.model);
    let wants_logprobs = call.params.sampling.logprobs.is_some();
    let streaming = call.params.stream;
    let choices = Choices::start(serving, call, caller, arrived)?;
    match streaming {
        Some(streaming) => {
            sse::respond(
                choices,
                header,
                CompletionChunkFormat {
                    wants_logprobs,
                    begun: BTreeSet::new(),
                },
                streaming,
            )
            .await
        }
        None => whole(choices, &header, wants_logprobs).await,
    }
}

fn read(serving: &Serving, tenant: &Tenant, json: &Value) -> Result<ParsedRequest, ApiError> {
    let fields = Fields::of_body(json)?;
    serving.model.check(fields.string("model")?, tenant)?;
    let mut params = Params::read(&fields, &serving.model)?;
    params.sampling = with_logprobs(
        params.sampling,
        fields.integer("logprobs", 0..=MAX_LOGPROBS)?,
    );
    let prompt = prompt(&fields, serving)?;
    ParsedRequest::new(
        prompt,
        params,
        &serving.model,
        Some(DEFAULT_MAX_TOKENS),
        "prompt",
    )
}

/// A string, tokens, or an array of one of those.
fn prompt(fields: &Fields<'_>, serving: &Serving) -> Result<Vec<TokenId>, ApiError> {
    let Some(value) = fields.get("prompt") else {
        return Err(ApiError::invalid_value("prompt", "'prompt' is missing."));
    };
    let items = match value {
        Value::String(text) => return encode(text, serving),
        Value::Array(items) => items,
        other => return Err(wrong_kind("prompt", "a string or an array", other)),
    };
    match items.as_slice() {
        [] => Err(ApiError::invalid_value("prompt", "'prompt' is empty.")),
        [Value::String(text)] => encode(text, serving),
        [Value::Array(tokens)] if !tokens.is_empty() => token_ids(tokens, serving),
        [Value::Array(_)] => Err(ApiError::invalid_value("prompt", "'prompt' is empty.")),
        [Value::String(_) | Value::Array(_), ..] => {
            let message = "'prompt' holds several prompts; this server takes one a request.";
            Err(ApiError::unsupported("prompt", message))
        }
        tokens => token_ids(tokens, serving),
    }
}

fn encode(text: &str, serving: &Serving) -> Result<Vec<TokenId>, ApiError> {
    check_length(text.len(), serving, "prompt")?;
    serving
        .tokenizer
        .encode_prompt(text)
        .map_err(|error| ApiError::internal(&error.to_string()))
}

fn token_ids(items: &[Value], serving: &Serving) -> Result<Vec<TokenId>, ApiError> {
    items
        .iter()
        .map(|item| token_id(item, "prompt", &serving.model))
        .collect()
}

async fn whole(
    mut choices: Choices,
    header: &ResponseIdentity,
    wants_logprobs: bool,
) -> Result<Response, ApiError> {
    let wholes = choices.whole().await?;
    let choice = |(index, whole): (u32, FinishedChoice)| CompletionChoice {
        index,
        text: whole.answer.text,
        logprobs: wants_logprobs
            .then(|| CompletionLogprobs::new(&whole.answer.logprobs, choices.tokenizer())),
        finish_reason: whole.finish_reason,
        token_ids: choices.prompt().map(|_| whole.answer.tokens),
        prompt_token_ids: choices.prompt(),
    };
    let written: Vec<CompletionChoice<'_>> = (0..).zip(wholes).map(choice).collect();
    let json = header.around(written, Some(Some(choices.usage())), None);
    Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response())
}

struct CompletionChunkFormat {
    wants_logprobs: bool,
    begun: BTreeSet<u32>, // Choices that have been told the prompt.
}

impl ChunkFormat for CompletionChunkFormat {
    const PROMPT_BESIDE_CHOICES: bool = false;

    fn opening(&self, _: u32) -> Option<impl Serialize> {
        None::<()>
    }

    fn piece(&mut self, index: u32, piece: Piece, choices: &Choices) -> impl Serialize {
        let first = self.begun.insert(index);
        CompletionChoice {
            index,
            text: piece.text,
            logprobs: self
                .wants_logprobs
                .then(|| CompletionLogprobs::new(&piece.logprobs, choices.tokenizer())),
            finish_reason: None,
            token_ids: choices.prompt().map(|_| piece.tokens),
            prompt_token_ids: choices.prompt().filter(|_| first),
        }
    }

    fn ending(&self, index: u32, finish_reason: &'static str) -> impl Serialize {
        CompletionChoice {
            index,
            text: String::new(),
            logprobs: None,
            finish_reason: Some(finish_reason),
            token_ids: None,
            prompt_token_ids: None,
        }
    }
}

#[derive(Serialize)]
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

/// OpenAI's older shape: four arrays of one length.
#[derive(Serialize)]
struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<TopLogprobs>,
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    fn new(entries: &[TokenLogprob], tokenizer: &Tokenizer) -> CompletionLogprobs {
        let token = |token: TokenId| spelled(tokenizer, token, BYTES);
        CompletionLogprobs {
            tokens: entries.iter().map(|entry| token(entry.token)).collect(),
            token_logprobs: entries.iter().map(|entry| finite(entry.logprob)).collect(),
            top_logprobs: entries
                .iter()
                .map(|entry| TopLogprobs::new(entry, tokenizer))
                .collect(),
            text_offset: entries.iter().map(|entry| entry.start).collect(),
        }
    }
}

/// The most likely tokens and the chosen one, most likely first, as an object. Of two that are spelled alike the likelier one stays.
struct TopLogprobs(Vec<(String, f32)>);

impl TopLogprobs {
    fn new(entry: &TokenLogprob, tokenizer: &Tokenizer) -> TopLogprobs {
        let mut likely: Vec<(String, f32)> = Vec::new();
        for (token, logprob) in entry
            .top
            .iter()
            .copied()
            .chain([(entry.token, entry.logprob)])
        {
            let token = spelled(tokenizer, token, BYTES);
            if likely.iter().all(|(other, _)| *other != token) {
                likely.push((token, finite(logprob)));
            }
        }
        TopLogprobs(likely)
    }
}

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}
