//! How the server is and what it serves. Nothing here waits for a step.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path, State};
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::authentication::Caller;
use super::error::ApiError;
use super::{App, ModelCard};
use crate::engine::Status;

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
    readiness(&app.serving()?.engine.status())?;
    Ok(Json(json!({"status": "ready"})).into_response())
}

fn readiness(engine: &Status) -> Result<(), ApiError> {
    match (engine.ready(), engine.draining) {
        (true, _) => Ok(()),
        (false, true) => Err(ApiError::draining()),
        (false, false) => Err(ApiError::dead()),
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

/// `GET /v1/models`: the one that is served, if the tenant may use it.
pub(super) async fn models(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Value>, ApiError> {
    let model = &app.serving()?.model;
    let open = model.is_open_to(&caller.tenant);
    let data: Vec<Value> = open
        .then(|| described(model, app.inner.started))
        .into_iter()
        .collect();
    Ok(Json(json!({"object": "list", "data": data})))
}

/// `GET /v1/models/{id}`: that one, under any of its names.
pub(super) async fn model(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let model = &app.serving()?.model;
    // No text is no model's name, and told as it was sent.
    let sent = uri.path().trim_start_matches("/v1/models/");
    let asked = id.as_ref().map_or(sent, |Path(id)| id);
    model.check(Some(asked), &caller.tenant)?;
    Ok(Json(described(model, app.inner.started)))
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_dead_engine_is_not_ready_and_no_failure_of_the_question() {
        let engine = Status {
            alive: false,
            draining: false,
            steps: 0,
            running: 0,
            queued: 0,
            stalled_for: Duration::ZERO,
            stall_limit: Duration::from_secs(1),
        };
        let dead = readiness(&engine).unwrap_err();
        assert_eq!(dead.body()["error"]["code"], "engine_dead");
        let answer = dead.into_response();
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(
            readiness(&Status {
                alive: true,
                ..engine
            }),
            Ok(())
        );
    }
}
