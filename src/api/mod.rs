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
mod app;
mod authentication;
mod body;
mod body_limits;
mod chat;
mod choices;
mod completions;
mod connection;
mod endpoint;
mod envelope;
mod error;
mod fields;
mod generation;
mod head_check;
mod json;
mod listener;
mod logprobs;
mod messages;
mod open_connections;
mod page;
mod params;
mod parsed_request;
mod rate_headers;
mod request_id;
mod respond;
mod sse;
mod status;
mod template_kwargs;
mod token_ids;
mod unsupported;

use axum::Router;
use axum::extract::Request;
use axum::middleware;
use axum::routing::{get, post};

use chat::ChatEndpoint;
use completions::CompletionEndpoint;
use respond::respond;

pub use access::{Access, AllowedHosts, AllowedOrigins, HostName, parse_origin};
pub use app::{App, ModelCard, Serving};
pub use connection::ConnectionLimits;
pub use error::ApiError;
pub use listener::{serve, serve_all};

/// Returns the router of all endpoints.
pub fn router(app: App) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(respond::<ChatEndpoint>))
        .route("/v1/completions", post(respond::<CompletionEndpoint>))
        .route("/v1/models", get(status::models))
        .route("/v1/models/{*id}", get(status::model))
        .route("/health", get(status::health))
        .route("/ready", get(status::ready))
        .route("/metrics", get(status::metrics))
        .route("/", get(page::show))
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
        .with_state(app)
}

async fn unknown_route(request: Request) -> ApiError {
    ApiError::not_found(request.method().as_str(), request.uri().path())
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::method_not_allowed(request.method().as_str(), request.uri().path())
}
