//! `GET /props` and `GET /slots`: the model, its defaults and the places of the batch, in the
//! shapes of llama-server. Its clients read the context length and the chat template here.
//!
//! Invariant: a slot shows whether it is used and nothing else, because other tenants may use it.

use axum::Json;
use axum::extract::{Extension, State};
use axum::http::Uri;
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::app::{App, Serving};
use crate::api::error::ApiError;
use crate::api::middleware::authentication::Caller;
use crate::engine::Load;

/// The seed that means a random one to clients of llama-server.
const RANDOM_SEED: u32 = u32::MAX;

/// The properties of the server.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct Props {
    /// What a request of `/completion` gets if it does not say otherwise.
    default_generation_settings: DefaultSettings,
    /// The maximum number of sequences in the batch.
    total_slots: u32,
    /// The model's name.
    model_alias: String,
    /// The model's name: the server does not tell paths of its machine.
    model_path: String,
    /// What prompts may have beside text.
    modalities: Modalities,
    /// The chat template; empty if the model has none.
    chat_template: String,
    /// The text of the token that begins a text; empty if the model's files name none.
    bos_token: String,
    /// The text of the token that ends a text; empty if the model's files name none.
    eos_token: String,
    /// The version of the server.
    build_info: String,
    /// `false`: the server never unloads its model.
    is_sleeping: bool,
}

/// What a request gets if it does not say otherwise.
#[derive(Serialize, ToSchema)]
struct DefaultSettings {
    /// The maximum number of tokens of prompt and output together.
    n_ctx: u32,
    /// The sampling parameters.
    params: DefaultParams,
}

/// The sampling parameters of a request that sets none.
#[derive(Serialize, ToSchema)]
struct DefaultParams {
    /// 4294967295: a random seed.
    seed: u32,
    /// The temperature.
    temperature: f32,
    /// 0: off.
    top_k: u32,
    /// 1: off.
    top_p: f32,
    /// 0: off.
    min_p: f32,
    /// 1: off.
    repeat_penalty: f32,
    /// 0: off.
    presence_penalty: f32,
    /// 0: off.
    frequency_penalty: f32,
    /// The maximum number of output tokens; -1 means the rest of the context.
    n_predict: i64,
}

/// What prompts may have beside text.
#[derive(Serialize, ToSchema)]
struct Modalities {
    /// `false`: the server reads no images.
    vision: bool,
    /// `false`: the server reads no audio.
    audio: bool,
}

/// `GET /props`: the properties of the server.
pub(in crate::api) async fn props(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Props>, ApiError> {
    let serving = app.serving()?;
    let (model, tokenizer) = (&serving.model, &serving.tokenizer);
    model.check(None, &caller.tenant)?;
    let named = |name| tokenizer.named_token(name).unwrap_or_default().to_owned();
    let template = serving.chat_template.as_ref();
    Ok(Json(Props {
        default_generation_settings: DefaultSettings {
            n_ctx: model.max_model_len,
            params: default_params(serving),
        },
        total_slots: serving.engine.load().limits.max_running,
        model_alias: model.name.clone(),
        model_path: model.name.clone(),
        modalities: Modalities {
            vision: false,
            audio: false,
        },
        chat_template: template.map_or_else(String::new, |template| template.source().to_owned()),
        bos_token: named("bos_token"),
        eos_token: named("eos_token"),
        build_info: concat!("sterna ", env!("CARGO_PKG_VERSION")).to_owned(),
        is_sleeping: false,
    }))
}

fn default_params(serving: &Serving) -> DefaultParams {
    let preferred = serving.defaults.preferred().unwrap_or_default();
    DefaultParams {
        seed: RANDOM_SEED,
        temperature: preferred.temperature.unwrap_or(1.0),
        top_k: preferred
            .top_k
            .map_or(0, |top_k| u32::try_from(top_k).unwrap_or(0)),
        top_p: preferred.top_p.unwrap_or(1.0),
        min_p: preferred.min_p.unwrap_or(0.0),
        repeat_penalty: preferred.repetition_penalty.unwrap_or(1.0),
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        n_predict: serving.defaults.max_tokens().map_or(-1, i64::from),
    }
}

/// A place of the batch.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct BatchSlot {
    /// The number of the slot.
    id: u32,
    /// The maximum number of tokens of prompt and output together.
    n_ctx: u32,
    /// Whether a sequence is in the slot.
    is_processing: bool,
}

/// `GET /slots`: the places of the batch. With `fail_on_no_slot` it is an error if all are used.
pub(in crate::api) async fn slots(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Result<Json<Vec<BatchSlot>>, ApiError> {
    let serving = app.serving()?;
    serving.model.check(None, &caller.tenant)?;
    let Load {
        running, limits, ..
    } = serving.engine.load();
    let query = uri.query().unwrap_or_default();
    let mut parameters = form_urlencoded::parse(query.as_bytes());
    if running >= limits.max_running && parameters.any(|(name, _)| name == "fail_on_no_slot") {
        return Err(ApiError::no_slot());
    }
    let slot = |id| BatchSlot {
        id,
        n_ctx: serving.model.max_model_len,
        is_processing: id < running,
    };
    Ok(Json((0..limits.max_running).map(slot).collect()))
}
