//! A response as server-sent events.
//!
//! Invariant: an error that the server knows before it has sent anything is a plain HTTP error.
//!
//! Invariant: the server produces a frame only when the connection asks for one, so no frames pile
//! up for a slow client.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{Instrument, Span};

use super::choice::ChoiceOutput;
use super::choices::Choices;
use crate::api::error::ApiError;

/// After this time without a frame, the server sends a sign of life. The status line waits this
/// long for the first output, because until then the answer may be an error: a full queue, for
/// example, may displace a request that waits.
const KEEP_ALIVE: Duration = Duration::from_secs(12);

/// Writes the frames of a response, in the shape of its endpoint.
pub(in crate::api) trait FrameWriter: Send + 'static {
    /// Writes the frames before all output.
    fn begin(&mut self, choices: &Choices, frames: &mut Frames);

    /// Writes an output of the choice `index`. Ends the frames after the last one.
    fn output(&mut self, index: u32, output: ChoiceOutput, choices: &Choices, frames: &mut Frames);

    /// Writes an error and ends the frames.
    fn fail(&mut self, error: &ApiError, frames: &mut Frames);

    /// Returns a sign of life.
    fn keep_alive(&self) -> Bytes {
        Bytes::from_static(b": keep-alive\n\n")
    }
}

/// The frames that are ready: at most those before all output and those of one output.
#[derive(Default)]
pub(in crate::api) struct Frames {
    ready: VecDeque<Bytes>,
    ended: bool,
}

impl Frames {
    /// Adds a frame without a name.
    pub(in crate::api) fn push_data(&mut self, data: &str) {
        self.ready.push_back(format!("data: {data}\n\n").into());
    }

    /// Adds a frame.
    pub(in crate::api) fn push(&mut self, frame: Bytes) {
        self.ready.push_back(frame);
    }

    /// Says that no frame follows.
    pub(in crate::api) fn end(&mut self) {
        self.ended = true;
    }
}

/// Responds with the stream of all choices.
///
/// # Errors
/// If the engine rejects or fails the request before the response has begun.
pub(in crate::api) async fn respond(
    mut choices: Choices,
    mut writer: impl FrameWriter,
) -> Result<Response, ApiError> {
    let patience = Instant::now() + KEEP_ALIVE;
    let accepted = timeout_at(patience, choices.accepted()).await;
    accepted.unwrap_or(Ok(()))?;
    let mut frames = Frames::default();
    writer.begin(&choices, &mut frames);
    if let Ok(first) = timeout_at(patience, choices.next()).await {
        let (index, output) = first?;
        writer.output(index, output, &choices, &mut frames);
    }
    let running = RunningStream {
        choices,
        writer,
        frames,
    };
    let span = Span::current(); // Later log lines belong to the same request.
    let body = stream::unfold(running, move |mut running| {
        let next = async move {
            let frame = running.next().await?;
            Some((Ok::<_, Infallible>(frame), running))
        };
        next.instrument(span.clone())
    });
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, Body::from_stream(body)).into_response())
}

/// A stream whose response has begun.
struct RunningStream<W> {
    choices: Choices,
    writer: W,
    frames: Frames,
}

impl<W: FrameWriter> RunningStream<W> {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.frames.ready.pop_front() {
                return Some(frame);
            }
            if self.frames.ended {
                return None;
            }
            let (choices, frames) = (&mut self.choices, &mut self.frames);
            match timeout(KEEP_ALIVE, choices.next()).await {
                Ok(Ok((index, output))) => self.writer.output(index, output, choices, frames),
                Ok(Err(error)) => self.writer.fail(&error, frames),
                Err(_) => return Some(self.writer.keep_alive()),
            }
        }
    }
}
