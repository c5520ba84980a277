//! Streams of named events, as Anthropic's API and OpenAI's responses have them.

use axum::body::Bytes;
use serde::Serialize;

use super::choice::{ChoiceEnd, ChoiceOutput, Piece};
use super::choices::{Choices, Usage};
use super::sse::{FrameWriter, Frames};
use crate::api::error::ApiError;

/// Writes the events of one answer.
pub(in crate::api) trait EventWriter: Send + 'static {
    /// Writes the events before the output.
    fn begin(&mut self, usage: Usage) -> Vec<TypedEvent>;

    /// Writes the events of a piece.
    fn piece(&mut self, piece: Piece) -> Vec<TypedEvent>;

    /// Writes the events after the output.
    fn end(&mut self, end: ChoiceEnd, usage: Usage) -> Vec<TypedEvent>;

    /// Writes the events of an error, after which the stream ends.
    fn fail(&mut self, error: &ApiError) -> Vec<TypedEvent>;

    /// Writes a sign of life, if the API has an event for it.
    fn keep_alive(&self) -> Option<TypedEvent>;
}

/// An event and its name.
pub(in crate::api) struct TypedEvent {
    name: &'static str,
    json: String,
}

impl TypedEvent {
    pub(in crate::api) fn new(name: &'static str, data: &impl Serialize) -> TypedEvent {
        let json = serde_json::to_string(data);
        TypedEvent {
            name,
            json: json.expect("all keys are strings and all numbers are finite"),
        }
    }

    fn frame(&self) -> Bytes {
        format!("event: {}\ndata: {}\n\n", self.name, self.json).into()
    }
}

/// Writes the frames of the only choice of a request.
pub(in crate::api) struct TypedEvents<W>(pub(in crate::api) W);

impl<W: EventWriter> FrameWriter for TypedEvents<W> {
    fn begin(&mut self, choices: &Choices, frames: &mut Frames) {
        push(self.0.begin(choices.usage()), frames);
    }

    fn output(&mut self, _: u32, output: ChoiceOutput, choices: &Choices, frames: &mut Frames) {
        match output {
            ChoiceOutput::Piece(piece) => push(self.0.piece(piece), frames),
            ChoiceOutput::End(end) => {
                push(self.0.end(end, choices.usage()), frames);
                frames.end();
            }
        }
    }

    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        push(self.0.fail(error), frames);
        frames.end();
    }

    fn keep_alive(&self) -> Bytes {
        match self.0.keep_alive() {
            Some(event) => event.frame(),
            None => Bytes::from_static(b": keep-alive\n\n"),
        }
    }
}

fn push(events: Vec<TypedEvent>, frames: &mut Frames) {
    events.iter().for_each(|event| frames.push(event.frame()));
}
