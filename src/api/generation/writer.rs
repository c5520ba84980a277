//! How an answer becomes bytes: the interface of every endpoint that runs the model.
//!
//! Invariant: the writer of an endpoint decides the shape of an answer and nothing else. What the
//! model said, and why it ended, comes from the choices.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use axum::body::Bytes;
use serde::Serialize;

use super::choice::{ChoiceEnd, Piece};
use super::choices::Choices;
use crate::api::error::ApiError;

/// Writes one answer, whole or as a stream, in the shape of its endpoint.
pub(in crate::api) trait AnswerWriter: Send {
    /// Returns the id of the answer, if it has one.
    fn id(&self) -> Option<&str>;

    /// Writes what a stream has before all output.
    fn begin(&mut self, _: &Choices, _: &mut Frames) {}

    /// Writes a piece of the choice `index`.
    fn piece(&mut self, index: u32, piece: Piece, choices: &Choices, frames: &mut Frames);

    /// Writes the end of the choice `index`.
    fn end(&mut self, index: u32, end: ChoiceEnd, choices: &Choices, frames: &mut Frames);

    /// Writes an error, which ends a stream. A whole answer that fails is a plain HTTP error.
    fn fail(&mut self, error: &ApiError, frames: &mut Frames);

    /// Writes a sign of life in a stream.
    fn keep_alive(&self, frames: &mut Frames) {
        frames
            .ready
            .push_back(Bytes::from_static(b": keep-alive\n\n"));
    }
}

/// The frames that are ready: at most the frames before all output, and the frames of one output. A
/// whole answer is one frame.
pub(in crate::api) struct Frames {
    is_stream: bool,
    ready: VecDeque<Bytes>,
}

impl Frames {
    pub(in crate::api) fn new(is_stream: bool) -> Frames {
        Frames {
            is_stream,
            ready: VecDeque::new(),
        }
    }

    /// Returns whether the answer is a stream.
    pub(in crate::api) fn is_stream(&self) -> bool {
        self.is_stream
    }

    /// Adds a whole answer, or a frame of a stream without a name.
    pub(in crate::api) fn push(&mut self, data: &impl Serialize) {
        let json = json(data);
        let frame = if self.is_stream {
            format!("data: {json}\n\n")
        } else {
            json
        };
        self.ready.push_back(frame.into());
    }

    /// Adds a frame with a name.
    pub(in crate::api) fn push_event(&mut self, name: &str, data: &impl Serialize) {
        let frame = format!("event: {name}\ndata: {}\n\n", json(data));
        self.ready.push_back(frame.into());
    }

    /// Adds the end of a stream, as OpenAI's and SGLang's have it. A whole answer has none.
    pub(in crate::api) fn push_done(&mut self) {
        if self.is_stream {
            self.ready
                .push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        }
    }

    /// Takes the first frame.
    pub(in crate::api) fn take(&mut self) -> Option<Bytes> {
        self.ready.pop_front()
    }
}

fn json(data: &impl Serialize) -> String {
    serde_json::to_string(data).expect("all keys are strings and all numbers are finite")
}

/// The complete output of one choice.
pub(in crate::api) struct FinishedChoice {
    pub(in crate::api) output: Piece,
    pub(in crate::api) end: ChoiceEnd,
}

/// Collects all choices, and writes them in one frame with `write`.
pub(in crate::api) struct WholeAnswer<F> {
    id: String,
    running: BTreeMap<u32, Piece>,
    finished: BTreeMap<u32, FinishedChoice>,
    write: F,
}

impl<F> WholeAnswer<F>
where
    F: FnMut(Vec<FinishedChoice>, &Choices, &mut Frames) + Send + 'static,
{
    /// Creates the writer of the answer `id`. `write` gets the choices in their order.
    pub(in crate::api) fn boxed(id: String, write: F) -> Box<dyn AnswerWriter> {
        Box::new(WholeAnswer {
            id,
            running: BTreeMap::new(),
            finished: BTreeMap::new(),
            write,
        })
    }
}

impl<F> AnswerWriter for WholeAnswer<F>
where
    F: FnMut(Vec<FinishedChoice>, &Choices, &mut Frames) + Send + 'static,
{
    fn id(&self) -> Option<&str> {
        Some(&self.id)
    }

    fn piece(&mut self, index: u32, piece: Piece, _: &Choices, _: &mut Frames) {
        self.running.entry(index).or_default().extend(piece);
    }

    fn end(&mut self, index: u32, end: ChoiceEnd, choices: &Choices, frames: &mut Frames) {
        let output = self.running.remove(&index).unwrap_or_default();
        self.finished.insert(index, FinishedChoice { output, end });
        if choices.all_ended() {
            let finished = std::mem::take(&mut self.finished).into_values();
            (self.write)(finished.collect(), choices, frames);
        }
    }

    fn fail(&mut self, _: &ApiError, _: &mut Frames) {}
}

/// Measures how long the parts of an answer took.
#[derive(Default)]
pub(in crate::api) struct AnswerClock {
    first: Option<Instant>, // When the first output came.
}

/// How long the parts of an answer took, in seconds.
pub(in crate::api) struct AnswerTimes {
    /// From the arrival to the first output.
    pub(in crate::api) prompt: f64,
    /// From the first output to the end.
    pub(in crate::api) output: f64,
}

impl AnswerClock {
    /// Says that an output has come.
    pub(in crate::api) fn tick(&mut self) -> Instant {
        *self.first.get_or_insert_with(Instant::now)
    }

    /// Returns the times of an answer that ends now.
    pub(in crate::api) fn times(&mut self, choices: &Choices) -> AnswerTimes {
        let first = self.tick();
        AnswerTimes {
            prompt: (first - choices.arrived()).as_secs_f64(),
            output: first.elapsed().as_secs_f64(),
        }
    }
}
