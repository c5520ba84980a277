//! `GET /`: the chat page, one embedded HTML file.
//!
//! Invariant: the page runs only its own script and loads nothing from other hosts.
//!
//! Invariant: the page shows the model's output as text, never as HTML.

use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::request_id::random_id;

const PAGE: &str = include_str!("page.html");
/// Marks the places in the page where a response inserts its nonce.
const NONCE: &str = "{{nonce}}";

/// Returns the page, with a new nonce for its script and its style.
pub(super) async fn show() -> Response {
    let nonce = random_id("");
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; \
         connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'"
    );
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (header::REFERRER_POLICY, "no-referrer".to_owned()),
        (header::CACHE_CONTROL, "no-store".to_owned()),
    ];
    (headers, PAGE.replace(NONCE, &nonce)).into_response()
}
