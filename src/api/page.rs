//! `GET /`: a chat page, one embedded file.
//!
//! Invariant: the page runs no script and loads nothing but its own; what a model says is shown as text.

use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::random_id;

const PAGE: &str = include_str!("page.html");
/// Stands in the page wherever this response's nonce belongs.
const NONCE: &str = "{{nonce}}";

/// The page, with a fresh nonce for its own script and style.
pub(super) async fn show() -> Response {
    let nonce = random_id("");
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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
