//! `GET /v1/loads` and `GET /get_load`: how busy the server is, in SGLang's shapes. Routers read
//! them.
//!
//! The numbers are sums over all tenants, as the engine last published them.

use axum::Json;
use axum::extract::State;
use axum::http::Uri;
use chrono::DateTime;
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::app::App;
use crate::api::error::{ApiError, quoted};
use crate::api::ids::unix_seconds;
use crate::engine::Load;

/// The sections that a client can ask for. This server reports what is in `core`, always; it has no
/// figures for the others.
pub(in crate::api) const SECTIONS: [&str; 7] =
    ["core", "memory", "spec", "lora", "disagg", "queues", "all"];

/// How busy the server is.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct LoadReport {
    /// The time of the answer, in the format of RFC 3339.
    timestamp: String,
    /// The version of the server.
    version: &'static str,
    /// The number of entries in `loads`: 1.
    dp_rank_count: u32,
    /// The load of the engine.
    loads: [EngineLoad; 1],
}

/// The load of an engine.
#[derive(Serialize, ToSchema)]
struct EngineLoad {
    /// 0: there is one engine.
    dp_rank: u32,
    /// Sequences in the batch.
    num_running_reqs: u32,
    /// Sequences that wait.
    num_waiting_reqs: u32,
    /// Tokens of the sequences that wait. Some may be in the prefix cache.
    num_waiting_uncached_tokens: u64,
    /// Both kinds of sequences.
    num_total_reqs: u32,
    /// Tokens in the pages of the sequences in the batch.
    num_used_tokens: u64,
    /// The same, and the tokens of the sequences that wait.
    num_total_tokens: u64,
    /// Tokens for which there are pages.
    max_total_num_tokens: u64,
    /// `num_used_tokens` divided by `max_total_num_tokens`.
    token_usage: f64,
    /// Generated tokens in each second, lately.
    gen_throughput: f64,
    /// The share of prompt tokens since the start that came from the prefix cache.
    cache_hit_rate: f64,
    /// The larger of `token_usage` and `num_running_reqs` divided by `max_running_requests`.
    utilization: f64,
    /// The maximum number of sequences in the batch.
    max_running_requests: u32,
}

impl EngineLoad {
    fn new(load: &Load) -> EngineLoad {
        let share = |part: u64, all: u64| part as f64 / all.max(1) as f64;
        let token_usage = share(load.used_tokens, load.total_tokens());
        let running = share(load.running.into(), load.limits.max_running.into());
        EngineLoad {
            dp_rank: 0,
            num_running_reqs: load.running,
            num_waiting_reqs: load.queued,
            num_waiting_uncached_tokens: load.queued_tokens,
            num_total_reqs: load.running + load.queued,
            num_used_tokens: load.used_tokens,
            num_total_tokens: load.used_tokens + load.queued_tokens,
            max_total_num_tokens: load.total_tokens(),
            token_usage,
            gen_throughput: load.tokens_per_second,
            cache_hit_rate: share(load.prefix_hits, load.prefix_queries),
            utilization: token_usage.max(running),
            max_running_requests: load.limits.max_running,
        }
    }
}

/// `GET /v1/loads`: how busy the server is.
pub(in crate::api) async fn loads(
    State(app): State<App>,
    uri: Uri,
) -> Result<Json<LoadReport>, ApiError> {
    check_sections(uri.query().unwrap_or_default())?;
    let now = DateTime::from_timestamp(unix_seconds() as i64, 0).unwrap_or_default();
    Ok(Json(LoadReport {
        timestamp: now.to_rfc3339(),
        version: env!("CARGO_PKG_VERSION"),
        dp_rank_count: 1,
        loads: [EngineLoad::new(&app.serving()?.engine.load())],
    }))
}

/// Checks the names in `include`. Other parameters are ignored, as unknown fields of bodies are.
fn check_sections(query: &str) -> Result<(), ApiError> {
    let parameters = form_urlencoded::parse(query.as_bytes());
    for (_, names) in parameters.filter(|(name, _)| name == "include") {
        for name in names.split(',').map(str::trim) {
            if !SECTIONS.contains(&name) {
                let (known, name) = (SECTIONS.join(", "), quoted(name));
                let message = format!("'include' must be a list of {known}; got {name}.");
                return Err(ApiError::invalid_value("include", message));
            }
        }
    }
    Ok(())
}

/// The load of an engine, in SGLang's older shape.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct ShortLoad {
    /// 0: there is one engine.
    dp_rank: u32,
    /// Sequences in the batch and sequences that wait.
    num_reqs: u32,
    /// Sequences that wait.
    num_waiting_reqs: u32,
    /// Tokens in the pages of the batch, and tokens of the sequences that wait.
    num_tokens: u64,
}

/// `GET /get_load`: how busy the server is.
pub(in crate::api) async fn short_loads(
    State(app): State<App>,
) -> Result<Json<[ShortLoad; 1]>, ApiError> {
    let load = app.serving()?.engine.load();
    Ok(Json([ShortLoad {
        dp_rank: 0,
        num_reqs: load.running + load.queued,
        num_waiting_reqs: load.queued,
        num_tokens: load.used_tokens + load.queued_tokens,
    }]))
}
