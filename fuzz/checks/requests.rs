//! Sends a body to the router. The first byte chooses the endpoint.

use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use futures_util::StreamExt;
use serde_json::Value;
use tokio::time::timeout;
use tower::ServiceExt;

use super::SERVER;

/// The number of pieces of an answer that are read before the client leaves.
const PIECES: usize = 8;

/// Checks that a body gets an answer, and that an error is the client's, as JSON.
pub fn check(data: &[u8]) {
    let Some((&first, body)) = data.split_first() else {
        return;
    };
    let path = match first % 2 {
        0 => "/v1/chat/completions",
        _ => "/v1/completions",
    };
    let request = Request::post(path).header("content-type", "application/json");
    let request = request.header("host", "localhost");
    let request = request
        .body(Body::from(body.to_vec()))
        .expect("the head is valid");
    let (runtime, server) = &*SERVER;
    let answer = async {
        let answer = server.router.clone().oneshot(request).await;
        let answer = answer.expect("the router never fails");
        let status = answer.status();
        let mut pieces = answer.into_body().into_data_stream();
        let mut text = Vec::new();
        for _ in 0..PIECES {
            match pieces.next().await {
                Some(piece) => text.extend_from_slice(&piece.expect("the answer does not break")),
                None => break,
            }
        }
        (status, text)
    };
    let answer = runtime.block_on(async { timeout(Duration::from_secs(20), answer).await });
    let (status, text) = answer.expect("an answer begins in time");
    assert!(
        status == StatusCode::OK
            || status.is_client_error()
            || status == StatusCode::SERVICE_UNAVAILABLE,
        "{status}: {}",
        String::from_utf8_lossy(&text)
    );
    if status != StatusCode::OK {
        let error: Value = serde_json::from_slice(&text).expect("an error is JSON");
        assert!(error["error"]["message"].is_string(), "{error}");
    }
}
