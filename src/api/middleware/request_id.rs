//! Gives each response its `x-request-id`.

use std::panic::AssertUnwindSafe;

use axum::extract::Request;
use axum::http::HeaderValue;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use tracing::Instrument;

use super::request_log::RequestLog;
use super::trace_context;
use crate::api::error::ApiError;
use crate::api::ids::{REQUEST_ID, random_id};

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
    let trace = trace_context::read(request.headers());
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
