//! What only the operator may do: reset the prefix cache, end a request.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::Uri;
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::app::App;
use crate::api::error::ApiError;

/// What a reset of the prefix cache has done.
#[derive(Serialize, ToSchema)]
pub(super) struct CacheReset {
    /// The number of pages that are free now. Pages that running sequences use stay cached, and so
    /// do public prefixes.
    freed_pages: usize,
}

/// `POST /reset_prefix_cache`: forgets every cached page that no running sequence uses. Answers
/// after the current step.
pub(super) async fn reset_prefix_cache(
    State(app): State<App>,
) -> Result<Json<CacheReset>, ApiError> {
    let engine = &app.serving()?.engine;
    match engine.reset_prefix_cache().await {
        Some(freed_pages) => Ok(Json(CacheReset { freed_pages })),
        None if engine.status().draining => Err(ApiError::draining()),
        None => Err(ApiError::dead()),
    }
}

/// What the end of requests has done.
#[derive(Serialize, ToSchema)]
pub(super) struct Aborted {
    /// The id.
    id: String,
    /// The number of requests with this id, which have ended.
    aborted: usize,
}

/// `DELETE /v1/requests/{id}`: ends the requests with this id. Their clients get an error.
pub(super) async fn abort(
    State(app): State<App>,
    uri: Uri,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Aborted>, ApiError> {
    app.serving()?;
    // An id that is not valid UTF-8 names no request. The error then shows the undecoded path.
    let undecoded = uri.path().trim_start_matches("/v1/requests/");
    let id = id.map_or_else(|_| undecoded.to_owned(), |Path(id)| id);
    match app.running().abort(&id) {
        0 => Err(ApiError::no_such_request(&id)),
        aborted => Ok(Json(Aborted { id, aborted })),
    }
}
