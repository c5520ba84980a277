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
    ("seed", r#""x" | 1.5 | [7] | 1e300"#),
    ("frequency_penalty", "3 | -2.5"),
    ("presence_penalty", "-3 | true"),
    ("repetition_penalty", "0 | -1 | 1e300 | 1e-300"),
    (
        "logit_bias",
        r#"[] | {"x": 1} | {"309": 1} | {"-1": 1} | {"5": 101} | {"5": "1"} | {"5": null}"#,
    ),
    (
        "logit_bias",
        r#"{"05": 1} | {"+5": 1} | {" 5": 1} | {"5.0": 1} | {"": 1}"#,
    ),
    (
        "stop",
        r#""" | ["a", ""] | ["a", "b", "c", "d", "e"] | 5 | [5] | [null]"#,
    ),
    ("stop_token_ids", r#"5 | ["5"] | [309] | [-1]"#),
    ("ignore_eos", r#""yes" | 1"#),
    ("stream", r#""true" | 1"#),
    (
        "stream_options",
        r#"{"include_usage": true} | {"continuous_usage_stats": true} | [] | true"#,
    ),
    ("model", "5 | []"),
    ("skip_special_tokens", "0"),
    ("return_token_ids", r#""no""#),
    ("include_stop_str_in_output", "{}"),
    ("n", r#"0 | "2" | 9 | -1 | 1.5 | [2]"#),
    ("truncate_prompt_tokens", r#"0 | -2 | "5" | 1.5"#),
    ("return_tokens_as_token_ids", "1"),
    ("response_format", r#""text" | [] | 5"#),
    ("structured_outputs", "5 | []"),
    (
        "guided_json",
        r#"5 | [] | {"type": "text"} | "{" | {"x-guidance": {}}"#,
    ),
    ("guided_regex", r#"5 | "" | "(a" | "^$""#),
    ("guided_choice", r#"[] | "a" | [5] | [""]"#),
    ("guided_grammar", r#"5 | "" | "a ::= b" | "x""#),
    ("json_schema", r#"5 | [] | "x""#),
    ("regex", r#"5 | "[a""#),
    ("ebnf", r#"5 | "root ::= b""#),
    ("grammar", "5"),
];

/// Fields of OpenAI, vLLM, SGLang and llama.cpp that both endpoints know but do not support, with
/// values, separated by ` | `.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("best_of", r#"3 | 2 | 0 | -1 | "1""#),
    ("suffix", r#""end""#),
    ("functions", "[{}]"),
    ("function_call", r#"{"name": "x"}"#),
    ("structural_tag", r#"{"type": "x"}"#),
    ("audio", r#"{"voice": "x"}"#),
    ("modalities", r#"["text", "audio"]"#),
    ("image_data", r#"["x"]"#),
    ("prompt_embeds", r#""x""#),
    ("logprob_token_ids", "[5]"),
    ("use_beam_search", "true"),
    ("length_penalty", "2"),
    ("chat_template", r#""{{ x }}""#),
    ("separate_reasoning", "false"),
    ("reasoning_format", r#""none""#),
    ("documents", r#"[{"text": "x"}]"#),
    ("priority", "3"),
    ("bad_words", r#"["x"]"#),
    ("allowed_token_ids", "[5]"),
    ("logits_processors", r#"["x"]"#),
    ("custom_logit_processor", r#""x""#),
    ("vllm_xargs", r#"{"x": 1}"#),
    ("verbosity", r#""low""#),
    ("guided_decoding", r#"{"regex": "a+"}"#),
    ("n_cmpl", "2"),
    ("stop_regex", r#""a+""#),
    ("no_stop_trim", "true"),
    ("session_params", r#"{"id": "x"}"#),
    ("lora_path", r#""x""#),
    ("n_predict", "9"),
    ("max_new_tokens", "9"),
    ("n_probs", "3"),
    ("repeat_penalty", "1.1"),
    ("typical_p", "0.9"),
    ("top_n_sigma", "1"),
    ("min_keep", "2"),
    ("mirostat", "2"),
    ("dynatemp_range", "0.5"),
    ("xtc_probability", "0.5"),
    ("dry_multiplier", "0.8"),
    ("samplers", r#"["top_k"]"#),
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
        "invalid_value",
        "messages[1].tool_call_id",
    ),
    (
        r#"{"role": "function", "content": "a"}"#,
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
        "invalid_value",
        "messages[1].tool_calls[0].function",
    ),
    (
        r#"{"role": "assistant", "function_call": {"name": "x"}}"#,
        "unsupported_parameter",
        "messages[1].function_call",
    ),
    (r#"["user", "a"]"#, "invalid_value", "messages[1]"),
];

/// Fields of one endpoint with invalid values, separated by ` | `, and the expected `code`.
const OWN_FIELDS: &[(&str, &str, &str, &str)] = &[
    (
        TEXT,
        "reasoning_effort",
        r#""high""#,
        "unsupported_parameter",
    ),
    (
        TEXT,
        "thinking_token_budget",
        "100",
        "unsupported_parameter",
    ),
    (TEXT, "thinking_budget_tokens", "0", "unsupported_parameter"),
    (CHAT, "reasoning_effort", r#"5 | "much""#, "invalid_value"),
    (
        CHAT,
        "thinking_token_budget",
        r#"-2 | "9" | 0.5"#,
        "invalid_value",
    ),
    (CHAT, "thinking_budget_tokens", "-2 | true", "invalid_value"),
    (
        TEXT,
        "tools",
        r#"[{"type": "function"}]"#,
        "unsupported_parameter",
    ),
    (
        TEXT,
        "tool_choice",
        r#""required" | {"type": "function"}"#,
        "unsupported_parameter",
    ),
    (CHAT, "tools", r#"5 | {} | "x""#, "invalid_value"),
    (
        CHAT,
        "tool_choice",
        r#"5 | [] | "any" | "required""#,
        "invalid_value",
    ),
    (
        TEXT,
        "prompt",
        "null | 5 | {} | [] | [[]] | [309] | [-1] | [1.5] | [1, \"a\"] | [null]",
        "invalid_value",
    ),
    (
        TEXT,
        "add_generation_prompt",
        "false",
        "unsupported_parameter",
    ),
    (
        TEXT,
        "continue_final_message",
        "true",
        "unsupported_parameter",
    ),
    (TEXT, "add_special_tokens", "1", "invalid_value"),
    (CHAT, "add_special_tokens", "true", "unsupported_parameter"),
    (CHAT, "echo", "true", "unsupported_parameter"),
    (TEXT, "echo", "1", "invalid_value"),
    (TEXT, "prompt_logprobs", "21 | -1 | true", "invalid_value"),
    (CHAT, "add_generation_prompt", "0", "invalid_value"),
    (CHAT, "continue_final_message", "\"yes\"", "invalid_value"),
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

impl Malformed {
    fn new(
        path: &'static str,
        body: String,
        code: &'static str,
        param: Option<&'static str>,
    ) -> Malformed {
        Malformed {
            path,
            body,
            status: if code == "model_not_found" { 404 } else { 400 },
            code,
            param,
        }
    }

    /// A valid body in which the field `name` has another value, given as JSON.
    fn field(path: &'static str, name: &'static str, value: &str, code: &'static str) -> Malformed {
        Malformed::new(path, with(path, name, value), code, Some(name))
    }
}

fn malformed() -> Vec<Malformed> {
    let invalid = |body| Malformed::new(TEXT, body, "invalid_json", None);
    let mut cases: Vec<Malformed> = invalid_json().into_iter().map(invalid).collect();
    for path in [CHAT, TEXT] {
        cases.extend(malformed_fields(path));
        cases.extend(repeated_fields(path));
    }
    for (path, name, values, code) in OWN_FIELDS {
        let values = values.split(" | ");
        cases.extend(values.map(|value| Malformed::field(path, name, value, code)));
    }
    for (message, code, param) in MESSAGES {
        let messages = format!("[{{\"role\": \"user\", \"content\": \"a\"}}, {message}]");
        let body = with(CHAT, "messages", &messages);
        cases.push(Malformed::new(CHAT, body, code, Some(param)));
    }
    let (many, tokens) = (many_messages(), many_tokens());
    cases.push(Malformed::field(CHAT, "messages", &many, "invalid_value"));
    cases.push(Malformed::field(
        TEXT,
        "prompt",
        &tokens,
        "context_length_exceeded",
    ));
    cases
}

/// Returns requests with a malformed field that both endpoints have.
fn malformed_fields(path: &'static str) -> Vec<Malformed> {
    let mut cases = Vec::new();
    for (fields, code) in [
        (INVALID_VALUES, "invalid_value"),
        (UNSUPPORTED, "unsupported_parameter"),
    ] {
        for (name, values) in fields {
            let values = values.split(" | ");
            cases.extend(values.map(|value| Malformed::field(path, name, value, code)));
        }
    }
    cases.push(Malformed::field(
        path,
        "model",
        "\"other\"",
        "model_not_found",
    ));
    cases.push(Malformed::field(
        path,
        "stop",
        &long_stop(),
        "invalid_value",
    ));
    for name in ["max_tokens", "max_completion_tokens"] {
        for tokens in ["4096", "1152921504606846976", "1e16", "1e300"] {
            cases.push(Malformed::field(
                path,
                name,
                tokens,
                "context_length_exceeded",
            ));
        }
    }
    cases
}

/// Returns requests in which a field or a key appears twice.
fn repeated_fields(path: &'static str) -> Vec<Malformed> {
    let twice = |name, value: &str| {
        let body = format!("{{\"{name}\": {value}, {}", &with(path, name, value)[1..]);
        Malformed::new(path, body, "invalid_value", Some(name))
    };
    let rest = &valid_body(path).to_string()[1..];
    let bias = format!("{{\"logit_bias\": {{\"5\": 1, \"5\": 1}}, {rest}");
    let role = r#"{"messages": [{"role": "user", "content": "a", "role": "assistant"}]}"#;
    vec![
        twice("n", "1"),
        twice("temperature", "0"),
        twice("logit_bias", "{}"),
        Malformed::new(path, bias, "invalid_value", Some("logit_bias")),
        Malformed::new(
            CHAT,
            role.to_owned(),
            "invalid_value",
            Some("messages[0].role"),
        ),
    ]
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
    let nested = |field: &str| format!("{{\"{field}\": {}{}}}", "[".repeat(200), "]".repeat(200));
    let (deep, deep_unknown) = (nested("prompt"), nested("x"));
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
        "{\"prompt\": \"a\", \"x\": 1e999}",
        "{\"prompt\": \"a\", \"x\": \"\\ud800\"}",
        "{\"prompt\": \"a\", \"x\": [{\"y\": 01}]}",
        &deep,
        &deep_unknown,
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
            "max_tokens",
            json!(1e16),
            "This model's maximum context length is 4096 tokens. Your request needs \
             10000000000000008 tokens: 8 for the prompt and 10000000000000000 for the output. \
             Shorten the prompt or reduce 'max_tokens'.",
        ),
        (
            "logit_bias",
            json!({"01": 1}),
            "'logit_bias' has the key '01'; its keys must be token ids from 0 to 308.",
        ),
        (
            "grammar",
            json!("root ::= \"yes"),
            "'grammar' is no valid GBNF grammar: '\"' is missing before the end of the line.",
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
        "priority": 0, "max_tokens": 2.0, "model": "default", "structured_outputs": {},
        "grammar": "", "regex": "", "ebnf": "", "json_schema": "", "n_predict": -1, "mirostat": 0,
        "repeat_penalty": 1.0, "typical_p": 1, "top_n_sigma": -1, "dry_multiplier": 0.0,
        "xtc_probability": 0, "samplers": [], "stop_regex": [], "no_stop_trim": false,
        "add_special_tokens": false, "bad_words": [], "verbosity": "medium", "functions": [],
        "function_call": "none", "guided_json": null, "stream_options": {},
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

#[tokio::test]
async fn stream_options_that_ask_for_nothing_need_no_stream() {
    let server = Server::new();
    for options in [
        json!({}),
        json!({"include_usage": false}),
        json!({"include_usage": null, "continuous_usage_stats": false}),
    ] {
        let answer = server.complete(json!({"stream_options": options})).await;
        assert_eq!(answer.ok()["object"], "text_completion", "{options}");
    }
}

#[tokio::test]
async fn what_an_unknown_field_holds_does_not_matter() {
    let server = Server::new();
    let expected = server.complete(json!({})).await.ok()["choices"].clone();
    let deep = format!("{}{}", "[".repeat(120), "]".repeat(120));
    for value in [
        "18446744073709551616",
        "-1e-400",
        "{\"x\": 1, \"x\": 2}",
        "\"\\ud83d\\ude00\"",
        &deep,
        &format!("[{}0]", "0, ".repeat(400_000)),
    ] {
        let text = format!("{{\"prompt\": \"Hello\", \"temperature\": 0, \"x\": {value}}}");
        let json = [("content-type", "application/json")];
        let answer = server.send(Method::POST, TEXT, &json, text).await;
        let short: String = value.chars().take(40).collect();
        assert_eq!(answer.ok()["choices"], expected, "{short}");
    }
}

#[tokio::test]
async fn a_body_with_too_many_values_is_rejected() {
    let server = Server::new();
    let with = async |value: &str, count: usize| {
        let values = vec![value; count].join(",");
        let text = format!("{{\"prompt\": \"Hello\", \"max_tokens\": 2, \"x\": [{values}]}}");
        let json = [("content-type", "application/json")];
        server.send(Method::POST, TEXT, &json, text).await
    };
    // The array, the body, the names of three fields and the other two values count too.
    for (value, most) in [("\"\"", 65_529), ("[]", 65_529), ("{\"a\":1}", 21_843)] {
        assert_eq!(with(value, most).await.status, 200, "{value}");
        let rejected = with(value, most + 1).await;
        assert_eq!(rejected.error(), (413, "request_too_large".into(), None));
    }
    let parts = vec![json!({"type": "text", "text": "a"}); 1025];
    let messages = json!([{"role": "user", "content": parts}]);
    let rejected = server.chat(json!({"messages": messages})).await;
    let param = Some("messages[0].content".into());
    assert_eq!(rejected.error(), (400, "invalid_value".into(), param));
}
