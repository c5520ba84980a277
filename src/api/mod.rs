//! The HTTP API: OpenAI's endpoints in front of the engine.
//!
//! Invariant: only this module knows HTTP and the JSON of requests and answers.
//!
//! Invariant: this module limits bodies and connections; the engine and the scheduler decide which
//! request runs.
//!
//! Invariant: a client that disconnects cancels its request, because the server then drops the
//! request's handler, and the handler owns the request's `EventStream`.

mod admin;
mod anthropic;
mod app;
mod body;
mod connection;
mod error;
mod fields;
mod generation;
mod ids;
mod llama_server;
mod middleware;
mod openai;
mod openapi;
mod page;
mod respond;
mod sglang;
mod status;
mod tokenize;

use std::sync::LazyLock;

use axum::Router;
use axum::body::Bytes;
use axum::extract::Request;
use axum::http::header;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::IntoResponse;

use llama_server::{completion, props};
use middleware::{authentication, head_check, request_id, request_log};
use openai::{chat, completions, embeddings, render, responses};
use openapi::{ApiRoute, operations};
use sglang::{generate, loads, server_info};

pub use app::{App, DiffusionCard, EmbeddingShape, ModelCard, Serving};
pub use connection::ConnectionLimits;
pub use connection::listener::{serve, serve_all};
pub use error::ApiError;
pub use fields::sampling_defaults::SamplingDefaults;
pub use middleware::access::{Access, AllowedHosts, AllowedOrigins, HostName, parse_origin};

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
        ApiRoute::post("/v1/chat/completions", chat::chat, chat::describe),
        // Clients whose base URL lacks `/v1` get what llama-server answers.
        ApiRoute::post("/chat/completions", chat::chat, chat::describe),
        ApiRoute::post(
            "/completions",
            completion::completion,
            operations::llama_completion,
        ),
        ApiRoute::post(
            "/v1/completions",
            completions::completions,
            completions::describe,
        ),
        ApiRoute::post(
            "/v1/chat/completions/render",
            render::render_chat,
            operations::render_chat,
        ),
        ApiRoute::post(
            "/v1/completions/render",
            render::render_completion,
            operations::render_completion,
        ),
        ApiRoute::post(
            "/v1/embeddings",
            embeddings::embeddings,
            operations::embeddings,
        ),
        ApiRoute::post(
            "/completion",
            completion::completion,
            operations::llama_completion,
        ),
        ApiRoute::post("/generate", generate::generate, operations::generate),
        ApiRoute::post("/v1/responses", responses::create, responses::describe),
        ApiRoute::post(
            "/v1/responses/input_tokens",
            responses::input_tokens,
            responses::describe_count,
        ),
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
        ApiRoute::get("/models", status::models, operations::models),
        ApiRoute::get("/v1/models/{*id}", status::model, operations::model),
        ApiRoute::get("/health", status::health, operations::health),
        ApiRoute::get("/ready", status::ready, operations::ready),
        ApiRoute::get("/version", status::version, operations::version),
        ApiRoute::get("/metrics", status::metrics, operations::metrics),
        ApiRoute::get(
            "/metrics/recent",
            status::recent_metrics,
            operations::recent_metrics,
        ),
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
        .layer(from_fn_with_state(
            app.clone(),
            authentication::authenticate,
        ))
        .layer(from_fn_with_state(app.clone(), head_check::check))
        .layer(from_fn_with_state(
            app.clone(),
            status::close_while_draining,
        ))
        .layer(from_fn(request_id::identify_and_catch_panics))
        .layer(from_fn(anthropic::error_envelope))
        .layer(from_fn_with_state(app.clone(), request_log::count))
        .layer(from_fn_with_state(app.clone(), request_log::record))
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
