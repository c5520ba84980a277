//! `POST /v1/chat/completions`: messages through the model's chat template, then the way of every request.

use std::time::Instant;

use axum::extract::{Extension, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;

use super::authentication::Caller;
use super::choices::{Choices, FinishedChoice};
use super::error::{ApiError, quoted};
use super::fields::{Fields, wrong_kind};
use super::generation::{
    ParsedRequest, Piece, TokenLogprob, check_length, finite, spelled, with_logprobs,
};
use super::params::Params;
use super::sse::{self, ChunkFormat, ResponseIdentity};
use super::{App, Serving, body};
use crate::engine::TokenId;
use crate::tenants::Tenant;
use crate::text::{Message, TemplateError, Tokenizer};

const MAX_MESSAGES: usize = 1024;
const MAX_TOP_LOGPROBS: i64 = 20;

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
            let header =
                ResponseIdentity::new("chatcmpl-", "chat.completion.chunk", &serving.model);
            sse::respond(
                choices,
                header,
                ChatChunkFormat {
                    wants_logprobs,
                    wants_tokens,
                },
                streaming,
            )
            .await
        }
        None => {
            let header = ResponseIdentity::new("chatcmpl-", "chat.completion", &serving.model);
            whole(choices, &header, wants_logprobs).await
        }
    }
}

fn read(serving: &Serving, tenant: &Tenant, json: &Value) -> Result<ParsedRequest, ApiError> {
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
    ParsedRequest::new(prompt, params, &serving.model, None, "messages")
}

/// Alternatives to each token, if log-probabilities are wanted.
fn top_logprobs(fields: &Fields<'_>) -> Result<Option<i64>, ApiError> {
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=MAX_TOP_LOGPROBS)?;
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
    if items.len() > MAX_MESSAGES {
        return Err(ApiError::invalid_value(
            "messages",
            format!("'messages' may have {MAX_MESSAGES} messages."),
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
    header: &ResponseIdentity,
    wants_logprobs: bool,
) -> Result<Response, ApiError> {
    let wholes = choices.whole().await?;
    let choice = |(index, whole): (u32, FinishedChoice)| ChatChoice {
        index,
        message: Some(AssistantMessage {
            role: Some("assistant"),
            content: Some(whole.answer.text),
        }),
        delta: None,
        logprobs: wants_logprobs
            .then(|| ChatLogprobs::new(&whole.answer.logprobs, choices.tokenizer())),
        finish_reason: whole.finish_reason,
        token_ids: choices.prompt().map(|_| whole.answer.tokens),
    };
    let written: Vec<ChatChoice> = (0..).zip(wholes).map(choice).collect();
    let json = header.around(written, Some(Some(choices.usage())), choices.prompt());
    Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response())
}

struct ChatChunkFormat {
    wants_logprobs: bool,
    wants_tokens: bool,
}

impl ChunkFormat for ChatChunkFormat {
    const PROMPT_BESIDE_CHOICES: bool = true;

    fn opening(&self, index: u32) -> Option<impl Serialize> {
        let words = AssistantMessage {
            role: Some("assistant"),
            content: Some(String::new()),
        };
        Some(ChatChoice::of_chunk(index, words))
    }

    fn piece(&mut self, index: u32, piece: Piece, choices: &Choices) -> impl Serialize {
        let logprobs = self
            .wants_logprobs
            .then(|| ChatLogprobs::new(&piece.logprobs, choices.tokenizer()));
        let words = AssistantMessage {
            role: None,
            content: Some(piece.text),
        };
        let token_ids = self.wants_tokens.then_some(piece.tokens);
        ChatChoice {
            logprobs,
            token_ids,
            ..ChatChoice::of_chunk(index, words)
        }
    }

    fn ending(&self, index: u32, finish_reason: &'static str) -> impl Serialize {
        let words = AssistantMessage {
            role: None,
            content: None,
        };
        ChatChoice {
            finish_reason: Some(finish_reason),
            ..ChatChoice::of_chunk(index, words)
        }
    }
}

#[derive(Serialize)]
struct ChatChoice {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<AssistantMessage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<AssistantMessage>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<TokenId>>,
}

impl ChatChoice {
    fn of_chunk(index: u32, delta: AssistantMessage) -> ChatChoice {
        ChatChoice {
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
struct AssistantMessage {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

#[derive(Serialize)]
struct ChatLogprobs {
    content: Vec<ChatLogprob>,
}

#[derive(Serialize)]
struct ChatLogprob {
    #[serde(flatten)]
    chosen: TokenLikelihood,
    top_logprobs: Vec<TokenLikelihood>,
}

#[derive(Serialize)]
struct TokenLikelihood {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    fn new(entries: &[TokenLogprob], tokenizer: &Tokenizer) -> ChatLogprobs {
        let likelihood = |token: TokenId, logprob: f32| TokenLikelihood {
            token: spelled(tokenizer, token, ""),
            logprob: finite(logprob),
            bytes: tokenizer.token_bytes(token).to_vec(),
        };
        let entry = |entry: &TokenLogprob| ChatLogprob {
            chosen: likelihood(entry.token, entry.logprob),
            top_logprobs: entry
                .top
                .iter()
                .map(|(token, logprob)| likelihood(*token, *logprob))
                .collect(),
        };
        ChatLogprobs {
            content: entries.iter().map(entry).collect(),
        }
    }
}
