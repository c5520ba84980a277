//! `GET /` and `GET /page/…`: the chat page, with its scripts and styles, embedded in the program.
//!
//! Invariant: the page runs only these scripts and loads nothing from other hosts.
//!
//! Invariant: the browser never reads a text as HTML or as a script (`POLICY`), so the output of a
//! model stays text.

use std::hash::{DefaultHasher, Hash, Hasher};

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::api::error::ApiError;

/// What the paths of the page's files begin with. They need no key, because the page asks for it.
pub(super) const FILES_PATH: &str = "/page/";

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
     connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; \
     frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

const INDEX: &str = include_str!("index.html");

/// Declares the files by their paths in this folder.
macro_rules! files {
    ($($path:literal,)*) => {
        /// The files of the page by their paths below `FILES_PATH`.
        const FILES: &[(&str, &str)] = &[$(($path, include_str!($path)),)*];
    };
}

files! {
    "app.js",
    "icon.svg",
    "theme.js",
    "api/problems.js",
    "api/requests.js",
    "api/server_state.js",
    "chat/answer.js",
    "chat/chat_menu.js",
    "chat/chat_view.js",
    "chat/composer.js",
    "chat/conversation.js",
    "chat/examples.js",
    "chat/figures.js",
    "chat/follow.js",
    "chat/highlight.js",
    "chat/markdown.js",
    "chat/markdown_view.js",
    "chat/message_view.js",
    "chat/sessions.js",
    "chat/sidebar.js",
    "chat/status_card.js",
    "chat/store.js",
    "chat/tex.js",
    "chat/transfer.js",
    "elements/announce.js",
    "elements/element.js",
    "elements/numbers.js",
    "embed/embed_view.js",
    "server/chart.js",
    "server/history.js",
    "server/metrics.js",
    "server/server_view.js",
    "settings/decoding.js",
    "settings/sampling.js",
    "settings/settings.js",
    "settings/settings_view.js",
    "style/base.css",
    "style/chat.css",
    "style/composer.css",
    "style/controls.css",
    "style/embed.css",
    "style/layout.css",
    "style/markdown.css",
    "style/server.css",
}

/// `GET /`: the page.
pub(super) async fn show(headers: HeaderMap) -> Response {
    let mut response = respond("index.html", INDEX, &headers);
    let policy = HeaderValue::from_static(POLICY);
    response
        .headers_mut()
        .insert(header::CONTENT_SECURITY_POLICY, policy);
    response
}

/// `GET /page/…`: a file of the page.
pub(super) async fn file(request: Request) -> Response {
    let path = request.uri().path();
    let wanted = path.strip_prefix(FILES_PATH);
    let found = FILES.iter().find(|(name, _)| Some(*name) == wanted);
    match found {
        Some((name, text)) => respond(name, text, request.headers()),
        None => ApiError::not_found(request.method().as_str(), path).into_response(),
    }
}

/// Returns a file, or 304 if the browser has it already.
fn respond(name: &str, text: &'static str, request: &HeaderMap) -> Response {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    let tag = format!("\"{:016x}\"", hasher.finish());
    let is_known = request
        .get(header::IF_NONE_MATCH)
        .is_some_and(|known| known.as_bytes() == tag.as_bytes());
    let headers = [
        (header::CONTENT_TYPE, content_type(name).to_owned()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (header::REFERRER_POLICY, "no-referrer".to_owned()),
        (header::CACHE_CONTROL, "no-cache".to_owned()),
        (header::ETAG, tag),
    ];
    if is_known {
        (StatusCode::NOT_MODIFIED, headers).into_response()
    } else {
        (headers, text).into_response()
    }
}

fn content_type(name: &str) -> &'static str {
    match name.rsplit('.').next() {
        Some("css") => "text/css; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => "text/html; charset=utf-8",
    }
}
