//! Paths, methods, content types and request ids.

use axum::body::Body;
use axum::http::Method;
use serde_json::json;

use crate::TEXT;
use crate::harness::*;

#[tokio::test]
async fn wrong_paths_methods_and_bodies_have_their_own_errors() {
    let server = Server::new();
    let code = |answer: &Answer| (answer.error().0, answer.error().1);
    assert_eq!(
        code(&server.get("/v1/nothing").await),
        (404, "not_found".into())
    );
    assert_eq!(code(&server.get("/v2").await), (404, "not_found".into()));
    let wrong = server.get("/v1/completions").await;
    assert_eq!(code(&wrong), (405, "method_not_allowed".into()));
    assert_eq!(wrong.header("allow"), "POST");
    assert_eq!(
        code(&server.post("/health", &json!({})).await),
        (405, "method_not_allowed".into())
    );
    for kind in ["text/plain", "application/x-www-form-urlencoded", ""] {
        let answer = server
            .send(
                Method::POST,
                TEXT,
                &[("content-type", kind)],
                "{\"prompt\":\"a\"}",
            )
            .await;
        assert_eq!(code(&answer), (415, "unsupported_content_type".into()));
    }
    let json = [("content-type", "application/json")];
    let not_utf8 = server
        .send(Method::POST, TEXT, &json, b"{\"prompt\":\"\xff\"}".to_vec())
        .await;
    assert_eq!(code(&not_utf8), (400, "invalid_json".into()));
    assert!(
        not_utf8.body.contains("line 1 column"),
        "the message does not say where: {}",
        not_utf8.body
    );
    let kind = [("content-type", "Application/JSON; charset=utf-8")];
    assert_eq!(
        server
            .send(Method::POST, TEXT, &kind, "{\"prompt\":\"a\"}")
            .await
            .status,
        200
    );
    let large = format!("{{\"prompt\":\"{}\"}}", "x".repeat(2 << 20));
    let answer = server
        .send(
            Method::POST,
            TEXT,
            &[("content-type", "application/json")],
            large,
        )
        .await;
    assert_eq!(code(&answer), (413, "request_too_large".into()));
}

#[tokio::test]
async fn every_response_has_a_request_id() {
    let server = Server::new();
    let with = async |id: &str| {
        server
            .send(
                Method::GET,
                "/health",
                &[("x-request-id", id)],
                Body::empty(),
            )
            .await
    };
    assert_eq!(
        with("my request, 7").await.header("x-request-id"),
        "my request, 7"
    );
    for bad in ["", "\u{e9}", "a\tb", &"x".repeat(129)] {
        assert!(
            with(bad).await.header("x-request-id").starts_with("req-"),
            "{bad:?}"
        );
    }
    let own = server
        .get("/v1/nothing")
        .await
        .header("x-request-id")
        .to_owned();
    assert_ne!(own, server.get("/v1/nothing").await.header("x-request-id"));
}
