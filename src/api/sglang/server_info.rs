//! `GET /model_info` and `GET /server_info`: the model and the limits of the server, in SGLang's
//! shapes. Routers read them to learn which model a worker serves.
//!
//! Invariant: no answer names a path of the server's machine. Where SGLang has one, these answers
//! have the model's name, which is what routers use it for.

use axum::Json;
use axum::extract::{Extension, State};
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::app::App;
use crate::api::error::ApiError;
use crate::api::fields::sampling_defaults::PreferredSampling;
use crate::api::middleware::authentication::Caller;

/// The served model.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct ServedModelInfo {
    /// The model's name.
    model_path: String,
    /// The model's name: its tokenizer belongs to it.
    tokenizer_path: String,
    /// Whether the model generates text.
    is_generation: bool,
    /// The sampling parameters of requests that do not set them, if the operator chose some.
    preferred_sampling_params: Option<PreferredSampling>,
    /// `default`: a server never changes its weights.
    weight_version: &'static str,
    /// Whether prompts may have images.
    has_image_understanding: bool,
    /// Whether prompts may have audio.
    has_audio_understanding: bool,
    /// The `model_type` of the model's `config.json`.
    model_type: String,
    /// The class in the model's `config.json`.
    architectures: [String; 1],
}

/// `GET /model_info`: the served model.
pub(in crate::api) async fn model_info(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<ServedModelInfo>, ApiError> {
    let serving = app.serving()?;
    let model = &serving.model;
    model.check(None, &caller.tenant)?;
    Ok(Json(ServedModelInfo {
        model_path: model.name.clone(),
        tokenizer_path: model.name.clone(),
        is_generation: model.embedding.is_none(),
        preferred_sampling_params: serving.defaults.preferred(),
        weight_version: "default",
        has_image_understanding: false,
        has_audio_understanding: false,
        model_type: model.model_type.clone(),
        architectures: [model.architecture.clone()],
    }))
}

/// The server and its limits.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct ServerInfo {
    /// The version of the server.
    version: &'static str,
    /// `ready`, or `draining` while the server shuts down, or `dead` if its engine has failed.
    status: &'static str,
    /// The model's name.
    served_model_name: String,
    /// The model's name.
    model_path: String,
    /// The model's name: its tokenizer belongs to it.
    tokenizer_path: String,
    /// The maximum number of tokens of prompt and output together.
    context_length: u32,
    /// The maximum number of tokens of a prompt.
    max_req_input_len: u32,
    /// Tokens for which there are pages.
    max_total_num_tokens: u64,
    /// The maximum number of sequences in the batch.
    max_running_requests: u32,
    /// The maximum number of requests that wait.
    max_queued_requests: u32,
    /// The maximum number of tokens of a prompt that a step computes.
    chunked_prefill_size: u32,
    /// Tokens of a page.
    page_size: u64,
    /// 1: the server is one process.
    tp_size: u32,
    /// 1: the server has one engine.
    dp_size: u32,
    /// `null`: prefill and decode run in the same engine.
    disaggregation_mode: &'static str,
    /// The state of the engine.
    internal_states: [InternalState; 1],
}

/// The state of an engine.
#[derive(Serialize, ToSchema)]
struct InternalState {
    /// Generated tokens in each second, lately.
    last_gen_throughput: f64,
}

/// `GET /server_info`: the server and its limits.
pub(in crate::api) async fn server_info(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<ServerInfo>, ApiError> {
    let serving = app.serving()?;
    let (model, load, status) = (
        &serving.model,
        serving.engine.load(),
        serving.engine.status(),
    );
    model.check(None, &caller.tenant)?;
    let limits = &load.limits;
    Ok(Json(ServerInfo {
        version: env!("CARGO_PKG_VERSION"),
        status: match (status.alive, status.draining) {
            (false, _) => "dead",
            (true, true) => "draining",
            (true, false) => "ready",
        },
        served_model_name: model.name.clone(),
        model_path: model.name.clone(),
        tokenizer_path: model.name.clone(),
        context_length: model.max_model_len,
        max_req_input_len: model.max_model_len.saturating_sub(1),
        max_total_num_tokens: load.total_tokens(),
        max_running_requests: limits.max_running,
        max_queued_requests: limits.max_queued,
        chunked_prefill_size: limits.prefill_chunk,
        page_size: load.total_tokens() / u64::from(limits.pages),
        tp_size: 1,
        dp_size: 1,
        disaggregation_mode: "null",
        internal_states: [InternalState {
            last_gen_throughput: load.tokens_per_second,
        }],
    }))
}
