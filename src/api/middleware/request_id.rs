//! Ids of requests and responses, and the middleware that gives each response its `x-request-id`.

use std::hash::{BuildHasher, RandomState};
use std::panic::AssertUnwindSafe;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use tracing::Instrument;

use super::request_log::RequestLog;
use super::trace_context::TraceContext;
use crate::api::error::ApiError;

pub(in crate::api) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const MAX_REQUEST_ID_BYTES: usize = 128;

/// The id of a request, among its extensions.
#[derive(Clone)]
pub(super) struct RequestId(pub(in crate::api) String);

/// Gives each response its `x-request-id`, and turns a handler's panic into an error response.
pub(in crate::api) async fn identify_and_catch_panics(
    mut request: Request,
    next: Next,
) -> Response {
    let id = request_id(&request);
    let text = id.to_str().unwrap_or_default().to_owned();
    let trace = TraceContext::read(request.headers());
    let tenant = tracing::field::Empty; // The authentication fills it in.
    let trace_id = trace.as_ref().map(|trace| trace.trace_id.as_str());
    let span = tracing::info_span!("request", id = text, trace_id, tenant);
    if let Some(log) = request.extensions().get::<RequestLog>() {
        log.identify(&text, trace);
    }
    request.extensions_mut().insert(RequestId(text));
    let result = AssertUnwindSafe(next.run(request))
        .catch_unwind()
        .instrument(span)
        .await;
    let mut response =
        result.unwrap_or_else(|_| ApiError::internal("a handler panicked").into_response());
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// Returns the client's own id if it is short and printable, otherwise a new id.
///
/// The server echoes and logs the id. The engine never sees it. The operator can end a request by
/// it, and with it all others that have the same.
fn request_id(request: &Request) -> HeaderValue {
    let printable = |id: &&HeaderValue| {
        let bytes = id.as_bytes();
        (1..=MAX_REQUEST_ID_BYTES).contains(&bytes.len())
            && bytes.iter().all(|byte| (b' '..=b'~').contains(byte))
    };
    match request.headers().get(REQUEST_ID).filter(printable) {
        Some(id) => id.clone(),
        None => HeaderValue::try_from(random_id("req-")).expect("hexadecimal digits are printable"),
    }
}

/// Returns a unique id that starts with `prefix`.
pub(in crate::api) fn random_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random_u64(), random_u64())
}

/// Returns a random number. Not for secrets.
///
/// The standard library's hash keys are random for each thread and differ from call to call.
pub(in crate::api) fn random_u64() -> u64 {
    RandomState::new().hash_one(0)
}

/// Returns the current time in Unix seconds.
pub(in crate::api) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
