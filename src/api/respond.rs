//! The path of a request through every endpoint that runs the model: reads it, compiles its
//! grammar, submits its choices, and sends the answer whole or as server-sent events.
//!
//! Invariant: an error that the server knows before it has sent anything is a plain HTTP error.
//!
//! Invariant: the server produces a frame only when the connection asks for one, so no frames pile
//! up for a slow client.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderName, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{Instrument, Span};

use crate::api::app::{App, Serving};
use crate::api::body;
use crate::api::connection::arrival;
use crate::api::error::ApiError;
use crate::api::fields::json_object::JsonObject;
use crate::api::generation::choice::ChoiceOutput;
use crate::api::generation::choices::Choices;
use crate::api::generation::request::ParsedRequest;
use crate::api::generation::writer::{AnswerWriter, Frames};
use crate::api::middleware::authentication::Caller;
use crate::tenants::Tenant;
use crate::traces::TracedAnswer;

/// After this time without a frame, the server sends a sign of life. The status line waits this
/// long for the first output, because until then the answer may be an error: a full queue, for
/// example, may displace a request that waits.
const KEEP_ALIVE: Duration = Duration::from_secs(12);

/// What a body becomes: the request of the engine, and the writer of the answer.
pub(in crate::api) type ReadRequest = (ParsedRequest, Box<dyn AnswerWriter>);

/// Responds to a request whose body `read` reads.
///
/// # Errors
/// If the request is invalid, or if the engine rejects or fails it before the response has begun.
pub(in crate::api) async fn respond(
    app: &App,
    caller: &Caller,
    request: Request,
    read: fn(&Serving, &Tenant, &JsonObject<'_>) -> Result<ReadRequest, ApiError>,
) -> Result<Response, ApiError> {
    let arrived = arrival(&request);
    let ((request, writer), reading) = body::read_for_engine(app, caller, request, read).await?;
    let serving = app.serving()?;
    if app.traces().is_some() {
        caller.log.set_answer(TracedAnswer {
            id: writer.id().map(str::to_owned),
            parameters: request.params.traced(),
        });
    }
    if request.params.grammar.is_some() {
        caller.log.begin_grammar();
    }
    let compiled = request.compile(serving, caller.tenant.number).await;
    caller.log.end_grammar(compiled.is_err());
    let request = match compiled {
        Ok(request) => request,
        Err(error) => return Err(caller.charged(error, serving).await),
    };
    let is_stream = request.params.is_stream();
    let mut choices = Choices::start(serving, request, caller, arrived)?;
    if let Some(id) = writer.id() {
        choices.also_called(id);
    }
    let patience = Instant::now() + KEEP_ALIVE;
    let accepted = timeout_at(patience, choices.accepted()).await;
    accepted.unwrap_or(Ok(()))?;
    reading.answered();
    let answer = RunningAnswer {
        choices,
        writer,
        frames: Frames::new(is_stream),
    };
    if is_stream {
        answer.stream(patience).await
    } else {
        answer.whole().await
    }
}

/// An answer that is being written.
struct RunningAnswer {
    choices: Choices,
    writer: Box<dyn AnswerWriter>,
    frames: Frames,
}

impl RunningAnswer {
    async fn whole(mut self) -> Result<Response, ApiError> {
        while !self.choices.all_ended() {
            let output = self.choices.next().await?;
            self.write(output);
        }
        let json = self
            .frames
            .take()
            .expect("the end of a whole answer writes it");
        Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response())
    }

    /// Waits for the first output, but not after `patience`.
    async fn stream(mut self, patience: Instant) -> Result<Response, ApiError> {
        self.writer.begin(&self.choices, &mut self.frames);
        if let Ok(first) = timeout_at(patience, self.choices.next()).await {
            self.write(first?);
        }
        let span = Span::current(); // Later log lines belong to the same request.
        let body = stream::unfold(self, move |mut running| {
            let next = async move {
                let frame = running.next_frame().await?;
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

    async fn next_frame(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.frames.take() {
                return Some(frame);
            }
            if self.choices.all_ended() {
                return None;
            }
            match timeout(KEEP_ALIVE, self.choices.next()).await {
                Ok(Ok(output)) => self.write(output),
                Ok(Err(error)) => self.writer.fail(&error, &mut self.frames),
                Err(_) => self.writer.keep_alive(&mut self.frames),
            }
        }
    }

    fn write(&mut self, (index, output): (u32, ChoiceOutput)) {
        let (choices, frames) = (&self.choices, &mut self.frames);
        match output {
            ChoiceOutput::Piece(piece) => self.writer.piece(index, piece, choices, frames),
            ChoiceOutput::End(end) => self.writer.end(index, end, choices, frames),
        }
    }
}
