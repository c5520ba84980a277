//! `POST /v1/chat/completions/render` and `POST /v1/completions/render`: what the engine would get
//! for a request, without running it. The shape is vLLM's; routers that look for cached prefixes
//! read `token_ids`.
//!
//! Invariant: the tokens equal the real endpoint's, because the same function reads the request.

use axum::Json;
use axum::extract::{Extension, Request, State};
use serde::Serialize;
use utoipa::ToSchema;

use super::{chat, completions};
use crate::api::app::{App, Serving};
use crate::api::body;
use crate::api::error::ApiError;
use crate::api::fields::json_object::JsonObject;
use crate::api::generation::request::{Params, ParsedPrompt, ParsedRequest};
use crate::api::ids::random_id;
use crate::api::middleware::authentication::Caller;
use crate::tenants::Tenant;

/// What the engine would get for a prompt.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct RenderedRequest {
    /// A new id.
    request_id: String,
    /// The tokens of the prompt.
    token_ids: Vec<u32>,
    /// How tokens would be drawn.
    sampling_params: RenderedSampling,
    /// The name of the served model.
    model: String,
    /// Whether the answer would be a stream.
    stream: bool,
}

/// How tokens are drawn, and what ends the answer.
#[derive(Serialize, ToSchema)]
struct RenderedSampling {
    /// The number of choices.
    n: u32,
    /// The maximum number of output tokens.
    max_tokens: u32,
    /// The minimum number of output tokens.
    min_tokens: u32,
    /// 0 always takes the most likely token.
    temperature: f32,
    /// 1 is off.
    top_p: f32,
    /// 0 is off.
    top_k: u32,
    /// 0 is off.
    min_p: f32,
    /// The seed of the first choice. It is random if the request has none.
    seed: u64,
    /// 1 is off.
    repetition_penalty: f32,
    /// 0 is off.
    frequency_penalty: f32,
    /// 0 is off.
    presence_penalty: f32,
    /// Strings that end the output.
    stop: Vec<String>,
    /// Tokens that end the output, the model's stop tokens included.
    stop_token_ids: Vec<u32>,
    /// Whether the text keeps the stop string or stop token that ends it.
    include_stop_str_in_output: bool,
    /// Whether the text leaves out special tokens.
    skip_special_tokens: bool,
    /// The number of alternatives for each token; `null` without log-probabilities.
    logprobs: Option<u32>,
    /// The same for the tokens of the prompt.
    prompt_logprobs: Option<u32>,
}

impl RenderedRequest {
    fn new(id: &str, prompt: ParsedPrompt, params: &Params, serving: &Serving) -> Self {
        let sampling = &params.sampling;
        RenderedRequest {
            request_id: random_id(id),
            token_ids: prompt.tokens,
            sampling_params: RenderedSampling {
                n: params.n,
                max_tokens: prompt.max_new_tokens,
                min_tokens: params.min_tokens,
                temperature: sampling.temperature,
                top_p: sampling.top_p,
                top_k: sampling.top_k,
                min_p: sampling.min_p,
                seed: sampling.seed,
                repetition_penalty: sampling.repetition_penalty,
                frequency_penalty: sampling.frequency_penalty,
                presence_penalty: sampling.presence_penalty,
                stop: params.shape.stop.clone(),
                stop_token_ids: params.stop_tokens.clone(),
                include_stop_str_in_output: params.shape.include_stop,
                skip_special_tokens: params.shape.skip_special_tokens,
                logprobs: sampling.logprobs,
                prompt_logprobs: sampling.prompt_logprobs,
            },
            model: serving.model.name.clone(),
            stream: params.is_stream(),
        }
    }
}

/// `POST /v1/chat/completions/render`: what the engine would get for a conversation.
pub(in crate::api) async fn render_chat(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<RenderedRequest>, ApiError> {
    let rendered = render(&app, &caller, request, chat::ID_PREFIX, chat::read_request).await?;
    let only = rendered.into_iter().next();
    Ok(Json(only.expect("a conversation is a prompt")))
}

/// `POST /v1/completions/render`: what the engine would get for each prompt.
pub(in crate::api) async fn render_completion(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<Vec<RenderedRequest>>, ApiError> {
    let (prefix, read) = (completions::ID_PREFIX, completions::read_request);
    render(&app, &caller, request, prefix, read).await.map(Json)
}

async fn render(
    app: &App,
    caller: &Caller,
    request: Request,
    id_prefix: &str,
    read: fn(&Serving, &Tenant, &JsonObject<'_>) -> Result<ParsedRequest, ApiError>,
) -> Result<Vec<RenderedRequest>, ApiError> {
    let request = body::read_text_only(app, caller, request, read).await?;
    let (serving, params) = (app.serving()?, &request.params);
    let prompts = request.prompts.into_iter();
    let render = |prompt| RenderedRequest::new(id_prefix, prompt, params, serving);
    Ok(prompts.map(render).collect())
}
