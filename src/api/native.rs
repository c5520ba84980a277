//! The path of a request through the endpoints whose answers have no `choices`: those of SGLang and
//! llama-server. It reads a prompt, runs it as `/v1/completions` does, and lets a writer say the
//! answer.
//!
//! Invariant: a stream ends with one frame that says why, or with an error.

use std::time::Instant;

use axum::extract::{Extension, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};

use crate::api::app::{App, Serving};
use crate::api::error::ApiError;
use crate::api::fields::json_object::JsonObject;
use crate::api::generation::choice::{ChoiceEnd, ChoiceOutput, Piece};
use crate::api::generation::choices::Choices;
use crate::api::generation::request::{ParsedRequest, ResponseMode};
use crate::api::generation::sse::{self, FrameWriter, Frames};
use crate::api::middleware::authentication::Caller;
use crate::api::respond::begin;
use crate::tenants::Tenant;

/// Writes the answer of one request, in the shape of its endpoint.
pub(super) trait AnswerWriter: Sized + Send + 'static {
    /// Whether `data: [DONE]` ends a stream.
    const HAS_DONE: bool;

    /// Reads a request with one prompt and one choice.
    fn read(
        serving: &Serving,
        tenant: &Tenant,
        body: JsonObject<'_>,
    ) -> Result<(ParsedRequest, Self), ApiError>;

    /// Returns the id of the answer, if it has one.
    fn id(&self) -> Option<&str>;

    /// Takes the next piece. `is_streamed` says that the answer need not have the earlier ones.
    fn add(&mut self, piece: Piece, is_streamed: bool);

    /// Returns the JSON of a chunk with the pieces since the last one.
    fn chunk(&mut self) -> String;

    /// Returns the JSON of the answer, or of the last chunk.
    fn end(&mut self, end: ChoiceEnd, times: AnswerTimes) -> String;
}

/// How long the parts of an answer took.
#[derive(Clone, Copy, Debug)]
pub(super) struct AnswerTimes {
    /// From the arrival to the first piece, in seconds.
    pub(super) prompt: f64,
    /// From the first piece to the end, in seconds.
    pub(super) output: f64,
}

/// Handles a request to the endpoint of `W`.
///
/// # Errors
/// If the request is invalid, or if the engine rejects or fails it before the response has begun.
pub(super) async fn respond<W: AnswerWriter>(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let read = |serving: &Serving, tenant: &Tenant, body: JsonObject<'_>| {
        let (request, writer) = W::read(serving, tenant, body)?;
        let is_streamed = request.params.response_mode != ResponseMode::Whole;
        Ok((request, (writer, is_streamed)))
    };
    let (mut choices, (writer, is_streamed)) = begin(&app, &caller, request, read).await?;
    if let Some(id) = writer.id() {
        choices.also_called(id);
    }
    let mut answer = NativeAnswer {
        writer,
        arrived,
        first: None,
    };
    if is_streamed {
        return sse::respond(choices, answer).await;
    }
    loop {
        let (_, output) = choices.next().await?;
        if let Some(json) = answer.add(output, false) {
            return Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response());
        }
    }
}

/// An answer that is being written.
struct NativeAnswer<W> {
    writer: W,
    arrived: Instant,
    first: Option<Instant>, // When the first piece came.
}

impl<W: AnswerWriter> NativeAnswer<W> {
    /// Takes an output. Returns the JSON of the end, if it is that.
    fn add(&mut self, output: ChoiceOutput, is_streamed: bool) -> Option<String> {
        let now = Instant::now();
        let first = *self.first.get_or_insert(now);
        match output {
            ChoiceOutput::Piece(piece) => {
                self.writer.add(piece, is_streamed);
                None
            }
            ChoiceOutput::End(end) => {
                let times = AnswerTimes {
                    prompt: (first - self.arrived).as_secs_f64(),
                    output: (now - first).as_secs_f64(),
                };
                Some(self.writer.end(end, times))
            }
        }
    }
}

impl<W: AnswerWriter> FrameWriter for NativeAnswer<W> {
    fn begin(&mut self, _: &Choices, _: &mut Frames) {}

    fn output(&mut self, _: u32, output: ChoiceOutput, _: &Choices, frames: &mut Frames) {
        match self.add(output, true) {
            Some(end) => {
                frames.push_data(&end);
                finish::<W>(frames);
            }
            None => frames.push_data(&self.writer.chunk()),
        }
    }

    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        frames.push_data(&error.body().to_string());
        finish::<W>(frames);
    }
}

fn finish<W: AnswerWriter>(frames: &mut Frames) {
    if W::HAS_DONE {
        frames.push_data("[DONE]");
    }
    frames.end();
}
