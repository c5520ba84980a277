//! The events of a stream of `POST /v1/messages`.

use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::answer::{AnthropicMessage, AnthropicUsage, ContentBlock, StopReason};
use super::envelope::AnthropicErrorBody;
use crate::api::error::ApiError;
use crate::api::generation::choice::{ChoiceEnd, Piece};
use crate::api::generation::choices::Choices;
use crate::api::generation::writer::{AnswerWriter, Frames};
use crate::tools::CallDelta;

/// An event of a stream. Its name is its type.
#[derive(Default, Serialize, ToSchema)]
pub(super) struct MessageEvent {
    /// `message_start`, `content_block_start`, `content_block_delta`, `content_block_stop`,
    /// `message_delta`, `message_stop`, `ping` or `error`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// The message, at the beginning.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<AnthropicMessage>,
    /// The number of the block in the content of the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u32>,
    /// A block that begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    content_block: Option<ContentBlock>,
    /// What is added to the block, or to the message at its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<MessageDelta>,
    /// The token counts, at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<AnthropicUsage>,
    /// What went wrong, in an event of the type `error`.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Value>,
}

impl MessageEvent {
    fn new(kind: &'static str) -> MessageEvent {
        MessageEvent {
            kind,
            ..MessageEvent::default()
        }
    }

    fn push_to(&self, frames: &mut Frames) {
        frames.push_event(self.kind, self);
    }
}

/// What an event adds.
#[derive(Default, Serialize, ToSchema)]
struct MessageDelta {
    /// `text_delta`, `thinking_delta` or `input_json_delta`; absent at the end of the message.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    /// The next part of the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    /// The next part of the reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<String>,
    /// The next part of a call's arguments, as JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    partial_json: Option<String>,
    /// Why the message ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopReason>,
    /// The stop sequence that ended the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    stop_sequence: Option<Option<String>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum BlockKind {
    Text,
    Thinking,
    Call,
}

/// Writes the events of one message.
pub(super) struct MessageEvents {
    id: String,
    model: String,
    open: Option<BlockKind>,
    blocks: u32, // Those that have begun.
}

impl MessageEvents {
    pub(super) fn new(id: String, model: String) -> MessageEvents {
        MessageEvents {
            id,
            model,
            open: None,
            blocks: 0,
        }
    }

    fn close(&mut self, frames: &mut Frames) {
        if self.open.take().is_some() {
            let stop = MessageEvent {
                index: Some(self.blocks - 1),
                ..MessageEvent::new("content_block_stop")
            };
            stop.push_to(frames);
        }
    }

    /// Begins a block, and ends the one before.
    fn begin_block(&mut self, kind: BlockKind, block: ContentBlock, frames: &mut Frames) {
        self.close(frames);
        self.open = Some(kind);
        self.blocks += 1;
        let start = MessageEvent {
            index: Some(self.blocks - 1),
            content_block: Some(block),
            ..MessageEvent::new("content_block_start")
        };
        start.push_to(frames);
    }

    fn delta(&self, delta: MessageDelta, frames: &mut Frames) {
        let event = MessageEvent {
            index: Some(self.blocks - 1),
            delta: Some(delta),
            ..MessageEvent::new("content_block_delta")
        };
        event.push_to(frames);
    }
}

impl AnswerWriter for MessageEvents {
    fn id(&self) -> Option<&str> {
        Some(&self.id)
    }

    fn begin(&mut self, choices: &Choices, frames: &mut Frames) {
        let (id, model) = (self.id.clone(), self.model.clone());
        let start = MessageEvent {
            message: Some(AnthropicMessage::begun(id, model, choices.usage())),
            ..MessageEvent::new("message_start")
        };
        start.push_to(frames);
        self.keep_alive(frames);
    }

    fn piece(&mut self, _: u32, piece: Piece, _: &Choices, frames: &mut Frames) {
        if !piece.reasoning.is_empty() {
            if self.open != Some(BlockKind::Thinking) {
                let block = ContentBlock::thinking(String::new());
                self.begin_block(BlockKind::Thinking, block, frames);
            }
            let delta = MessageDelta {
                kind: Some("thinking_delta"),
                thinking: Some(piece.reasoning),
                ..MessageDelta::default()
            };
            self.delta(delta, frames);
        }
        if !piece.text.is_empty() {
            if self.open != Some(BlockKind::Text) {
                let block = ContentBlock::text(String::new());
                self.begin_block(BlockKind::Text, block, frames);
            }
            let delta = MessageDelta {
                kind: Some("text_delta"),
                text: Some(piece.text),
                ..MessageDelta::default()
            };
            self.delta(delta, frames);
        }
        for call in piece.calls {
            match call {
                CallDelta::Begins(name) => {
                    let block = ContentBlock::call(name, json!({}));
                    self.begin_block(BlockKind::Call, block, frames);
                }
                CallDelta::Arguments(part) => {
                    let delta = MessageDelta {
                        kind: Some("input_json_delta"),
                        partial_json: Some(part),
                        ..MessageDelta::default()
                    };
                    self.delta(delta, frames);
                }
            }
        }
    }

    fn end(&mut self, _: u32, end: ChoiceEnd, choices: &Choices, frames: &mut Frames) {
        self.close(frames);
        let (reason, stop) = StopReason::of(end);
        let last = MessageEvent {
            delta: Some(MessageDelta {
                stop_reason: Some(reason),
                stop_sequence: Some(stop),
                ..MessageDelta::default()
            }),
            usage: Some(choices.usage().into()),
            ..MessageEvent::new("message_delta")
        };
        last.push_to(frames);
        MessageEvent::new("message_stop").push_to(frames);
    }

    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        frames.push_event("error", &AnthropicErrorBody::new(error, None));
    }

    fn keep_alive(&self, frames: &mut Frames) {
        MessageEvent::new("ping").push_to(frames);
    }
}
