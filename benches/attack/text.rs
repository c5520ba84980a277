//! A tenant that has texts read as fast as they are answered, beside a stream of another tenant.

use std::sync::Arc;

use serde_json::json;

use crate::quiet_tenant::{AttackRequest, attacked};
use crate::{Extent, Findings};

const CONNECTIONS: usize = 3;

/// Sends the worst texts in turn.
pub(crate) async fn run(extent: Extent, model: Option<&str>, findings: &mut Findings) {
    let texts = texts().map(|(name, path, body)| (name, path, Arc::from(body)));
    let request = move |number: u64| {
        let (name, path, body) = &texts[number as usize % texts.len()];
        AttackRequest {
            name,
            path,
            body: Arc::clone(body),
        }
    };
    drop(attacked(extent, model, findings, CONNECTIONS, request).await);
}

/// Returns the name, the path and the body of each text.
fn texts() -> [(&'static str, &'static str, String); 8] {
    const LARGE: usize = 1_900_000;
    let digits = "7".repeat(LARGE);
    let prose = "How is a lake made, and what lives in it? ".repeat(760);
    let messages = json!([{"role": "user", "content": prose}]);
    let objects = format!("[{}]", vec!["{\"\":1}"; LARGE / 9].join(","));
    let call = json!({"id": "a", "type": "function", "function": {
        "name": "f", "arguments": objects}});
    let calls = json!([{"role": "user", "content": "Hi"}, {"role": "assistant",
        "tool_calls": [call]}]);
    [
        (
            "digits",
            "/v1/completions",
            json!({"prompt": digits}).to_string(),
        ),
        (
            "tokenize",
            "/tokenize",
            json!({"prompt": prose}).to_string(),
        ),
        (
            "detokenize",
            "/detokenize",
            json!({"tokens": vec![40; 500]}).to_string(),
        ),
        (
            "count",
            "/v1/messages/count_tokens",
            json!({"messages": messages}).to_string(),
        ),
        (
            "render",
            "/v1/chat/completions/render",
            json!({"messages": messages}).to_string(),
        ),
        (
            "digits in a chat",
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": digits}]}).to_string(),
        ),
        (
            "schema",
            "/v1/completions",
            json!({"prompt": "Hi", "guided_json": objects}).to_string(),
        ),
        (
            "arguments",
            "/v1/chat/completions",
            json!({"messages": calls}).to_string(),
        ),
    ]
}
