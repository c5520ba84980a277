//! The events of a stream of `POST /v1/messages`.

use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::answer::{AnthropicMessage, AnthropicUsage, ContentBlock, StopReason};
use super::envelope::AnthropicErrorBody;
use crate::api::error::ApiError;
use crate::api::generation::choice::{ChoiceEnd, Piece};
use crate::api::generation::choices::Usage;
use crate::api::generation::typed_events::{EventWriter, TypedEvent};
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

    fn close(&mut self, events: &mut Vec<TypedEvent>) {
        if self.open.take().is_some() {
            events.push(event(MessageEvent {
                kind: "content_block_stop",
                index: Some(self.blocks - 1),
                ..MessageEvent::default()
            }));
        }
    }

    /// Begins a block, and ends the one before.
    fn begin_block(&mut self, kind: BlockKind, block: ContentBlock, events: &mut Vec<TypedEvent>) {
        self.close(events);
        self.open = Some(kind);
        self.blocks += 1;
        events.push(event(MessageEvent {
            kind: "content_block_start",
            index: Some(self.blocks - 1),
            content_block: Some(block),
            ..MessageEvent::default()
        }));
    }

    fn delta(&self, delta: MessageDelta) -> TypedEvent {
        event(MessageEvent {
            kind: "content_block_delta",
            index: Some(self.blocks - 1),
            delta: Some(delta),
            ..MessageEvent::default()
        })
    }
}

fn event(event: MessageEvent) -> TypedEvent {
    TypedEvent::new(event.kind, &event)
}

impl EventWriter for MessageEvents {
    fn begin(&mut self, usage: Usage) -> Vec<TypedEvent> {
        let message = AnthropicMessage::begun(self.id.clone(), self.model.clone(), usage);
        let start = MessageEvent {
            kind: "message_start",
            message: Some(message),
            ..MessageEvent::default()
        };
        vec![event(start), ping()]
    }

    fn piece(&mut self, piece: Piece) -> Vec<TypedEvent> {
        let mut events = Vec::new();
        if !piece.reasoning.is_empty() {
            if self.open != Some(BlockKind::Thinking) {
                let block = ContentBlock::thinking(String::new());
                self.begin_block(BlockKind::Thinking, block, &mut events);
            }
            events.push(self.delta(MessageDelta {
                kind: Some("thinking_delta"),
                thinking: Some(piece.reasoning),
                ..MessageDelta::default()
            }));
        }
        if !piece.text.is_empty() {
            if self.open != Some(BlockKind::Text) {
                let block = ContentBlock::text(String::new());
                self.begin_block(BlockKind::Text, block, &mut events);
            }
            events.push(self.delta(MessageDelta {
                kind: Some("text_delta"),
                text: Some(piece.text),
                ..MessageDelta::default()
            }));
        }
        for call in piece.calls {
            match call {
                CallDelta::Begins(name) => {
                    let block = ContentBlock::call(name, json!({}));
                    self.begin_block(BlockKind::Call, block, &mut events);
                }
                CallDelta::Arguments(part) => events.push(self.delta(MessageDelta {
                    kind: Some("input_json_delta"),
                    partial_json: Some(part),
                    ..MessageDelta::default()
                })),
            }
        }
        events
    }

    fn end(&mut self, end: ChoiceEnd, usage: Usage) -> Vec<TypedEvent> {
        let mut events = Vec::new();
        self.close(&mut events);
        let (reason, stop) = StopReason::of(end);
        events.push(event(MessageEvent {
            kind: "message_delta",
            delta: Some(MessageDelta {
                stop_reason: Some(reason),
                stop_sequence: Some(stop),
                ..MessageDelta::default()
            }),
            usage: Some(usage.into()),
            ..MessageEvent::default()
        }));
        events.push(event(MessageEvent {
            kind: "message_stop",
            ..MessageEvent::default()
        }));
        events
    }

    fn fail(&mut self, error: &ApiError) -> Vec<TypedEvent> {
        let body = AnthropicErrorBody::new(error, None);
        vec![TypedEvent::new("error", &body)]
    }

    fn keep_alive(&self) -> Option<TypedEvent> {
        Some(ping())
    }
}

fn ping() -> TypedEvent {
    event(MessageEvent {
        kind: "ping",
        ..MessageEvent::default()
    })
}
