//! The chat page.

use crate::harness::*;

#[tokio::test]
async fn the_page_runs_only_its_own_script() {
    let server = Server::new();
    let page = server.get("/").await;
    assert_eq!(page.header("content-type"), "text/html; charset=utf-8");
    let policy = page.header("content-security-policy").to_owned();
    let nonce = policy
        .split("script-src 'nonce-")
        .nth(1)
        .unwrap()
        .split('\'')
        .next()
        .unwrap()
        .to_owned();
    assert_eq!(page.body.matches(&format!("nonce=\"{nonce}\"")).count(), 2);
    assert!(!page.body.contains("{{nonce}}"));
    assert!(
        !server.get("/").await.body.contains(&nonce),
        "each response has its own nonce"
    );
    assert!(policy.starts_with("default-src 'none';") && !policy.contains("unsafe"));
    for outside in ["http://", "https://", "src=", "innerHTML", "onclick"] {
        assert!(!page.body.contains(outside), "{outside}");
    }
}

#[tokio::test]
async fn the_page_shows_reasoning() {
    let page = Server::new().get("/").await.body;
    assert!(page.contains("delta?.reasoning_content"));
    assert!(page.contains("showReasoning(paragraph, reasoning)"));
}

#[tokio::test]
async fn the_page_says_when_a_chat_is_full() {
    let page = Server::new().get("/").await.body;
    assert!(page.contains("finish_reason === 'length'"));
    assert!(page.contains("error.code === 'context_length_exceeded'"));
    assert_eq!(page.matches("start a new chat").count(), 2);
}

#[tokio::test]
async fn the_page_says_what_is_wrong_with_the_users_key() {
    let page = Server::new().get("/").await.body;
    for text in [
        "requires an API key. Enter yours",
        "API key is not valid",
        "may not use the model",
    ] {
        assert!(page.contains(text), "{text}");
    }
}
