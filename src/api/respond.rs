//! The path of a request through an endpoint: read it, run it, respond whole or as a stream.

use std::time::Instant;

use axum::extract::{Extension, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::app::App;
use super::authentication::Caller;
use super::body;
use super::choices::Choices;
use super::endpoint::Endpoint;
use super::envelope::{Envelope, UsageField};
use super::error::ApiError;
use super::params::ResponseMode;
use super::sse;

/// Handles a request to the endpoint `E`.
///
/// # Errors
/// If the request is invalid, or if the engine rejects or fails it before the response has begun.
pub(super) async fn respond<E: Endpoint>(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let request = match body::read(&app, &caller, request, E::read).await {
        Ok(request) => request,
        Err(error) => return Err(charged(error, &app, &caller).await),
    };
    let serving = app.serving()?;
    let mode = request.params.response_mode;
    let mut choices = Choices::start(serving, request, &caller, arrived)?;
    if let ResponseMode::Stream(usage) = mode {
        let envelope = Envelope::new(E::ID_PREFIX, E::CHUNK_OBJECT, &serving.model);
        return sse::respond(choices, envelope, E::default(), usage).await;
    }
    let envelope = Envelope::new(E::ID_PREFIX, E::OBJECT, &serving.model);
    let finished = choices.finished().await?;
    let endpoint = E::default();
    let written: Vec<_> = (0..)
        .zip(finished)
        .map(|(index, choice)| endpoint.whole(index, choice, &choices))
        .collect();
    let usage = UsageField::Counts(choices.usage());
    let prompt = choices.prompt().filter(|_| E::PROMPT_BESIDE_CHOICES);
    let json = envelope.json(written, usage, prompt);
    Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response())
}

/// Charges a request that could not be read, if its error is the client's own, to the tenant's rate
/// of requests. So a flood of malformed requests is limited as any other. Returns `error`, or the
/// error of a tenant that has used up its rate.
async fn charged(error: ApiError, app: &App, caller: &Caller) -> ApiError {
    let tenant = &caller.tenant;
    let Ok(serving) = app.serving() else {
        return error;
    };
    if !error.is_clients_own() || tenant.requests.is_none() {
        return error;
    }
    let Some((charged, rates)) = serving.engine.charge_failed(tenant.number).await else {
        return error;
    };
    caller.set_rates(rates);
    match charged {
        Ok(()) => error,
        Err(limited) => limited.into(),
    }
}
