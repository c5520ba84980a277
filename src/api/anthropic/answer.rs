//! Answers of `POST /v1/messages`.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::api::fields::tool_calls::whole_calls;
use crate::api::generation::choice::{AnswerEnd, ChoiceEnd, Stopper};
use crate::api::generation::choices::Usage;
use crate::api::generation::writer::FinishedChoice;
use crate::api::ids::random_id;

/// A message of the assistant.
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicMessage {
    /// The id of the message.
    id: String,
    /// `message`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// `assistant`.
    role: &'static str,
    /// The name of the served model.
    model: String,
    /// What the message consists of, in its order.
    content: Vec<ContentBlock>,
    /// Why the message ended; `null` at the beginning of a stream.
    stop_reason: Option<StopReason>,
    /// The stop sequence that ended the message.
    stop_sequence: Option<String>,
    /// The token counts.
    usage: AnthropicUsage,
}

/// Why a message ended: by itself, at `max_tokens`, at a stop sequence, or with a call of a tool.
#[derive(Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum StopReason {
    EndTurn,
    MaxTokens,
    StopSequence,
    ToolUse,
}

impl StopReason {
    /// Returns why an answer ended, and the stop sequence that ended its text.
    pub(super) fn of(end: ChoiceEnd) -> (StopReason, Option<String>) {
        let stop = match end.stopped_at {
            Some(Stopper::Text(stop)) => Some(stop),
            Some(Stopper::Token(_)) | None => None,
        };
        let reason = match end.finish_reason {
            AnswerEnd::ToolCalls => StopReason::ToolUse,
            AnswerEnd::Length => StopReason::MaxTokens,
            AnswerEnd::Stop if stop.is_some() => StopReason::StopSequence,
            AnswerEnd::Stop => StopReason::EndTurn,
        };
        (reason, stop)
    }
}

/// The token counts of a message.
#[derive(Clone, Copy, Serialize, ToSchema)]
pub(super) struct AnthropicUsage {
    /// The tokens of the prompt that did not come from the prefix cache.
    input_tokens: u32,
    /// Always 0: the prefix cache takes all prompts, and costs nothing.
    cache_creation_input_tokens: u32,
    /// The tokens of the prompt that came from the prefix cache.
    cache_read_input_tokens: u32,
    /// The tokens of the message.
    output_tokens: u32,
}

impl From<Usage> for AnthropicUsage {
    fn from(usage: Usage) -> AnthropicUsage {
        let cached = usage.cached_tokens();
        AnthropicUsage {
            input_tokens: usage.prompt_tokens() - cached,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: cached,
            output_tokens: usage.completion_tokens(),
        }
    }
}

/// A part of a message.
#[derive(Clone, Default, Serialize, ToSchema)]
pub(super) struct ContentBlock {
    /// `text`, `thinking` or `tool_use`.
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    /// The text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) text: Option<String>,
    /// The reasoning before the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) thinking: Option<String>,
    /// Always empty, beside `thinking`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) signature: Option<&'static str>,
    /// The id of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) id: Option<String>,
    /// The tool that the model calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
    /// The arguments of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) input: Option<Value>,
}

impl ContentBlock {
    pub(super) fn text(text: String) -> ContentBlock {
        ContentBlock {
            kind: "text",
            text: Some(text),
            ..ContentBlock::default()
        }
    }

    pub(super) fn thinking(thinking: String) -> ContentBlock {
        ContentBlock {
            kind: "thinking",
            thinking: Some(thinking),
            signature: Some(""),
            ..ContentBlock::default()
        }
    }

    pub(super) fn call(name: String, input: Value) -> ContentBlock {
        ContentBlock {
            kind: "tool_use",
            id: Some(random_id("toolu_")),
            name: Some(name),
            input: Some(input),
            ..ContentBlock::default()
        }
    }
}

impl AnthropicMessage {
    /// Returns the message at the beginning of a stream.
    pub(super) fn begun(id: String, model: String, usage: Usage) -> AnthropicMessage {
        AnthropicMessage {
            id,
            kind: "message",
            role: "assistant",
            model,
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: usage.into(),
        }
    }

    /// Returns a complete message. A call that is cut off, whose arguments are no JSON, is left
    /// out.
    pub(super) fn whole(
        id: String,
        model: String,
        choice: FinishedChoice,
        usage: Usage,
    ) -> AnthropicMessage {
        let FinishedChoice { output, end } = choice;
        let (stop_reason, stop_sequence) = StopReason::of(end);
        let mut content = Vec::new();
        if !output.reasoning.is_empty() {
            content.push(ContentBlock::thinking(output.reasoning));
        }
        if !output.text.is_empty() {
            content.push(ContentBlock::text(output.text));
        }
        let calls = whole_calls(output.calls).into_iter();
        content.extend(calls.filter_map(|(name, arguments)| {
            let input = serde_json::from_str(&arguments).ok()?;
            Some(ContentBlock::call(name, input))
        }));
        AnthropicMessage {
            content,
            stop_reason: Some(stop_reason),
            stop_sequence,
            ..AnthropicMessage::begun(id, model, usage)
        }
    }
}

/// The number of tokens of a prompt.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct TokenCount {
    /// The tokens of the prompt.
    pub(super) input_tokens: usize,
}
