//! The errors of Anthropic's API.
//!
//! Invariant: every error on a path of this API has this form, whichever part of the server found
//! it.

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderName, header};
use axum::middleware::Next;
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::ids::REQUEST_ID;

/// The paths of this API begin with this.
const PATHS: &str = "/v1/messages";
/// The name under which Anthropic's clients look for the id of a request.
const ANTHROPIC_ID: HeaderName = HeaderName::from_static("request-id");

/// The body of an error.
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicErrorBody<'a> {
    /// `error`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// What went wrong.
    error: AnthropicError<'a>,
    /// The id of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<&'a str>,
}

/// What went wrong.
#[derive(Serialize, ToSchema)]
struct AnthropicError<'a> {
    /// The class of the error.
    #[serde(rename = "type")]
    kind: &'static str,
    /// What is wrong, where, and what to do.
    message: &'a str,
}

impl<'a> AnthropicErrorBody<'a> {
    /// Returns the body of `error`.
    pub(super) fn new(error: &'a ApiError, request_id: Option<&'a str>) -> AnthropicErrorBody<'a> {
        AnthropicErrorBody {
            kind: "error",
            error: AnthropicError {
                kind: kind(error.status()),
                message: error.message(),
            },
            request_id,
        }
    }
}

/// Returns the type of an error with this status.
fn kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        504 => "timeout_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

/// Gives every error on a path of this API the form that Anthropic's clients expect, and every
/// response the id of its request under their name.
pub(crate) async fn error_envelope(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let rest = path.strip_prefix(PATHS);
    let is_own = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let mut response = next.run(request).await;
    if !is_own {
        return response;
    }
    let id = response.headers().get(REQUEST_ID).cloned();
    if let Some(error) = response.extensions().get::<ApiError>() {
        let text = id.as_ref().and_then(|id| id.to_str().ok());
        let json = serde_json::to_string(&AnthropicErrorBody::new(error, text));
        let json = json.expect("all keys are strings");
        response.headers_mut().remove(header::CONTENT_LENGTH);
        *response.body_mut() = Body::from(json);
    }
    if let Some(id) = id {
        response.headers_mut().insert(ANTHROPIC_ID, id);
    }
    response
}
