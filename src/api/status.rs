//! The endpoints for probes, metrics and the list of models. None of them waits for the engine.

use std::io::Write as _;
use std::time::Instant;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::app::{App, ModelCard};
use crate::api::error::ApiError;
use crate::api::middleware::authentication::Caller;
use crate::engine::{Status, TenantId};
use crate::metrics::GrammarFigures;

/// What `/health` and `/ready` say.
#[derive(Serialize, ToSchema)]
pub(super) struct StatusReport {
    /// `ok`, `stalled` or `dead` of `/health`; `ready` of `/ready`.
    status: &'static str,
    /// Why the server is not healthy.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// A list of models.
#[derive(Serialize, ToSchema)]
pub(super) struct ModelList {
    /// `list`.
    object: &'static str,
    /// The served model under each of its names, or nothing if the tenant may not use it.
    data: Vec<ModelObject>,
}

/// A model.
#[derive(Serialize, ToSchema)]
pub(super) struct ModelObject {
    /// The model's name.
    id: String,
    /// `model`.
    object: &'static str,
    /// When the server started, in Unix seconds.
    created: u64,
    /// Whose API a router should use: `vllm`, `sglang` or `sterna`, as the operator chose.
    owned_by: String,
    /// The first name of the model, which answers show.
    root: String,
    /// `null`: the model is no adapter of another one.
    parent: Option<String>,
    /// The maximum number of tokens of prompt and output together.
    max_model_len: u32,
}

/// `GET /health`: 200 while the server is alive and, if it has work, makes progress.
pub(super) async fn health(State(app): State<App>) -> Response {
    match app.serving().map(|serving| serving.engine.status()) {
        Ok(status) if !status.healthy() => {
            let stalled_for = status.stalled_for.as_secs_f64();
            let (status, reason) = match status.alive {
                true => (
                    "stalled",
                    format!("no step has ended for {stalled_for:.1} s"),
                ),
                false => ("dead", "the engine thread has panicked".to_owned()),
            };
            let reason = Some(reason);
            let body = Json(StatusReport { status, reason });
            (StatusCode::SERVICE_UNAVAILABLE, body).into_response()
        }
        _ => Json(StatusReport {
            status: "ok",
            reason: None,
        })
        .into_response(),
    }
}

/// `GET /ready`: 200 while the server accepts new requests.
pub(super) async fn ready(State(app): State<App>) -> Result<Json<StatusReport>, ApiError> {
    readiness(&app.serving()?.engine.status())?;
    Ok(Json(StatusReport {
        status: "ready",
        reason: None,
    }))
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

/// The version of the server.
#[derive(Serialize, ToSchema)]
pub(super) struct VersionReport {
    /// The version.
    version: &'static str,
}

/// `GET /version`: the version of the server.
pub(super) async fn version() -> Json<VersionReport> {
    Json(VersionReport {
        version: env!("CARGO_PKG_VERSION"),
    })
}

/// `GET /metrics`: the metrics in Prometheus's text format.
pub(super) async fn metrics(
    State(app): State<App>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let serving = app.serving()?;
    let grammars = serving.grammars.usage();
    serving.metrics.grammars(GrammarFigures {
        values: [
            grammars.workers,
            grammars.deaths,
            grammars.waiting,
            grammars.cache_bytes,
        ],
        times: (grammars.times.into_iter())
            .map(|(tenant, times)| (TenantId(tenant), times))
            .collect(),
    });
    let text = serving.metrics.render();
    Ok(compressed(
        "text/plain; version=0.0.4; charset=utf-8",
        text,
        &headers,
    ))
}

/// The last minutes of the metrics.
#[derive(Serialize, ToSchema)]
pub(super) struct RecentMetricsReport {
    /// The samples, the oldest first.
    samples: Vec<MetricsSample>,
}

/// Some metrics at one moment.
#[derive(Serialize, ToSchema)]
struct MetricsSample {
    /// How long ago the moment was, in milliseconds.
    age_ms: u64,
    /// The series in Prometheus's text format, without comments.
    metrics: String,
}

/// `GET /metrics/recent`: the last minutes of the metrics that the page's charts show.
pub(super) async fn recent_metrics(
    State(app): State<App>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let samples = app.serving()?.metrics.recent_samples(Instant::now());
    let samples = samples.into_iter().map(|sample| MetricsSample {
        age_ms: u64::try_from(sample.age.as_millis()).unwrap_or(u64::MAX),
        metrics: sample.text,
    });
    let report = RecentMetricsReport {
        samples: samples.collect(),
    };
    let text = serde_json::to_string(&report).expect("all keys are strings");
    Ok(compressed("application/json", text, &headers))
}

/// Returns `text` in the coding that the client takes.
fn compressed(content_type: &'static str, text: String, headers: &HeaderMap) -> Response {
    let content_type = (header::CONTENT_TYPE, content_type);
    // A cache between must not give a compressed answer to a client that takes none.
    let vary = (header::VARY, "accept-encoding");
    if !takes_gzip(headers) {
        return ([content_type, vary], text).into_response();
    }
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let written = encoder.write_all(text.as_bytes());
    let compressed = written.and_then(|()| encoder.finish());
    let compressed = compressed.expect("a vector takes all bytes");
    let encoding = (header::CONTENT_ENCODING, "gzip");
    ([content_type, vary, encoding], compressed).into_response()
}

/// Returns whether a client takes gzip (RFC 9110, section 12.5.3).
fn takes_gzip(headers: &HeaderMap) -> bool {
    let given = headers.get_all(header::ACCEPT_ENCODING).iter();
    let given = given.filter_map(|value| value.to_str().ok());
    given.flat_map(|value| value.split(',')).any(|coding| {
        let (name, weight) = coding.split_once(';').unwrap_or((coding, ""));
        let weight = weight.trim().strip_prefix("q=").map(str::parse::<f32>);
        name.trim().eq_ignore_ascii_case("gzip") && weight != Some(Ok(0.0))
    })
}

/// `GET /v1/models`: the served model under each of its names, or an empty list if the tenant may
/// not use it.
pub(super) async fn models(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<ModelList>, ApiError> {
    let model = &app.serving()?.model;
    let allowed = model.is_allowed_for(&caller.tenant);
    let names = model.names().filter(|_| allowed);
    Ok(Json(ModelList {
        object: "list",
        data: names
            .map(|name| model_object(model, &name, app.started()))
            .collect(),
    }))
}

/// `GET /v1/models/{id}`: the served model, by any of its names.
pub(super) async fn model(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelObject>, ApiError> {
    let model = &app.serving()?.model;
    // An id that is not valid UTF-8 names no model. The error then shows the undecoded path.
    let undecoded = uri.path().trim_start_matches("/v1/models/");
    let requested = id.as_ref().map_or(undecoded, |Path(id)| id);
    model.check(Some(requested), &caller.tenant)?;
    Ok(Json(model_object(model, &model.name, app.started())))
}

fn model_object(model: &ModelCard, id: &str, created: u64) -> ModelObject {
    ModelObject {
        id: id.to_owned(),
        object: "model",
        created,
        owned_by: model.owned_by.clone(),
        root: model.name.clone(),
        parent: None,
        max_model_len: model.max_model_len,
    }
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
