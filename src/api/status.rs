//! How the server is and what it serves. Nothing here waits for a step.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::error::ApiError;
use super::{App, ModelCard};

/// `GET /health`: the server lives; while it has work, it makes progress.
pub(super) async fn health(State(app): State<App>) -> Response {
    match app.serving().map(|serving| serving.engine.status()) {
        Ok(status) if !status.healthy() => {
            let status = if status.alive { "stalled" } else { "dead" };
            (
                StatusCode::SERVICE_UNAVAILABLE,
                Json(json!({"status": status})),
            )
                .into_response()
        }
        _ => Json(json!({"status": "ok"})).into_response(),
    }
}

/// `GET /ready`: requests are welcome.
pub(super) async fn ready(State(app): State<App>) -> Result<Response, ApiError> {
    let status = app.serving()?.engine.status();
    match (status.ready(), status.draining) {
        (true, _) => Ok(Json(json!({"status": "ready"})).into_response()),
        (false, true) => Err(ApiError::draining()),
        (false, false) => Err(ApiError::internal("the engine is dead")),
    }
}

/// `GET /metrics`: Prometheus's text format.
pub(super) async fn metrics(State(app): State<App>) -> Result<Response, ApiError> {
    let text = app.serving()?.metrics.render();
    Ok((
        [(
            header::CONTENT_TYPE,
            "text/plain; version=0.0.4; charset=utf-8",
        )],
        text,
    )
        .into_response())
}

/// `GET /v1/models`: the one that is served.
pub(super) async fn models(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    let serving = app.serving()?;
    Ok(Json(
        json!({"object": "list", "data": [described(&serving.model, app.inner.started)]}),
    ))
}

/// `GET /v1/models/{id}`: that one, under any of its names.
pub(super) async fn model(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let model = &app.serving()?.model;
    match model.answers_to(&id) {
        true => Ok(Json(described(model, app.inner.started))),
        false => Err(ApiError::model_not_found(&id, &model.name)),
    }
}

fn described(model: &ModelCard, created: u64) -> Value {
    json!({
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "sterna",
        "root": model.name,
        "parent": null,
        "max_model_len": model.max_model_len,
    })
}
