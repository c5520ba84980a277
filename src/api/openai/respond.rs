//! The path of a request through an endpoint: read it, run it, respond whole or as a stream.

use axum::extract::{Extension, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::chunks::ChunkWriter;
use super::endpoint::Endpoint;
use super::envelope::{Envelope, PromptFields, UsageField};
use crate::api::app::{App, Serving};
use crate::api::error::ApiError;
use crate::api::fields::json_object::JsonObject;
use crate::api::generation::request::ResponseMode;
use crate::api::generation::sse;
use crate::api::middleware::authentication::Caller;
use crate::api::respond::begin;
use crate::tenants::Tenant;

/// Handles a request to the endpoint `E`.
///
/// # Errors
/// If the request is invalid, or if the engine rejects or fails it before the response has begun.
pub(in crate::api) async fn respond<E: Endpoint>(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let read = |serving: &Serving, tenant: &Tenant, body: JsonObject<'_>| {
        let request = E::read(serving, tenant, body)?;
        let mode = request.params.response_mode;
        Ok((request, mode))
    };
    let (mut choices, mode) = begin(&app, &caller, request, read).await?;
    let serving = app.serving()?;
    if let ResponseMode::Stream(usage) = mode {
        let envelope = Envelope::new(E::ID_PREFIX, E::CHUNK_OBJECT, &serving.model);
        choices.also_called(envelope.id());
        let endpoint = E::default();
        let writer = ChunkWriter {
            envelope,
            endpoint,
            usage,
        };
        return sse::respond(choices, writer).await;
    }
    let envelope = Envelope::new(E::ID_PREFIX, E::OBJECT, &serving.model);
    choices.also_called(envelope.id());
    let finished = choices.finished().await?;
    let endpoint = E::default();
    let prompt = match E::PROMPT_BESIDE_CHOICES {
        true => PromptFields {
            tokens: choices.prompt(0),
            logprobs: choices.prompt_logprobs(&finished[0].output.scores),
        },
        false => PromptFields::default(),
    };
    let written: Vec<E::Choice> = (0..)
        .zip(finished)
        .map(|(index, choice)| endpoint.whole(index, choice, &choices))
        .collect();
    let usage = UsageField::Counts(choices.usage());
    let json = envelope.json(written, usage, prompt);
    Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response())
}
