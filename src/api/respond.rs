//! The beginning of every answer: reads a request, compiles its grammar and submits its choices.

use std::time::Instant;

use axum::extract::Request;

use crate::api::app::{App, Serving};
use crate::api::body;
use crate::api::error::ApiError;
use crate::api::fields::json_object::JsonObject;
use crate::api::generation::choices::Choices;
use crate::api::generation::request::ParsedRequest;
use crate::api::middleware::authentication::Caller;
use crate::tenants::Tenant;

/// Reads a request, and what its answer needs to know of it.
type ReadRequest<T> = fn(&Serving, &Tenant, JsonObject<'_>) -> Result<(ParsedRequest, T), ApiError>;

/// Reads a request with `read`, compiles its grammar and submits its choices.
///
/// # Errors
/// If the request is invalid, or the engine rejects it at once.
pub(in crate::api) async fn begin<T: Send + 'static>(
    app: &App,
    caller: &Caller,
    request: Request,
    read: ReadRequest<T>,
) -> Result<(Choices, T), ApiError> {
    let arrived = Instant::now();
    let (request, own) = body::read(app, caller, request, read).await?;
    let serving = app.serving()?;
    match request.compile(serving, caller.tenant.number).await {
        Ok(request) => Ok((Choices::start(serving, request, caller, arrived)?, own)),
        Err(error) => Err(caller.charged(error, serving).await),
    }
}
