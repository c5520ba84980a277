//! `POST /v1/chat/completions`: answers a conversation through the model's chat template.

use serde::{Deserialize, Serialize};

use super::app::Serving;
use super::choices::{Choices, FinishedChoice};
use super::endpoint::Endpoint;
use super::error::ApiError;
use super::fields::{Bool, Integer};
use super::generation::Piece;
use super::json::JsonObject;
use super::logprobs::ChatLogprobs;
use super::messages::Messages;
use super::params::{Params, is_set};
use super::parsed_request::{ParsedRequest, ReasoningField, check_length, encoding_error};
use super::template_kwargs::TemplateKwargs;
use super::unsupported::{self, UnsupportedField};
use crate::engine::TokenId;
use crate::text::{Message, TemplateError};

/// The fields that only this endpoint has.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ChatFields {
    messages: Option<Messages>,
    logprobs: Option<Bool>,
    top_logprobs: Option<Integer<0, 20>>,
    chat_template_kwargs: Option<TemplateKwargs>,
    enable_thinking: Option<Bool>,
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
pub(super) struct ChatEndpoint;

impl Endpoint for ChatEndpoint {
    const ID_PREFIX: &'static str = "chatcmpl-";
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";
    const PROMPT_BESIDE_CHOICES: bool = true;
    const UNSUPPORTED: &[UnsupportedField] = unsupported::OF_CHAT;

    fn read_own(
        serving: &Serving,
        body: JsonObject<'_>,
        mut params: Params,
    ) -> Result<ParsedRequest, ApiError> {
        let model = &serving.model;
        let own: ChatFields = body.read()?;
        params.sampling.logprobs = own.top_logprobs()?;
        let messages = own.messages.unwrap_or_default().check()?;
        let Some(template) = &serving.chat_template else {
            return Err(ApiError::no_chat_template(&model.name));
        };
        let bytes = |message: &Message| {
            message.content.len() + message.reasoning.as_ref().map_or(0, String::len)
        };
        check_length(messages.iter().map(bytes).sum(), serving, "messages")?;
        let kwargs = own.chat_template_kwargs.unwrap_or_default();
        let arguments = kwargs.with_thinking(own.enable_thinking);
        let prompt = template.prompt(&serving.tokenizer, &messages, &arguments);
        let prompt = prompt.map_err(template_error)?;
        let is_wanted = own.include_reasoning.is_none_or(|Bool(wanted)| wanted);
        let reasoning = serving
            .tokenizer
            .reasoning_tags()
            .map(|tags| ReasoningField {
                tags,
                is_opened: prompt.opens_reasoning,
                is_wanted,
            });
        let request = ParsedRequest::new(prompt.tokens, params, model, None, "messages")?;
        Ok(ParsedRequest {
            reasoning,
            ..request
        })
    }

    fn whole(&self, index: u32, choice: FinishedChoice, choices: &Choices) -> impl Serialize {
        let FinishedChoice { output, .. } = choice;
        let message = ChatText {
            role: Some("assistant"),
            content: Some(output.text)
                .filter(|text| !text.is_empty() || output.reasoning.is_empty()),
            ..ChatText::reasoning(output.reasoning)
        };
        ChatChoice {
            logprobs: choices.logprobs(&output.logprobs, ChatLogprobs::new),
            finish_reason: choice.finish_reason,
            token_ids: choices.wants_token_ids().then_some(output.tokens),
            ..ChatChoice::new(index, ChatTextField::Message(message))
        }
    }

    fn opening(&self, index: u32) -> Option<impl Serialize> {
        let delta = ChatText {
            role: Some("assistant"),
            content: Some(String::new()),
            ..ChatText::default()
        };
        Some(ChatChoice::new(index, ChatTextField::Delta(delta)))
    }

    fn piece(&mut self, index: u32, piece: Piece, choices: &Choices) -> impl Serialize {
        let has_reasoning = !piece.reasoning.is_empty();
        let delta = ChatText {
            content: Some(piece.text).filter(|text| !text.is_empty() || !has_reasoning),
            ..ChatText::reasoning(piece.reasoning)
        };
        ChatChoice {
            logprobs: choices.logprobs(&piece.logprobs, ChatLogprobs::new),
            token_ids: choices.wants_token_ids().then_some(piece.tokens),
            ..ChatChoice::new(index, ChatTextField::Delta(delta))
        }
    }

    fn end(&self, index: u32, finish_reason: &'static str) -> impl Serialize {
        let delta = ChatText::default();
        ChatChoice {
            finish_reason: Some(finish_reason),
            ..ChatChoice::new(index, ChatTextField::Delta(delta))
        }
    }
}

fn template_error(error: TemplateError) -> ApiError {
    match error {
        TemplateError::Text(error) => encoding_error(&error, "messages"),
        error @ TemplateError::ControlInArgument(_) => {
            ApiError::invalid_value("chat_template_kwargs", format!("{error}."))
        }
        error => ApiError::invalid_value("messages", format!("{error}.")),
    }
}

#[derive(Serialize)]
struct ChatChoice {
    index: u32,
    #[serde(flatten)]
    text: ChatTextField,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<TokenId>>,
}

impl ChatChoice {
    /// Returns a choice that has only a text.
    fn new(index: u32, text: ChatTextField) -> ChatChoice {
        ChatChoice {
            index,
            text,
            logprobs: None,
            finish_reason: None,
            token_ids: None,
        }
    }
}

/// The field of a choice that holds its text.
#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum ChatTextField {
    /// The field `message` of a response in one piece.
    Message(ChatText),
    /// The field `delta` of a chunk.
    Delta(ChatText),
}

#[derive(Default, Serialize)]
struct ChatText {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    /// The name that clients of DeepSeek, SGLang and llama.cpp read.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    /// The name that vLLM has given the field since, with the same text.
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
