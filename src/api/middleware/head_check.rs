//! Checks the head of a request before its path and its key matter.
//!
//! The head must be valid, and its host and its origin must be allowed to use the server.
//!
//! Invariant: a response names an origin only if the operator has allowed it.

use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::access::AllowedOrigins;
use crate::api::app::App;
use crate::api::connection::HeadFault;
use crate::api::error::ApiError;

/// The request headers of a preflight request and of its answer that `http` has no name for.
const PRIVATE_NETWORK: (&str, &str) = (
    "access-control-request-private-network",
    "access-control-allow-private-network",
);
/// The response headers that a page may read.
const EXPOSED: &str = "x-request-id, retry-after, retry-after-ms, x-ratelimit-limit-requests, \
                       x-ratelimit-remaining-requests, x-ratelimit-reset-requests, \
                       x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, \
                       x-ratelimit-reset-tokens";
/// How long a browser may remember the answer to a preflight request, in seconds.
const MAX_AGE: &str = "600";

/// Rejects a request whose head is not valid, or that names a host that is not allowed. Answers
/// preflight requests, and adds the headers that let pages of allowed origins read the response.
pub(in crate::api) async fn check(
    State(app): State<App>,
    request: Request,
    next: Next,
) -> Response {
    let access = app.access();
    if let Some(HeadFault(fault)) = request.extensions().get() {
        return ApiError::malformed_request(fault).into_response();
    }
    if let Err(host) = access.check_host(&request) {
        return ApiError::host_not_allowed(&host).into_response();
    }
    let permission = access
        .origins
        .permission(request.headers().get(header::ORIGIN));
    let is_preflight = request.method() == Method::OPTIONS
        && request
            .headers()
            .contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match &permission {
        Some(_) if is_preflight => preflight(&request),
        _ => next.run(request).await,
    };
    let headers = response.headers_mut();
    if let Some(permission) = permission {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, permission);
        let exposed = HeaderValue::from_static(EXPOSED);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    }
    if matches!(&access.origins, AllowedOrigins::Listed(origins) if !origins.is_empty()) {
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    response
}

/// Answers a browser that asks what a page of an allowed origin may send.
fn preflight(request: &Request) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    let methods = HeaderValue::from_static("GET, POST");
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    headers.insert(
        header::ACCESS_CONTROL_MAX_AGE,
        HeaderValue::from_static(MAX_AGE),
    );
    // The page may send what it asks for: SDKs have many headers of their own.
    if let Some(asked) = request
        .headers()
        .get(header::ACCESS_CONTROL_REQUEST_HEADERS)
    {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
    }
    if request.headers().contains_key(PRIVATE_NETWORK.0) {
        headers.insert(PRIVATE_NETWORK.1, HeaderValue::from_static("true"));
    }
    response
}
