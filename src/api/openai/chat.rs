//! `POST /v1/chat/completions`: answers a conversation through the model's chat template.

use std::collections::BTreeMap;

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::chunks::Chunks;
use super::envelope::{self, Envelope, PromptFields, UsageField};
use super::read_params;
use crate::api::app::{App, Serving};
use crate::api::error::ApiError;
use crate::api::fields::conversation::ConversationFields;
use crate::api::fields::json_field::{Bool, Integer};
use crate::api::fields::json_object::JsonObject;
use crate::api::fields::params::{CommonFields, is_set};
use crate::api::fields::reasoning::{ReasoningWish, ThinkingTokens, given_limit};
use crate::api::fields::structure::StructureFields;
use crate::api::fields::tool_calls::ToolCall;
use crate::api::fields::tool_fields::ToolChoiceFields;
use crate::api::fields::unsupported;
use crate::api::generation::choice::{AnswerEnd, ChoiceEnd, Piece};
use crate::api::generation::choices::Choices;
use crate::api::generation::logprobs::ChatLogprobs;
use crate::api::generation::request::{ParsedRequest, ResponseMode};
use crate::api::generation::writer::{AnswerWriter, FinishedChoice, Frames, WholeAnswer};
use crate::api::middleware::authentication::Caller;
use crate::api::openapi::{Components, Operation};
use crate::api::respond::{ReadRequest, respond};
use crate::tenants::Tenant;

/// The prefix of the answer's id.
pub(super) const ID_PREFIX: &str = "chatcmpl-";

/// The fields that only this endpoint has, beside the conversation.
#[derive(Deserialize, ToSchema)]
struct ChatFields {
    /// Whether to return the log-probability of each token.
    logprobs: Option<Bool>,
    /// Number of alternatives for each token. Above 0, it needs `logprobs`.
    top_logprobs: Option<Integer<0, 20>>,
    /// Whether to return the reasoning. Default: true.
    include_reasoning: Option<Bool>,
    /// The reasoning is ended after this many tokens. -1 is no limit, the default.
    thinking_token_budget: Option<ThinkingTokens>,
    /// The same under the name of llama.cpp.
    thinking_budget_tokens: Option<ThinkingTokens>,
}

impl ChatFields {
    /// Returns the number of alternatives for each token, or `None` without log-probabilities.
    fn top_logprobs(&self) -> Result<Option<u32>, ApiError> {
        let wanted = is_set(self.logprobs);
        let top = self.top_logprobs.map_or(0, |Integer(top)| top as u32);
        if top > 0 && !wanted {
            let message = "'top_logprobs' requires 'logprobs': true.";
            return Err(ApiError::invalid_value("top_logprobs", message));
        }
        Ok(wanted.then_some(top))
    }
}

/// `POST /v1/chat/completions`: answers a conversation.
pub(in crate::api) async fn chat(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    respond(&app, &caller, request, read).await
}

pub(in crate::api) fn describe(components: &mut Components) -> Operation {
    let fields = vec![
        components.fields::<CommonFields>(),
        components.fields::<StructureFields>(),
        components.fields::<ConversationFields>(),
        components.fields::<ToolChoiceFields>(),
        components.fields::<ChatFields>(),
    ];
    let request = components.object(
        "ChatCompletionRequest",
        fields,
        unsupported::schemas_except(unsupported::OF_CHAT, unsupported::SUPPORTED_BY_CHAT),
    );
    envelope::describe::<ChatChoice, ChatChunkChoice>(
        components,
        "Answers a conversation through the model's chat template.",
        "ChatCompletion",
        request,
    )
}

/// Reads a request.
pub(super) fn read_request(
    serving: &Serving,
    tenant: &Tenant,
    body: &JsonObject<'_>,
) -> Result<ParsedRequest, ApiError> {
    let mut params = read_params(
        serving,
        tenant,
        body,
        unsupported::OF_CHAT,
        unsupported::SUPPORTED_BY_CHAT,
    )?;
    let own: ChatFields = body.read()?;
    params.sampling.logprobs = own.top_logprobs()?;
    let conversation = body.read::<ConversationFields>()?.check()?;
    let tools = body
        .read::<ToolChoiceFields>()?
        .check(conversation.tools())?;
    let is_shown = own.include_reasoning.is_none_or(|Bool(shown)| shown);
    let limit = given_limit("thinking_token_budget", own.thinking_token_budget);
    let of_llama = given_limit("thinking_budget_tokens", own.thinking_budget_tokens);
    let reasoning = ReasoningWish {
        is_shown,
        budget: limit.or(of_llama),
    };
    conversation.request(serving, params, tools, reasoning)
}

fn read(
    serving: &Serving,
    tenant: &Tenant,
    body: &JsonObject<'_>,
) -> Result<ReadRequest, ApiError> {
    let request = read_request(serving, tenant, body)?;
    let writer: Box<dyn AnswerWriter> = match request.params.shape.mode {
        ResponseMode::Stream(usage) => Box::new(ChatStream {
            chunks: Chunks {
                envelope: Envelope::new(ID_PREFIX, "chat.completion.chunk", &serving.model),
                usage,
            },
            calls: BTreeMap::new(),
        }),
        ResponseMode::Whole => {
            let envelope = Envelope::new(ID_PREFIX, "chat.completion", &serving.model);
            WholeAnswer::boxed(
                envelope.id().to_owned(),
                move |finished, choices, frames| {
                    let prompt = PromptFields {
                        tokens: choices.prompt(0),
                        logprobs: choices.prompt_logprobs(&finished[0].output.scores),
                    };
                    let choice = |(index, choice)| ChatChoice::new(index, choice, choices);
                    let written = (0..).zip(finished).map(choice).collect();
                    let usage = UsageField::Counts(choices.usage());
                    frames.push(&envelope.object::<ChatChoice>(written, usage, prompt));
                },
            )
        }
    };
    Ok((request, writer))
}

/// Writes the stream of a chat.
struct ChatStream {
    chunks: Chunks,
    calls: BTreeMap<u32, u32>, // The calls that each choice has begun.
}

impl AnswerWriter for ChatStream {
    fn id(&self) -> Option<&str> {
        Some(self.chunks.envelope.id())
    }

    fn begin(&mut self, choices: &Choices, frames: &mut Frames) {
        for index in 0..choices.count() {
            let opening = ChatChunkChoice {
                index,
                delta: ChatText {
                    role: Some("assistant"),
                    content: Some(Some(String::new())),
                    ..ChatText::default()
                },
                ..ChatChunkChoice::default()
            };
            let prompt = PromptFields {
                tokens: choices.prompt(index).filter(|_| index == 0),
                logprobs: None,
            };
            self.chunks.push_with(opening, prompt, choices, frames);
        }
    }

    fn piece(&mut self, index: u32, piece: Piece, choices: &Choices, frames: &mut Frames) {
        let has_reasoning = !piece.reasoning.is_empty();
        let is_text = !has_reasoning && piece.calls.is_empty();
        let mut deltas = Vec::with_capacity(1 + piece.calls.len());
        if is_text || has_reasoning || !piece.text.is_empty() {
            let text = Some(piece.text).filter(|text| !text.is_empty() || is_text);
            deltas.push(ChatText {
                content: text.map(Some),
                ..ChatText::reasoning(piece.reasoning)
            });
        }
        let begun = self.calls.entry(index).or_default();
        deltas.extend(piece.calls.into_iter().map(|call| ChatText {
            tool_calls: Some(vec![ToolCall::of_delta(call, begun)]),
            ..ChatText::default()
        }));
        let mut logprobs = choices.logprobs(&piece.logprobs, ChatLogprobs::new);
        let mut token_ids = choices.wants_token_ids().then_some(piece.tokens);
        for delta in deltas {
            let choice = ChatChunkChoice {
                index,
                delta,
                logprobs: logprobs.take(),
                finish_reason: None,
                token_ids: token_ids.take(),
            };
            self.chunks.push(choice, choices, frames);
        }
    }

    fn end(&mut self, index: u32, end: ChoiceEnd, choices: &Choices, frames: &mut Frames) {
        let choice = ChatChunkChoice {
            index,
            finish_reason: Some(end.finish_reason),
            ..ChatChunkChoice::default()
        };
        self.chunks.end(choice, choices, frames);
    }

    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        Chunks::fail(error, frames);
    }
}

/// A choice of an answer.
#[derive(Serialize, ToSchema)]
struct ChatChoice {
    /// The number of the choice.
    index: u32,
    /// The answer.
    message: ChatText,
    /// The log-probabilities, if the request asked for them.
    logprobs: Option<ChatLogprobs>,
    /// Why the choice ended.
    finish_reason: Option<AnswerEnd>,
    /// The tokens of the answer, if the request asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

impl ChatChoice {
    fn new(index: u32, choice: FinishedChoice, choices: &Choices) -> ChatChoice {
        let FinishedChoice { output, end } = choice;
        let calls = ToolCall::whole(output.calls);
        let is_text = calls.is_empty() && output.reasoning.is_empty();
        let message = ChatText {
            role: Some("assistant"),
            content: Some(Some(output.text).filter(|text| !text.is_empty() || is_text)),
            tool_calls: Some(calls).filter(|calls| !calls.is_empty()),
            ..ChatText::reasoning(output.reasoning)
        };
        ChatChoice {
            index,
            message,
            logprobs: choices.logprobs(&output.logprobs, ChatLogprobs::new),
            finish_reason: Some(end.finish_reason),
            token_ids: choices.wants_token_ids().then_some(output.tokens),
        }
    }
}

/// What a chunk of a stream adds to a choice.
#[derive(Default, Serialize, ToSchema)]
struct ChatChunkChoice {
    /// The number of the choice.
    index: u32,
    /// What the chunk adds to the message.
    delta: ChatText,
    /// The log-probabilities, if the request asked for them.
    logprobs: Option<ChatLogprobs>,
    /// Why the choice ended; `null` in chunks before its end.
    finish_reason: Option<AnswerEnd>,
    /// The tokens of the chunk, if the request asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// The assistant's message, or a part of it.
#[derive(Default, Serialize, ToSchema)]
struct ChatText {
    /// `assistant`.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    /// The text; `null` in a message of reasoning or calls only.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    content: Option<Option<String>>,
    /// The calls of tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<Vec<ToolCall>>,
    /// The reasoning before the text. Clients of DeepSeek, SGLang and llama.cpp read this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    /// The same text under the name that vLLM has given it since.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
}

impl ChatText {
    /// Returns a text that has only reasoning, or nothing if that is empty.
    fn reasoning(reasoning: String) -> ChatText {
        let reasoning = Some(reasoning).filter(|text| !text.is_empty());
        ChatText {
            reasoning_content: reasoning.clone(),
            reasoning,
            ..ChatText::default()
        }
    }
}
