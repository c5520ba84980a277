//! The endpoints for probes, metrics and the list of models. None of them waits for the engine.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path, Request, State};
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::app::{App, ModelCard};
use super::authentication::Caller;
use super::error::ApiError;
use crate::engine::Status;

/// `GET /health`: 200 while the server is alive and, if it has work, makes progress.
pub(super) async fn health(State(app): State<App>) -> Response {
    match app.serving().map(|serving| serving.engine.status()) {
        Ok(status) if !status.healthy() => {
            let stalled_for = status.stalled_for.as_secs_f64();
            let body = match status.alive {
                true => json!({
                    "status": "stalled",
                    "reason": format!("no step has ended for {stalled_for:.1} s"),
                }),
                false => json!({"status": "dead", "reason": "the engine thread has panicked"}),
            };
            (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
        }
        _ => Json(json!({"status": "ok"})).into_response(),
    }
}

/// `GET /ready`: 200 while the server accepts new requests.
pub(super) async fn ready(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    readiness(&app.serving()?.engine.status())?;
    Ok(Json(json!({"status": "ready"})))
}

fn readiness(engine: &Status) -> Result<(), ApiError> {
    match (engine.ready(), engine.draining) {
        (true, _) => Ok(()),
        (false, true) => Err(ApiError::draining()),
        (false, false) => Err(ApiError::dead()),
    }
}

/// Ends each connection with its next response while the server drains, so that proxies and
/// clients connect to another server.
pub(super) async fn close_while_draining(
    State(app): State<App>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = next.run(request).await;
    if app
        .serving()
        .is_ok_and(|serving| serving.engine.status().draining)
    {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
    }
    response
}

/// `GET /metrics`: the metrics in Prometheus's text format.
pub(super) async fn metrics(State(app): State<App>) -> Result<impl IntoResponse, ApiError> {
    let content_type = "text/plain; version=0.0.4; charset=utf-8";
    let text = app.serving()?.metrics.render();
    Ok(([(header::CONTENT_TYPE, content_type)], text))
}

/// `GET /v1/models`: the served model, or an empty list if the tenant may not use it.
pub(super) async fn models(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Value>, ApiError> {
    let model = &app.serving()?.model;
    let allowed = model.is_allowed_for(&caller.tenant);
    let object = allowed.then(|| model_object(model, app.started()));
    let data: Vec<Value> = object.into_iter().collect();
    Ok(Json(json!({"object": "list", "data": data})))
}

/// `GET /v1/models/{id}`: the served model, by any of its names.
pub(super) async fn model(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let model = &app.serving()?.model;
    // An id that is not valid UTF-8 names no model. The error then shows the undecoded path.
    let undecoded = uri.path().trim_start_matches("/v1/models/");
    let requested = id.as_ref().map_or(undecoded, |Path(id)| id);
    model.check(Some(requested), &caller.tenant)?;
    Ok(Json(model_object(model, app.started())))
}

fn model_object(model: &ModelCard, created: u64) -> Value {
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
    fn a_dead_engine_is_not_ready() {
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
        let response = dead.into_response();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(
            readiness(&Status {
                alive: true,
                ..engine
            }),
            Ok(())
        );
    }
}
