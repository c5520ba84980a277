//! Malformed requests with their expected errors, and unsupported fields with harmless values.

use axum::http::Method;
use serde_json::{Value, json};

use crate::harness::*;
use crate::{CHAT, TEXT};

/// A malformed request and its expected error.
struct Malformed {
    path: &'static str,
    body: String,
    status: u16,
    code: &'static str,
    param: Option<&'static str>,
}

/// Fields of both endpoints with invalid values, separated by ` | `.
const INVALID_VALUES: &[(&str, &str)] = &[
    ("max_tokens", r#"0 | -1 | "5" | 1.5 | true | [] | {}"#),
    ("max_completion_tokens", "0 | -5"),
    ("min_tokens", "-1 | 99 | false"),
    ("temperature", r#"-0.1 | 2.1 | "hot" | [1]"#),
    ("top_p", "1.01 | -1 | []"),
    ("top_k", r#"-2 | 1.5 | "all""#),
    ("min_p", "2 | -0.5"),
    ("seed", r#""x" | 1.5 | [7]"#),
    ("frequency_penalty", "3 | -2.5"),
    ("presence_penalty", "-3 | true"),
    ("repetition_penalty", "0 | -1 | 1e300 | 1e-300"),
    (
        "logit_bias",
        r#"[] | {"x": 1} | {"309": 1} | {"-1": 1} | {"5": 101} | {"5": "1"} | {"5": null}"#,
    ),
    (
        "stop",
        r#""" | ["a", ""] | ["a", "b", "c", "d", "e"] | 5 | [5] | [null]"#,
    ),
    ("stop_token_ids", r#"5 | ["5"] | [309] | [-1]"#),
    ("ignore_eos", r#""yes" | 1"#),
    ("stream", r#""true" | 1"#),
    ("stream_options", r#"{"include_usage": true}"#),
    ("model", "5 | []"),
    ("skip_special_tokens", "0"),
    ("return_token_ids", r#""no""#),
    ("include_stop_str_in_output", "{}"),
    ("n", r#"0 | "2" | 9 | -1 | 1.5 | [2]"#),
];

/// Fields that both endpoints know but do not support, with values, separated by ` | `.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("best_of", r#"3 | 2 | 0 | -1 | "1""#),
    ("echo", "true"),
    ("suffix", r#""end""#),
    ("tools", r#"[{"type": "function"}]"#),
    ("tool_choice", r#""required" | {"type": "function"}"#),
    ("functions", "[{}]"),
    (
        "response_format",
        r#"{"type": "json_object"} | {"type": "json_schema"} | "text""#,
    ),
    ("structured_outputs", r#"{"regex": "a"}"#),
    ("guided_json", "{}"),
    ("audio", r#"{"voice": "x"}"#),
    ("modalities", r#"["text", "audio"]"#),
    ("prompt_logprobs", "1"),
    ("use_beam_search", "true"),
    ("chat_template", r#""{{ x }}""#),
    ("add_generation_prompt", "false"),
    ("continue_final_message", "true"),
    ("priority", "3"),
    ("bad_words", r#"["x"]"#),
    ("reasoning_effort", r#""high""#),
];

/// Invalid messages as JSON, each with the expected `code` and `param`. A valid message precedes
/// each of them.
const MESSAGES: &[(&str, &str, &str)] = &[
    (r#""hi""#, "invalid_value", "messages[1]"),
    (r#"{"content": "a"}"#, "invalid_value", "messages[1].role"),
    (
        r#"{"role": "king", "content": "a"}"#,
        "invalid_value",
        "messages[1].role",
    ),
    (
        r#"{"role": 5, "content": "a"}"#,
        "invalid_value",
        "messages[1].role",
    ),
    (
        r#"{"role": "tool", "content": "a"}"#,
        "unsupported_parameter",
        "messages[1].role",
    ),
    (
        r#"{"role": "user"}"#,
        "invalid_value",
        "messages[1].content",
    ),
    (
        r#"{"role": "user", "content": null}"#,
        "invalid_value",
        "messages[1].content",
    ),
    (
        r#"{"role": "user", "content": 5}"#,
        "invalid_value",
        "messages[1].content",
    ),
    (
        r#"{"role": "user", "content": [{"type": "image_url"}]}"#,
        "unsupported_parameter",
        "messages[1].content[0].type",
    ),
    (
        r#"{"role": "user", "content": [{"text": "a"}]}"#,
        "invalid_value",
        "messages[1].content[0].type",
    ),
    (
        r#"{"role": "user", "content": [{"type": "text"}]}"#,
        "invalid_value",
        "messages[1].content[0].text",
    ),
    (
        r#"{"role": "user", "content": ["a"]}"#,
        "invalid_value",
        "messages[1].content[0].type",
    ),
    (
        r#"{"role": "assistant", "tool_calls": [{}]}"#,
        "unsupported_parameter",
        "messages[1].tool_calls",
    ),
];

/// Fields of one endpoint with invalid values, separated by ` | `, and the expected `code`.
const OWN_FIELDS: &[(&str, &str, &str, &str)] = &[
    (
        TEXT,
        "prompt",
        "null | 5 | {} | [] | [[]] | [309] | [-1] | [1.5] | [1, \"a\"] | [null]",
        "invalid_value",
    ),
    (
        TEXT,
        "prompt",
        r#"["a", "b"] | [[5], [6]] | ["a", 5]"#,
        "unsupported_parameter",
    ),
    (TEXT, "logprobs", "6 | -1 | true", "invalid_value"),
    (
        CHAT,
        "messages",
        r#"null | [] | "hi" | {}"#,
        "invalid_value",
    ),
    (CHAT, "logprobs", "3 | \"yes\"", "invalid_value"),
    (CHAT, "top_logprobs", "2 | 21 | -1", "invalid_value"),
];

fn valid_body(path: &str) -> Value {
    match path {
        CHAT => json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
        _ => json!({"prompt": "a", "max_tokens": 9}),
    }
}

/// Returns a valid body in which one field has another value, given as JSON.
fn with(path: &str, name: &str, value: &str) -> String {
    let value: Value =
        serde_json::from_str(value).unwrap_or_else(|_| panic!("{value} is not JSON"));
    merged(valid_body(path), json!({ name: value })).to_string()
}

fn malformed() -> Vec<Malformed> {
    let mut cases = Vec::new();
    let mut add = |path, body: String, code, param| {
        let status = if code == "model_not_found" { 404 } else { 400 };
        cases.push(Malformed {
            path,
            body,
            status,
            code,
            param,
        });
    };
    for body in invalid_json() {
        add(TEXT, body, "invalid_json", None);
    }
    for path in [CHAT, TEXT] {
        for (fields, code) in [
            (INVALID_VALUES, "invalid_value"),
            (UNSUPPORTED, "unsupported_parameter"),
        ] {
            for (name, values) in fields {
                values
                    .split(" | ")
                    .for_each(|value| add(path, with(path, name, value), code, Some(name)));
            }
        }
        add(
            path,
            with(path, "model", "\"other\""),
            "model_not_found",
            Some("model"),
        );
        add(
            path,
            with(path, "stop", &long_stop()),
            "invalid_value",
            Some("stop"),
        );
        let param = if path == CHAT { "messages" } else { "prompt" };
        for max_tokens in ["4096", "1152921504606846976"] {
            add(
                path,
                with(path, "max_tokens", max_tokens),
                "context_length_exceeded",
                Some(param),
            );
        }
    }
    for (path, name, values, code) in OWN_FIELDS {
        values
            .split(" | ")
            .for_each(|value| add(path, with(path, name, value), code, Some(name)));
    }
    for (message, code, param) in MESSAGES {
        let messages = format!("[{{\"role\": \"user\", \"content\": \"a\"}}, {message}]");
        add(CHAT, with(CHAT, "messages", &messages), code, Some(param));
    }
    add(
        CHAT,
        with(CHAT, "messages", &many_messages()),
        "invalid_value",
        Some("messages"),
    );
    add(
        TEXT,
        with(TEXT, "prompt", &many_tokens()),
        "context_length_exceeded",
        Some("prompt"),
    );
    cases
}

fn long_stop() -> String {
    json!("x".repeat(257)).to_string()
}

fn many_tokens() -> String {
    json!(vec![5; 4096]).to_string()
}

fn many_messages() -> String {
    json!(vec![json!({"role": "user", "content": "a"}); 1025]).to_string()
}

fn invalid_json() -> Vec<String> {
    let deep = format!("{{\"prompt\": {}{}}}", "[".repeat(200), "]".repeat(200));
    let texts = [
        "",
        " ",
        "{",
        "}",
        "[]",
        "null",
        "7",
        "\"text\"",
        "{\"prompt\": \"a\",}",
        "{\"prompt\": 'a'}",
        "{\"prompt\": \"a\"} x",
        "{\"prompt\": \"\\ud800\"}",
        "{\"prompt\": NaN}",
        "{\"temperature\": 1e999}",
        "\u{0}",
        "{\"prompt\": \"a\u{1}b\"}",
        &deep,
    ];
    texts.map(str::to_owned).to_vec()
}

#[tokio::test]
async fn malformed_requests_get_a_typed_error_and_do_not_change_other_answers() {
    let server = Server::new();
    let canary = async || {
        server
            .complete(json!({"prompt": "canary", "max_tokens": 8}))
            .await
            .ok()["choices"]
            .clone()
    };
    let expected = canary().await;
    let cases = malformed();
    assert!(cases.len() > 150, "{}", cases.len());
    for Malformed {
        path,
        body,
        status,
        code,
        param,
    } in cases
    {
        let kind = [("content-type", "application/json")];
        let answer = server.send(Method::POST, path, &kind, body.clone()).await;
        let short: String = body.chars().take(120).collect();
        let expected_error = (status, code.to_owned(), param.map(str::to_owned));
        assert_eq!(
            answer.error(),
            expected_error,
            "{path} {short}: {}",
            answer.body
        );
        assert_eq!(canary().await, expected, "after {path} {short}");
    }
}

#[tokio::test]
async fn an_error_message_says_what_is_wrong_and_what_the_server_got() {
    let server = Server::new();
    for (field, value, expected) in [
        (
            "stop",
            json!(["a", "b", "c", "d", "e", "f", "g"]),
            "'stop' may contain at most 4 strings; got 7.",
        ),
        ("n", json!(9), "'n' must be from 1 to 8; got 9."),
        (
            "temperature",
            json!("hot"),
            "'temperature' must be a number; got the string 'hot'.",
        ),
        (
            "model",
            json!("other"),
            "The model 'other' does not exist. This server serves 'actor'.",
        ),
        (
            "max_tokens",
            json!(4096),
            "This model's maximum context length is 4096 tokens. Your request needs 4104 tokens: \
             8 for the prompt and 4096 for the output. Shorten the prompt or reduce 'max_tokens'.",
        ),
        (
            "echo",
            json!(true),
            "'echo' does not support the value 'true': this server does not echo the prompt. \
             Omit the field.",
        ),
    ] {
        let prompt = vec![20; 8];
        let body = json!({"prompt": prompt, field: value});
        let answer = server.post(TEXT, &body).await;
        let error: Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!(error["error"]["message"], expected, "{field}");
    }
}

#[tokio::test]
async fn null_means_absent_and_harmless_values_are_accepted() {
    let server = Server::new();
    let names = [
        "model",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "n",
        "logit_bias",
        "stream",
        "stream_options",
        "tools",
        "tool_choice",
        "response_format",
        "user",
        "metadata",
        "logprobs",
        "echo",
        "suffix",
    ];
    for name in names {
        server.complete(json!({name: null})).await.ok();
        let mut short = json!({"max_tokens": 2});
        if name != "max_tokens" {
            short[name] = Value::Null;
        }
        server.chat(short).await.ok();
    }
    let harmless = json!({
        "n": 1, "best_of": 1, "echo": false, "suffix": "", "tools": [], "tool_choice": "auto",
        "top_k": -1, "stop": [], "response_format": {"type": "text"}, "modalities": ["text"],
        "metadata": {"a": "b"}, "user": "u", "store": true, "parallel_tool_calls": true,
        "priority": 0, "max_tokens": 2.0, "model": "default",
    });
    assert_eq!(
        server.chat(harmless).await.ok()["usage"]["completion_tokens"],
        2
    );
    let both = server
        .chat(json!({"max_tokens": 9, "max_completion_tokens": 2, "model": "gpt-x"}))
        .await
        .ok();
    assert_eq!(both["usage"]["completion_tokens"], 2);
}

#[tokio::test]
async fn a_repetition_penalty_that_could_make_logits_infinite_is_rejected() {
    let server = Server::new();
    for penalty in [1e-40, 0.0, 0.009, 100.1] {
        let rejected = server
            .complete(json!({"repetition_penalty": penalty}))
            .await;
        let param = Some("repetition_penalty".into());
        assert_eq!(rejected.error(), (400, "invalid_value".into(), param));
    }
    for penalty in [0.01, 100.0] {
        server
            .complete(json!({"repetition_penalty": penalty}))
            .await
            .ok();
    }
}
