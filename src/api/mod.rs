//! The HTTP API: OpenAI's endpoints in front of the engine.
//!
//! Invariant: only this module knows HTTP and the JSON of requests and answers.
//!
//! Invariant: this module limits bodies and connections; the engine and the scheduler decide which
//! request runs.
//!
//! Invariant: a client that disconnects cancels its request, because the server then drops the
//! request's handler, and the handler owns the request's `EventStream`.

mod access;
mod admin;
mod answer_parts;
mod anthropic;
mod app;
mod authentication;
mod body;
mod body_limits;
mod chat;
mod choices;
mod chunks;
mod completions;
mod connection;
mod conversation;
mod embeddings;
mod endpoint;
mod envelope;
mod error;
mod fields;
mod generate;
mod generation;
mod head_check;
mod json;
mod listener;
mod llama_completion;
mod loads;
mod logprobs;
mod messages;
mod native;
mod open_connections;
mod openapi;
mod operations;
mod page;
mod params;
mod parsed_request;
mod prompt_logprobs;
mod props;
mod rate_headers;
mod render;
mod request_id;
mod request_log;
mod respond;
mod response_count;
mod responses;
mod running;
mod sampling_defaults;
mod schema;
mod server_info;
mod sse;
mod status;
mod structure;
mod template_kwargs;
mod token_ids;
mod tokenize;
mod tool_calls;
mod tool_fields;
mod trace_context;
mod typed_events;
mod unsupported;

use std::sync::LazyLock;

use axum::Router;
use axum::body::Bytes;
use axum::extract::Request;
use axum::http::header;
use axum::middleware;
use axum::response::IntoResponse;

use chat::ChatEndpoint;
use completions::CompletionEndpoint;
use generate::GenerateWriter;
use llama_completion::LlamaWriter;
use openapi::ApiRoute;
use respond::respond;

pub use access::{Access, AllowedHosts, AllowedOrigins, HostName, parse_origin};
pub use app::{App, EmbeddingShape, ModelCard, Serving};
pub use connection::ConnectionLimits;
pub use error::ApiError;
pub use listener::{serve, serve_all};
pub use sampling_defaults::SamplingDefaults;

/// Returns all endpoints.
fn routes() -> Vec<ApiRoute> {
    let all = [
        model_routes(),
        server_routes(),
        router_routes(),
        admin_routes(),
    ];
    all.into_iter().flatten().collect()
}

/// Returns the endpoints that read prompts and texts.
fn model_routes() -> Vec<ApiRoute> {
    vec![
        ApiRoute::post(
            "/v1/chat/completions",
            respond::<ChatEndpoint>,
            operations::completion::<ChatEndpoint>,
        ),
        ApiRoute::post(
            "/v1/completions",
            respond::<CompletionEndpoint>,
            operations::completion::<CompletionEndpoint>,
        ),
        ApiRoute::post(
            "/v1/chat/completions/render",
            render::chat,
            operations::render_chat,
        ),
        ApiRoute::post(
            "/v1/completions/render",
            render::completion,
            operations::render_completion,
        ),
        ApiRoute::post(
            "/v1/embeddings",
            embeddings::embeddings,
            operations::embeddings,
        ),
        ApiRoute::post(
            "/completion",
            native::respond::<LlamaWriter>,
            operations::llama_completion,
        ),
        ApiRoute::post(
            "/generate",
            native::respond::<GenerateWriter>,
            operations::generate,
        ),
        ApiRoute::post("/v1/responses", responses::create, responses::describe),
        ApiRoute::post(
            "/v1/messages",
            anthropic::messages,
            anthropic::describe_messages,
        ),
        ApiRoute::post(
            "/v1/messages/count_tokens",
            anthropic::count_tokens,
            anthropic::describe_count,
        ),
        ApiRoute::post("/tokenize", tokenize::tokenize, operations::tokenize),
        ApiRoute::post("/detokenize", tokenize::detokenize, operations::detokenize),
    ]
}

/// Returns the endpoints of models, probes and the page.
fn server_routes() -> Vec<ApiRoute> {
    vec![
        ApiRoute::get("/v1/models", status::models, operations::models),
        ApiRoute::get("/v1/models/{*id}", status::model, operations::model),
        ApiRoute::get("/health", status::health, operations::health),
        ApiRoute::get("/ready", status::ready, operations::ready),
        ApiRoute::get("/version", status::version, operations::version),
        ApiRoute::get("/metrics", status::metrics, operations::metrics),
        ApiRoute::get("/openapi.json", openapi_document, operations::openapi),
        ApiRoute::get("/", page::show, operations::page),
        ApiRoute::get("/page/{*file}", page::file, operations::page_file),
    ]
}

/// Returns the endpoints that describe the server as others do.
fn router_routes() -> Vec<ApiRoute> {
    vec![
        ApiRoute::get(
            "/tokenizer_info",
            tokenize::tokenizer_info,
            operations::tokenizer_info,
        ),
        ApiRoute::get("/v1/loads", loads::loads, operations::loads),
        ApiRoute::get("/get_load", loads::short_loads, operations::short_loads),
        ApiRoute::get(
            "/server_info",
            server_info::server_info,
            operations::server_info,
        ),
        ApiRoute::get(
            "/get_server_info",
            server_info::server_info,
            operations::server_info,
        ),
        ApiRoute::get(
            "/model_info",
            server_info::model_info,
            operations::model_info,
        ),
        ApiRoute::get(
            "/get_model_info",
            server_info::model_info,
            operations::model_info,
        ),
        ApiRoute::get("/props", props::props, operations::props),
        ApiRoute::get("/slots", props::slots, operations::slots),
    ]
}

/// Returns the endpoints of the operator.
fn admin_routes() -> Vec<ApiRoute> {
    vec![
        ApiRoute::post(
            "/reset_prefix_cache",
            admin::reset_prefix_cache,
            operations::reset_prefix_cache,
        ),
        ApiRoute::post(
            "/flush_cache",
            admin::reset_prefix_cache,
            operations::reset_prefix_cache,
        ),
        ApiRoute::delete("/v1/requests/{*id}", admin::abort, operations::abort),
    ]
}

/// Returns the router of all endpoints.
pub fn router(app: App) -> Router {
    let mut router = Router::new();
    for route in routes() {
        router = router.route(route.path, route.handler);
    }
    router
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(
            app.clone(),
            authentication::authenticate,
        ))
        .layer(middleware::from_fn_with_state(
            app.clone(),
            head_check::check,
        ))
        .layer(middleware::from_fn_with_state(
            app.clone(),
            status::close_while_draining,
        ))
        .layer(middleware::from_fn(request_id::identify_and_catch_panics))
        .layer(middleware::from_fn(anthropic::error_envelope))
        .layer(middleware::from_fn_with_state(
            app.clone(),
            response_count::count,
        ))
        .layer(middleware::from_fn(request_log::record))
        .with_state(app)
}

async fn unknown_route(request: Request) -> ApiError {
    ApiError::not_found(request.method().as_str(), request.uri().path())
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::method_not_allowed(request.method().as_str(), request.uri().path())
}

/// `GET /openapi.json`: this API as an OpenAPI document.
async fn openapi_document() -> impl IntoResponse {
    static DOCUMENT: LazyLock<Bytes> =
        LazyLock::new(|| openapi::document(&routes()).to_string().into());
    (
        [(header::CONTENT_TYPE, "application/json")],
        DOCUMENT.clone(),
    )
}
