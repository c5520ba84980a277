//! Runs a parsed request and responds in one piece or as a stream.

use std::time::Instant;

use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::app::{ModelCard, Serving};
use super::authentication::Caller;
use super::choices::Choices;
use super::error::ApiError;
use super::format::{ChoiceFormat, Envelope, UsageField};
use super::params::ResponseMode;
use super::parsed_request::ParsedRequest;
use super::sse;

/// Runs `request`, which arrived at `arrived`, and responds in `format`.
///
/// # Errors
/// If the engine rejects or fails the request before the response has begun.
pub(super) async fn respond<F: ChoiceFormat>(
    serving: &Serving,
    request: ParsedRequest,
    caller: Caller,
    arrived: Instant,
    format: F,
) -> Result<Response, ApiError> {
    let mode = request.params.response_mode;
    let choices = Choices::start(serving, request, caller, arrived)?;
    match mode {
        ResponseMode::Whole => whole(choices, &serving.model, &format).await,
        ResponseMode::Stream(usage) => {
            let envelope = Envelope::of_chunks::<F>(&serving.model);
            sse::respond(choices, envelope, format, usage).await
        }
    }
}

async fn whole<F: ChoiceFormat>(
    mut choices: Choices,
    model: &ModelCard,
    format: &F,
) -> Result<Response, ApiError> {
    let envelope = Envelope::of_whole::<F>(model);
    let finished = choices.finished().await?;
    let written: Vec<_> = (0..)
        .zip(finished)
        .map(|(index, choice)| format.whole(index, choice, &choices))
        .collect();
    let usage = UsageField::Counts(choices.usage());
    let prompt = choices.prompt().filter(|_| F::PROMPT_BESIDE_CHOICES);
    let json = envelope.json(written, usage, prompt);
    Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response())
}
