//! The events of a stream of `POST /v1/responses`.
//!
//! Invariant: `sequence_number` counts the events from 0.

use serde::Serialize;
use utoipa::ToSchema;

use super::answer::{OutputItem, OutputPart, ResponseAnswer, item_status};
use crate::api::error::ApiError;
use crate::api::generation::choice::{ChoiceEnd, Piece};
use crate::api::generation::choices::Choices;
use crate::api::generation::writer::{AnswerWriter, Frames};
use crate::tools::CallDelta;

/// An event of a stream. Its name is its type.
#[derive(Default, Serialize, ToSchema)]
pub(super) struct ResponseEvent {
    /// Such as `response.output_text.delta`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// The number of the event.
    sequence_number: u32,
    /// The response, in the events of its beginning and its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<ResponseAnswer>,
    /// The number of the item in the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    output_index: Option<u32>,
    /// An item, at its beginning and at its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    item: Option<OutputItem>,
    /// The id of the item.
    #[serde(skip_serializing_if = "Option::is_none")]
    item_id: Option<String>,
    /// The number of the part in the content of the item.
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<u32>,
    /// A part, at its beginning and at its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    part: Option<OutputPart>,
    /// The next part of the text or of the arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<String>,
    /// All of the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    /// All of the arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<String>,
    /// The name of the function.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// Always empty, beside the text of a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<f32>>,
}

/// An item that is being written.
struct OpenItem {
    item: OutputItem,
    text: String,
}

/// Writes the events of one response.
pub(super) struct ResponseEvents {
    answer: ResponseAnswer,
    events: u32,
    done: Vec<OutputItem>,
    open: Option<OpenItem>,
}

impl ResponseEvents {
    pub(super) fn new(answer: ResponseAnswer) -> ResponseEvents {
        ResponseEvents {
            answer,
            events: 0,
            done: Vec::new(),
            open: None,
        }
    }

    fn event(&mut self, event: ResponseEvent, frames: &mut Frames) {
        let event = ResponseEvent {
            sequence_number: self.events,
            ..event
        };
        self.events += 1;
        frames.push_event(event.kind, &event);
    }

    /// Writes an event about the response.
    fn of_response(&mut self, kind: &'static str, frames: &mut Frames) {
        let event = ResponseEvent {
            kind,
            response: Some(self.answer.clone()),
            ..ResponseEvent::default()
        };
        self.event(event, frames);
    }

    /// Writes an event about the open item.
    fn of_item(&mut self, kind: &'static str, more: ResponseEvent, frames: &mut Frames) {
        let event = ResponseEvent {
            kind,
            item_id: self.open.as_ref().map(|open| open.item.id.clone()),
            output_index: Some(self.done.len() as u32),
            ..more
        };
        self.event(event, frames);
    }

    /// Begins an item after the one that is open.
    fn begin_item(&mut self, item: OutputItem, frames: &mut Frames) {
        self.end_item("completed", frames);
        let is_message = item.kind == "message";
        let added = ResponseEvent {
            kind: "response.output_item.added",
            output_index: Some(self.done.len() as u32),
            item: Some(item.clone()),
            ..ResponseEvent::default()
        };
        self.event(added, frames);
        self.open = Some(OpenItem {
            item,
            text: String::new(),
        });
        if is_message {
            let part = ResponseEvent {
                content_index: Some(0),
                part: Some(OutputPart::text(String::new())),
                ..ResponseEvent::default()
            };
            self.of_item("response.content_part.added", part, frames);
        }
    }

    /// Adds to the open item.
    fn add(&mut self, text: String, frames: &mut Frames) {
        let Some(open) = &mut self.open else {
            return;
        };
        open.text += &text;
        let (kind, content_index, logprobs) = match open.item.kind {
            "message" => ("response.output_text.delta", Some(0), Some(Vec::new())),
            "reasoning" => ("response.reasoning_text.delta", Some(0), None),
            _ => ("response.function_call_arguments.delta", None, None),
        };
        let more = ResponseEvent {
            content_index,
            delta: Some(text),
            logprobs,
            ..ResponseEvent::default()
        };
        self.of_item(kind, more, frames);
    }

    fn end_item(&mut self, status: &'static str, frames: &mut Frames) {
        let Some(OpenItem { item, text }) = &self.open else {
            return;
        };
        let (item, text) = (item.clone(), text.clone());
        match item.kind {
            "message" => {
                let done = ResponseEvent {
                    content_index: Some(0),
                    text: Some(text.clone()),
                    logprobs: Some(Vec::new()),
                    ..ResponseEvent::default()
                };
                self.of_item("response.output_text.done", done, frames);
                let part = ResponseEvent {
                    content_index: Some(0),
                    part: Some(OutputPart::text(text.clone())),
                    ..ResponseEvent::default()
                };
                self.of_item("response.content_part.done", part, frames);
            }
            "reasoning" => {
                let done = ResponseEvent {
                    content_index: Some(0),
                    text: Some(text.clone()),
                    ..ResponseEvent::default()
                };
                self.of_item("response.reasoning_text.done", done, frames);
            }
            _ => {
                let done = ResponseEvent {
                    arguments: Some(text.clone()),
                    name: item.name.clone(),
                    ..ResponseEvent::default()
                };
                self.of_item("response.function_call_arguments.done", done, frames);
            }
        }
        let item = item.finished(text, status);
        let done = ResponseEvent {
            kind: "response.output_item.done",
            output_index: Some(self.done.len() as u32),
            item: Some(item.clone()),
            ..ResponseEvent::default()
        };
        self.event(done, frames);
        self.done.push(item);
        self.open = None;
    }

    /// Returns whether an item of this kind is open.
    fn is_open(&self, kind: &str) -> bool {
        self.open
            .as_ref()
            .is_some_and(|open| open.item.kind == kind)
    }
}

impl AnswerWriter for ResponseEvents {
    fn id(&self) -> Option<&str> {
        Some(self.answer.id())
    }

    fn begin(&mut self, _: &Choices, frames: &mut Frames) {
        self.of_response("response.created", frames);
        self.of_response("response.in_progress", frames);
    }

    fn piece(&mut self, _: u32, piece: Piece, _: &Choices, frames: &mut Frames) {
        if !piece.reasoning.is_empty() {
            if !self.is_open("reasoning") {
                self.begin_item(OutputItem::reasoning(), frames);
            }
            self.add(piece.reasoning, frames);
        }
        if !piece.text.is_empty() {
            if !self.is_open("message") {
                self.begin_item(OutputItem::message(), frames);
            }
            self.add(piece.text, frames);
        }
        for call in piece.calls {
            match call {
                CallDelta::Begins(name) => self.begin_item(OutputItem::call(name), frames),
                CallDelta::Arguments(part) => self.add(part, frames),
            }
        }
    }

    fn end(&mut self, _: u32, end: ChoiceEnd, choices: &Choices, frames: &mut Frames) {
        if self.open.is_none() && self.done.is_empty() {
            self.begin_item(OutputItem::message(), frames);
        }
        self.end_item(item_status(&end), frames);
        let done = std::mem::take(&mut self.done);
        self.answer = self.answer.clone().ended(done, &end, choices.usage());
        let kind = if self.answer.is_complete() {
            "response.completed"
        } else {
            "response.incomplete"
        };
        self.of_response(kind, frames);
    }

    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        self.answer = self.answer.clone().failed(error);
        self.of_response("response.failed", frames);
    }
}
