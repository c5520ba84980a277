//! The OpenAPI document. The harness checks every answer of every test against it, and the body of
//! every request that was answered 200.

use std::collections::HashSet;

use axum::http::Method;
use serde_json::{Value, json};

use crate::harness::*;
use crate::{CHAT, TEXT};

/// Fields with values that are outside of documented limits, separated by ` | `.
const BEYOND_LIMITS: &[(&str, &str)] = &[
    ("model", "5 | []"),
    ("max_tokens", r#"-1 | "5" | 1.5 | true"#),
    ("min_tokens", "1.5 | false"),
    ("temperature", r#"-0.1 | 2.1 | "hot""#),
    ("top_p", "1.01 | -1"),
    ("top_k", r#"-2 | 1.5 | "all" | 4294967296"#),
    ("min_p", "2 | -0.5"),
    ("seed", r#""x" | 1.5 | [7] | 1e300"#),
    ("frequency_penalty", "3 | -2.5"),
    ("presence_penalty", "-3 | true"),
    ("repetition_penalty", "0 | -1 | 101"),
    (
        "logit_bias",
        r#"[] | {"x": 1} | {"05": 1} | {"5": 101} | {"5": "1"}"#,
    ),
    (
        "stop",
        r#""" | ["a", ""] | ["a", "b", "c", "d", "e"] | 5 | [5]"#,
    ),
    ("stop_token_ids", r#"5 | ["5"] | [-1]"#),
    ("n", r#"0 | "2" | 9"#),
    ("stream", r#""true" | 1"#),
    ("stream_options", r#"[] | true | {"include_usage": 1}"#),
    ("tools", r#"[{"type": 5}] | [5]"#),
    ("best_of", "2"),
    (
        "response_format",
        r#""text" | 5 | {} | {"type": "xml"} | {"type": "json_schema", "json_schema": 5}"#,
    ),
    (
        "response_format",
        r#"{"type": "json_schema", "json_schema": {"schema": 5}}"#,
    ),
    (
        "structured_outputs",
        r#"5 | {"regex": 5} | {"choice": "a"} | {"json": 5} | {"structural_tag": {}}"#,
    ),
    ("suffix", r#""x""#),
    ("guided_regex", "5"),
    ("tool_choice", r#""any" | {"type": "function"} | 5"#),
    ("n_predict", "5"),
    ("top_n_sigma", "1"),
    ("adaptive_target", "0"),
    ("add_special_tokens", "5"),
    ("truncate_prompt_tokens", "-2"),
];

const OF_CHAT: &[(&str, &str)] = &[
    (
        "messages",
        r#"[] | "hi" | null | [{"content": "a"}] | [{"role": "king", "content": "a"}]"#,
    ),
    (
        "messages",
        r#"[{"role": "user", "content": [{"type": "image_url"}]}]"#,
    ),
    ("messages", r#"[{"role": "assistant", "tool_calls": [{}]}]"#),
    ("top_logprobs", "21 | -1"),
    ("chat_template_kwargs", r#"{"x": []} | []"#),
];

const OF_COMPLETIONS: &[(&str, &str)] = &[
    (
        "prompt",
        r#"null | 5 | {} | [] | [[]] | [-1] | [1.5] | [1, "a"] | [null]"#,
    ),
    ("logprobs", "6 | -1 | true"),
];

/// Paths that need the admin key, which `tests/tenants` has.
const ADMIN: &[&str] = &["/reset_prefix_cache", "/flush_cache", "/v1/requests/"];

fn valid_body(path: &str) -> Value {
    match path {
        CHAT | "/chat/completions" => {
            json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2})
        }
        path if path.starts_with("/v1/responses") => {
            json!({"input": "a", "max_output_tokens": 2})
        }
        path if path.starts_with("/v1/messages") => {
            json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2})
        }
        _ => json!({"prompt": "a", "max_tokens": 2}),
    }
}

#[tokio::test]
async fn the_server_refuses_what_the_document_does_not_allow() {
    let (server, document) = (Server::new(), Document::get().await);
    for (path, own) in [(CHAT, OF_CHAT), (TEXT, OF_COMPLETIONS)] {
        assert_eq!(document.fault_of_request(path, &valid_body(path)), None);
        for (field, values) in BEYOND_LIMITS.iter().chain(own) {
            for value in values.split(" | ") {
                let value: Value = serde_json::from_str(value).unwrap();
                let body = merged(valid_body(path), json!({ *field: value }));
                let fault = document.fault_of_request(path, &body);
                let fault = fault.unwrap_or_else(|| panic!("{path}: {body} is documented"));
                let answer = server.post(path, &body).await;
                assert_eq!(answer.error().0, 400, "{path} {body}: {fault}");
            }
        }
        let required = document.json["components"]["schemas"].clone();
        let name = if path == CHAT {
            "ChatCompletionRequest"
        } else {
            "CompletionRequest"
        };
        assert_eq!(required[name]["required"].as_array().unwrap().len(), 1);
        let answer = server.post(path, &json!({})).await;
        assert_eq!(answer.error().1, "invalid_value");
    }
}

#[tokio::test]
async fn the_document_has_every_route_and_no_other() {
    let (server, document) = (Server::new(), Document::get().await);
    let paths = document.json["paths"].as_object().unwrap();
    for (path, methods) in paths {
        let path = path.replace("{id}", "actor").replace("{file}", "app.js");
        for (method, operation) in methods.as_object().unwrap() {
            assert!(operation["summary"].is_string(), "{path}");
            let answer = match method.as_str() {
                "get" => server.get(&path).await,
                _ if ADMIN.iter().any(|admin| path.starts_with(admin)) => {
                    let answer = server.send(Method::POST, &path, &[], "").await;
                    assert_eq!(answer.status, 403, "{method} {path} without an admin key");
                    continue;
                }
                _ if path == "/v1/embeddings" => {
                    let refused = server.post(&path, &json!({"input": "a"})).await;
                    assert_eq!(refused.error().2.as_deref(), Some("model"));
                    continue;
                }
                _ if path == "/generate" => server.post(&path, &json!({"text": "a"})).await,
                _ if path == "/tokenize" => server.post(&path, &json!({"prompt": "a"})).await,
                _ if path == "/detokenize" => server.post(&path, &json!({"tokens": [5]})).await,
                _ => {
                    let body = valid_body(path.trim_end_matches("/render"));
                    server.post(&path, &body).await
                }
            };
            assert_eq!(answer.status, 200, "{method} {path}");
        }
    }
    for path in [
        CHAT,
        TEXT,
        "/v1/models",
        "/health",
        "/ready",
        "/metrics",
        "/openapi.json",
        "/",
    ] {
        assert!(paths.contains_key(path), "{path}");
    }
}

/// JSON Schema allows a name only once in `type`, and validators refuse the whole document.
#[tokio::test]
async fn no_type_is_listed_twice() {
    fn check(schema: &Value) {
        if let Some(types) = schema["type"].as_array() {
            let distinct: HashSet<String> = types.iter().map(Value::to_string).collect();
            assert_eq!(distinct.len(), types.len(), "{schema}");
        }
        match schema {
            Value::Array(items) => items.iter().for_each(check),
            Value::Object(fields) => fields.values().for_each(check),
            _ => {}
        }
    }
    check(&Document::get().await.json);
}

#[tokio::test]
async fn every_field_and_error_is_described() {
    let document = &Document::get().await.json;
    for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
        let Some(fields) = schema["properties"].as_object() else {
            continue;
        };
        for (field, schema) in fields {
            let is_described = schema["description"].is_string() || schema["$ref"].is_string();
            assert!(is_described, "{name}.{field}: {schema}");
        }
    }
    for (status, response) in document["components"]["responses"].as_object().unwrap() {
        let schema = &response["content"]["application/json"]["schema"];
        let codes = &schema["allOf"][1]["properties"]["error"]["properties"]["code"]["enum"];
        assert!(!codes.as_array().unwrap().is_empty(), "{status}");
    }
}
