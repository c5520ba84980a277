//! `POST /v1/chat/completions`: answers a conversation through the model's chat template.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::endpoint::Endpoint;
use crate::api::app::Serving;
use crate::api::error::ApiError;
use crate::api::fields::conversation::ConversationFields;
use crate::api::fields::json_field::{Bool, Integer};
use crate::api::fields::json_object::JsonObject;
use crate::api::fields::params::is_set;
use crate::api::fields::tool_calls::ToolCall;
use crate::api::fields::tool_fields::ToolChoiceFields;
use crate::api::fields::unsupported::{self, UnsupportedField};
use crate::api::generation::choice::{AnswerEnd, Piece};
use crate::api::generation::choices::{Choices, FinishedChoice};
use crate::api::generation::logprobs::ChatLogprobs;
use crate::api::generation::request::{Params, ParsedRequest};
use crate::api::openapi::{Components, ObjectSchema};

/// The fields that only this endpoint has, beside the conversation.
#[derive(Deserialize, ToSchema)]
pub(super) struct ChatFields {
    /// Whether to return the log-probability of each token.
    logprobs: Option<Bool>,
    /// Number of alternatives for each token. Above 0, it needs `logprobs`.
    top_logprobs: Option<Integer<0, 20>>,
    /// Whether to return the reasoning. Default: true.
    include_reasoning: Option<Bool>,
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

/// `POST /v1/chat/completions`.
#[derive(Default)]
pub(in crate::api) struct ChatEndpoint {
    calls: BTreeMap<u32, u32>, // The calls that each choice has begun.
}

impl Endpoint for ChatEndpoint {
    const ID_PREFIX: &'static str = "chatcmpl-";
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";
    const PROMPT_BESIDE_CHOICES: bool = true;
    const UNSUPPORTED: &[UnsupportedField] = unsupported::OF_CHAT;
    const NAME: &'static str = "ChatCompletion";
    const SUMMARY: &'static str = "Answers a conversation through the model's chat template.";
    type Choice = ChatChoice;
    type ChunkChoice = ChatChunkChoice;

    fn fields(components: &mut Components) -> Vec<ObjectSchema> {
        vec![
            components.fields::<ConversationFields>(),
            components.fields::<ToolChoiceFields>(),
            components.fields::<ChatFields>(),
        ]
    }

    fn read_own(
        serving: &Serving,
        body: JsonObject<'_>,
        mut params: Params,
    ) -> Result<ParsedRequest, ApiError> {
        let own: ChatFields = body.read()?;
        params.sampling.logprobs = own.top_logprobs()?;
        let conversation = body.read::<ConversationFields>()?.check()?;
        let tools = body
            .read::<ToolChoiceFields>()?
            .check(conversation.tools())?;
        let is_wanted = own.include_reasoning.is_none_or(|Bool(wanted)| wanted);
        conversation.request(serving, params, tools, is_wanted)
    }

    fn whole(&self, index: u32, choice: FinishedChoice, choices: &Choices) -> ChatChoice {
        let finish_reason = choice.finish_reason();
        let FinishedChoice { output, .. } = choice;
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
            finish_reason,
            token_ids: choices.wants_token_ids().then_some(output.tokens),
        }
    }

    fn opening(&self, index: u32) -> Option<ChatChunkChoice> {
        let delta = ChatText {
            role: Some("assistant"),
            content: Some(Some(String::new())),
            ..ChatText::default()
        };
        Some(ChatChunkChoice {
            index,
            delta,
            ..ChatChunkChoice::default()
        })
    }

    fn piece(&mut self, index: u32, piece: Piece, choices: &Choices) -> Vec<ChatChunkChoice> {
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
        let mut chunks = deltas.into_iter().map(|delta| ChatChunkChoice {
            index,
            delta,
            ..ChatChunkChoice::default()
        });
        let first = chunks.next().map(|first| ChatChunkChoice {
            logprobs: choices.logprobs(&piece.logprobs, ChatLogprobs::new),
            token_ids: choices.wants_token_ids().then_some(piece.tokens),
            ..first
        });
        first.into_iter().chain(chunks).collect()
    }

    fn end(&self, index: u32, finish_reason: AnswerEnd) -> ChatChunkChoice {
        ChatChunkChoice {
            index,
            finish_reason: Some(finish_reason),
            ..ChatChunkChoice::default()
        }
    }
}

/// A choice of an answer.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct ChatChoice {
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

/// What a chunk of a stream adds to a choice.
#[derive(Default, Serialize, ToSchema)]
pub(in crate::api) struct ChatChunkChoice {
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
