//! `POST /v1/chat/completions`: messages through the model's chat template, then the way of every request.

use std::time::Instant;

use axum::extract::{Extension, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;

use super::choices::{Choices, Whole};
use super::error::{ApiError, quoted};
use super::fields::{Fields, wrong_kind};
use super::generation::{Call, Piece, TokenLogprob, check_length, finite, spelled, with_logprobs};
use super::params::Params;
use super::sse::{self, Chunks, Header};
use super::tenant::Caller;
use super::{App, Serving, body};
use crate::engine::TokenId;
use crate::tenants::Tenant;
use crate::text::{Message, TemplateError, Tokenizer};

const MOST_MESSAGES: usize = 1024;
const MOST_TOP_LOGPROBS: i64 = 20;

/// Answers a conversation, at once or as a stream.
pub(super) async fn create(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let call = body::read(&app, &caller, request, read).await?;
    let serving = app.serving()?;
    let wants_logprobs = call.params.sampling.logprobs.is_some();
    let wants_tokens = call.params.return_token_ids;
    let streaming = call.params.stream;
    let choices = Choices::start(serving, call, caller, arrived)?;
    match streaming {
        Some(streaming) => {
            let header = Header::new("chatcmpl-", "chat.completion.chunk", &serving.model);
            sse::respond(
                choices,
                header,
                ChatChunks {
                    wants_logprobs,
                    wants_tokens,
                },
                streaming,
            )
            .await
        }
        None => {
            let header = Header::new("chatcmpl-", "chat.completion", &serving.model);
            whole(choices, &header, wants_logprobs).await
        }
    }
}

fn read(serving: &Serving, tenant: &Tenant, json: &Value) -> Result<Call, ApiError> {
    let fields = Fields::of_body(json)?;
    serving.model.check(fields.string("model")?, tenant)?;
    let mut params = Params::read(&fields, &serving.model)?;
    params.sampling = with_logprobs(params.sampling, top_logprobs(&fields)?);
    let messages = messages(&fields)?;
    let Some(template) = &serving.chat_template else {
        return Err(ApiError::no_chat_template(&serving.model.name));
    };
    check_length(
        messages.iter().map(|message| message.content.len()).sum(),
        serving,
        "messages",
    )?;
    let prompt = template
        .prompt(&serving.tokenizer, &messages)
        .map_err(|error| match error {
            TemplateError::Text(error) => ApiError::internal(&error.to_string()),
            error => ApiError::invalid_value("messages", format!("{error}.")),
        })?;
    Call::new(prompt, params, &serving.model, None, "messages")
}

/// Alternatives to each token, if log-probabilities are wanted.
fn top_logprobs(fields: &Fields<'_>) -> Result<Option<i64>, ApiError> {
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=MOST_TOP_LOGPROBS)?;
    match top {
        Some(top) if !wanted && top > 0 => Err(ApiError::invalid_value(
            "top_logprobs",
            "'top_logprobs' needs 'logprobs': true.",
        )),
        top => Ok(wanted.then(|| top.unwrap_or(0))),
    }
}

fn messages(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let items = fields.array("messages")?.unwrap_or_default();
    if items.is_empty() {
        return Err(ApiError::invalid_value(
            "messages",
            "'messages' must have at least one message.",
        ));
    }
    if items.len() > MOST_MESSAGES {
        return Err(ApiError::invalid_value(
            "messages",
            format!("'messages' may have {MOST_MESSAGES} messages."),
        ));
    }
    items
        .iter()
        .enumerate()
        .map(|(index, item)| message(item, &format!("messages[{index}]")))
        .collect()
}

fn message(item: &Value, param: &str) -> Result<Message, ApiError> {
    if !item.is_object() {
        return Err(wrong_kind(param, "an object", item));
    }
    let role_param = format!("{param}.role");
    let role = match item["role"].as_str() {
        Some(role @ ("system" | "user" | "assistant")) => role,
        Some("developer") => "system",
        Some(role @ ("tool" | "function")) => {
            let message = format!(
                "Messages of the role '{role}' are not supported: this server does not call tools."
            );
            return Err(ApiError::unsupported(role_param, message));
        }
        _ => {
            let given = quoted(&item["role"].to_string());
            let message = format!(
                "'{role_param}' must be system, developer, user or assistant, not {given}."
            );
            return Err(ApiError::invalid_value(role_param, message));
        }
    };
    let calls = &item["tool_calls"];
    if !calls.is_null() && calls.as_array().is_none_or(|calls| !calls.is_empty()) {
        let message = "Tool calls are not supported.";
        return Err(ApiError::unsupported(
            format!("{param}.tool_calls"),
            message,
        ));
    }
    let content_param = format!("{param}.content");
    let content = match &item["content"] {
        Value::Null if role == "assistant" => String::new(), // As after a call to a tool.
        value => content(value, role, &content_param)?,
    };
    Ok(Message {
        role: role.to_owned(),
        content,
    })
}

/// A string, or parts that are all text.
fn content(value: &Value, role: &str, param: &str) -> Result<String, ApiError> {
    let parts = match value {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        other => {
            return Err(wrong_kind(
                param,
                "a string or an array of text parts",
                other,
            ));
        }
    };
    parts
        .iter()
        .enumerate()
        .map(|(index, part)| text_part(part, role, &format!("{param}[{index}]")))
        .collect()
}

fn text_part<'a>(part: &'a Value, role: &str, param: &str) -> Result<&'a str, ApiError> {
    match (part["type"].as_str(), part["text"].as_str()) {
        (Some("refusal"), _) if role == "assistant" => {
            let refusal = &part["refusal"];
            let wrong = || wrong_kind(&format!("{param}.refusal"), "a string", refusal);
            refusal.as_str().ok_or_else(wrong)
        }
        (Some("text"), Some(text)) => Ok(text),
        (Some("text"), None) => Err(wrong_kind(
            &format!("{param}.text"),
            "a string",
            &part["text"],
        )),
        (Some(kind), _) => {
            let message = format!(
                "Parts of the type {} are not supported: this server reads text only.",
                quoted(kind)
            );
            Err(ApiError::unsupported(format!("{param}.type"), message))
        }
        (None, _) => Err(wrong_kind(
            &format!("{param}.type"),
            "a string",
            &part["type"],
        )),
    }
}

async fn whole(
    mut choices: Choices,
    header: &Header,
    wants_logprobs: bool,
) -> Result<Response, ApiError> {
    let wholes = choices.whole().await?;
    let choice = |(index, whole): (u32, Whole)| Choice {
        index,
        message: Some(Words {
            role: Some("assistant"),
            content: Some(whole.answer.text),
        }),
        delta: None,
        logprobs: wants_logprobs
            .then(|| Logprobs::new(&whole.answer.logprobs, choices.tokenizer())),
        finish_reason: whole.finish_reason,
        token_ids: choices.prompt().map(|_| whole.answer.tokens),
    };
    let written: Vec<Choice> = (0..).zip(wholes).map(choice).collect();
    let json = header.around(written, Some(Some(choices.usage())), choices.prompt());
    Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response())
}

struct ChatChunks {
    wants_logprobs: bool,
    wants_tokens: bool,
}

impl Chunks for ChatChunks {
    const PROMPT_BESIDE_CHOICES: bool = true;

    fn opening(&self, index: u32) -> Option<impl Serialize> {
        let words = Words {
            role: Some("assistant"),
            content: Some(String::new()),
        };
        Some(Choice::of_chunk(index, words))
    }

    fn piece(&mut self, index: u32, piece: Piece, choices: &Choices) -> impl Serialize {
        let logprobs = self
            .wants_logprobs
            .then(|| Logprobs::new(&piece.logprobs, choices.tokenizer()));
        let words = Words {
            role: None,
            content: Some(piece.text),
        };
        let token_ids = self.wants_tokens.then_some(piece.tokens);
        Choice {
            logprobs,
            token_ids,
            ..Choice::of_chunk(index, words)
        }
    }

    fn ending(&self, index: u32, finish_reason: &'static str) -> impl Serialize {
        let words = Words {
            role: None,
            content: None,
        };
        Choice {
            finish_reason: Some(finish_reason),
            ..Choice::of_chunk(index, words)
        }
    }
}

#[derive(Serialize)]
struct Choice {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Words>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Words>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<TokenId>>,
}

impl Choice {
    fn of_chunk(index: u32, delta: Words) -> Choice {
        Choice {
            index,
            message: None,
            delta: Some(delta),
            logprobs: None,
            finish_reason: None,
            token_ids: None,
        }
    }
}

/// A message, or what is added to one.
#[derive(Serialize)]
struct Words {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

#[derive(Serialize)]
struct Logprobs {
    content: Vec<Entry>,
}

#[derive(Serialize)]
struct Entry {
    #[serde(flatten)]
    chosen: Likelihood,
    top_logprobs: Vec<Likelihood>,
}

#[derive(Serialize)]
struct Likelihood {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl Logprobs {
    fn new(entries: &[TokenLogprob], tokenizer: &Tokenizer) -> Logprobs {
        let likelihood = |token: TokenId, logprob: f32| Likelihood {
            token: spelled(tokenizer, token, ""),
            logprob: finite(logprob),
            bytes: tokenizer.token_bytes(token).to_vec(),
        };
        let entry = |entry: &TokenLogprob| Entry {
            chosen: likelihood(entry.token, entry.logprob),
            top_logprobs: entry
                .top
                .iter()
                .map(|(token, logprob)| likelihood(*token, *logprob))
                .collect(),
        };
        Logprobs {
            content: entries.iter().map(entry).collect(),
        }
    }
}
