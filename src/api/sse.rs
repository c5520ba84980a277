//! A response as server-sent events.
//!
//! Invariant: every stream ends with `data: [DONE]`, even after an error.
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

use super::choices::Choices;
use super::endpoint::Endpoint;
use super::envelope::{Envelope, UsageField};
use super::error::ApiError;
use super::generation::ChoiceOutput;
use super::params::StreamUsage;

/// After this time without a frame, the server sends a comment. The status line waits this long for
/// the first output, because until then the answer may be an error: a full queue, for example, may
/// displace a request that waits.
const KEEP_ALIVE: Duration = Duration::from_secs(12);

/// Responds with the stream of all choices.
///
/// # Errors
/// If the engine rejects or fails the request before the response has begun.
pub(super) async fn respond(
    mut choices: Choices,
    envelope: Envelope,
    endpoint: impl Endpoint,
    usage: StreamUsage,
) -> Result<Response, ApiError> {
    let patience = Instant::now() + KEEP_ALIVE;
    let accepted = timeout_at(patience, choices.accepted()).await;
    accepted.unwrap_or(Ok(()))?;
    let mut frames = SseFrames {
        choices,
        envelope,
        endpoint,
        usage,
        ready: VecDeque::new(),
        ended: false,
    };
    frames.push_openings();
    if let Ok(first) = timeout_at(patience, frames.choices.next()).await {
        let (index, output) = first?;
        frames.push_output(index, output);
    }
    let span = Span::current(); // Later log lines belong to the same request.
    let body = stream::unfold(frames, move |mut frames| {
        let next = async move {
            let frame = frames.next().await?;
            Some((Ok::<_, Infallible>(frame), frames))
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

/// The frames of one stream.
struct SseFrames<E> {
    choices: Choices,
    envelope: Envelope,
    endpoint: E,
    usage: StreamUsage,
    ready: VecDeque<Bytes>, // At most the opening frames and those of one output.
    ended: bool,
}

impl<E: Endpoint> SseFrames<E> {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Some(frame);
            }
            if self.ended {
                return None;
            }
            match timeout(KEEP_ALIVE, self.choices.next()).await {
                Ok(Ok((index, output))) => self.push_output(index, output),
                Ok(Err(error)) => {
                    self.push_data(&error.body().to_string());
                    self.push_done();
                }
                Err(_) => return Some(Bytes::from_static(b": keep-alive\n\n")),
            }
        }
    }

    fn push_openings(&mut self) {
        for index in 0..self.choices.count() {
            let Some(choice) = self.endpoint.opening(index) else {
                return;
            };
            let has_prompt = E::PROMPT_BESIDE_CHOICES && index == 0;
            let prompt = self.choices.prompt().filter(|_| has_prompt);
            let chunk = self.envelope.json([choice], self.chunk_usage(), prompt);
            self.push_data(&chunk);
        }
    }

    fn push_output(&mut self, index: u32, output: ChoiceOutput) {
        let usage = self.chunk_usage();
        let chunk = match output {
            ChoiceOutput::Piece(piece) => {
                let choice = self.endpoint.piece(index, piece, &self.choices);
                self.envelope.json([choice], usage, None)
            }
            ChoiceOutput::End(end) => {
                let choice = self.endpoint.end(index, end.finish_reason);
                self.envelope.json([choice], usage, None)
            }
        };
        self.push_data(&chunk);
        if self.choices.all_ended() {
            self.push_end();
        }
    }

    fn push_end(&mut self) {
        if self.usage != StreamUsage::Omitted {
            let usage = UsageField::Counts(self.choices.usage());
            let chunk = self.envelope.json([(); 0], usage, None);
            self.push_data(&chunk);
        }
        self.push_done();
    }

    /// Returns the `usage` of a chunk that has a choice.
    fn chunk_usage(&self) -> UsageField {
        match self.usage {
            StreamUsage::Omitted => UsageField::Omitted,
            StreamUsage::AtEnd => UsageField::Null,
            StreamUsage::InEveryChunk => UsageField::Counts(self.choices.usage()),
        }
    }

    fn push_done(&mut self) {
        self.push_data("[DONE]");
        self.ended = true;
    }

    fn push_data(&mut self, json: &str) {
        let frame = format!("data: {json}\n\n");
        self.ready.push_back(Bytes::from(frame));
    }
}
