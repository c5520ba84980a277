//! Answers of a wanted structure: in every field that asks for one, whole and streamed.

use serde_json::{Value, json};

use crate::harness::*;

fn flag() -> Value {
    json!({
        "type": "object",
        "properties": {"is_large": {"type": "boolean"}},
        "required": ["is_large"],
        "additionalProperties": false,
    })
}

/// As pydantic writes it: without `additionalProperties`.
fn open_flag() -> Value {
    let mut schema = flag();
    schema
        .as_object_mut()
        .unwrap()
        .remove("additionalProperties");
    schema
}

#[tokio::test]
async fn a_schema_is_open_if_the_request_says_so() {
    let server = Server::new();
    let close = |is_closed: bool| {
        json!({
            "guided_json": open_flag(), "max_tokens": 60,
            "structured_outputs": {"disable_additional_properties": is_closed},
        })
    };
    let content = async |fields: Value| {
        let answer = server.chat(fields).await.ok();
        answer["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    assert!(content(close(true)).await.ends_with("e}"));
    // The test model never stops where it may go on.
    let mut longer = (0..20).map(|seed| merged(close(false), json!({"seed": seed})));
    let mut found = false;
    while !found && let Some(fields) = longer.next() {
        found = content(merged(fields, json!({"temperature": 1})))
            .await
            .contains("e, \"");
    }
    assert!(
        found,
        "no answer has a property that the schema does not list"
    );
}

#[tokio::test]
async fn every_field_gives_an_answer_of_its_structure() {
    let server = Server::new();
    let named = json!({"name": "flag", "strict": true, "schema": flag()});
    let text = flag().to_string();
    let of_schema = json!({"type": "json_schema", "json_schema": named});
    let of_object = json!({"type": "json_object", "schema": flag()});
    let json = ["{\"is_large\": true}", "{\"is_large\": false}"];
    let lark = "start: \"x\" | \"y\"";
    let cases = [
        (json!({"response_format": of_schema}), &json[..]),
        (json!({"response_format": of_object}), &json),
        (json!({"structured_outputs": {"json": flag()}}), &json),
        (json!({"structured_outputs": {"json": text}}), &json),
        (json!({"guided_json": flag()}), &json),
        (json!({"guided_json": open_flag()}), &json),
        (json!({"json_schema": text}), &json),
        (
            json!({"structured_outputs": {"regex": "ab?c"}}),
            &["ac", "abc"],
        ),
        (json!({"guided_regex": "ab?c"}), &["ac", "abc"]),
        (json!({"regex": "ab?c"}), &["ac", "abc"]),
        (
            json!({"structured_outputs": {"choice": ["yes", "no"]}}),
            &["yes", "no"],
        ),
        (json!({"guided_choice": ["yes"]}), &["yes"]),
        (
            json!({"structured_outputs": {"grammar": lark}}),
            &["x", "y"],
        ),
        (json!({"guided_grammar": "root ::= \"x\""}), &["x"]),
        (json!({"ebnf": "root ::= \"x\""}), &["x"]),
        (json!({"grammar": "root ::= \"x\" \"y\"?"}), &["x", "xy"]),
    ];
    for (fields, expected) in cases {
        let whole = server.chat(fields.clone()).await.ok();
        let choice = &whole["choices"][0];
        let content = choice["message"]["content"].as_str().unwrap();
        assert_eq!(choice["finish_reason"], "stop", "{fields}");
        assert!(expected.contains(&content), "{fields}: {content}");
        let stream = merged(fields.clone(), json!({"stream": true}));
        let events = server.chat(stream).await.events();
        assert_eq!(streamed_text(&events), content, "{fields}");
        let two = merged(fields.clone(), json!({"n": 2, "max_tokens": 100}));
        let completion = server.complete(two).await.ok();
        for choice in completion["choices"].as_array().unwrap() {
            assert_eq!(choice["finish_reason"], "stop", "{fields}");
            assert!(
                expected.contains(&choice["text"].as_str().unwrap()),
                "{fields}"
            );
        }
    }
}

#[tokio::test]
async fn a_grammar_that_cannot_be_served_is_an_error_that_names_its_field() {
    let server = Server::new();
    let deep = (0..70).fold(json!({}), |inner, _| json!({"items": inner}));
    let schema = |schema: Value| {
        let named = json!({"schema": schema});
        json!({"response_format": {"type": "json_schema", "json_schema": named}})
    };
    let field = "response_format.json_schema.schema";
    let lark = json!({"grammar": "x: \"a\""});
    for (fields, param) in [
        (schema(json!({"type": "object", "contains": {}})), field),
        (schema(json!({"$ref": "http://example.org/"})), field),
        (schema(deep), field),
        (json!({"response_format": {"type": "json_schema"}}), field),
        (
            json!({"response_format": {"type": "yaml"}}),
            "response_format.type",
        ),
        (json!({"guided_regex": "(?=a)"}), "guided_regex"),
        (
            json!({"guided_regex": "a", "guided_choice": ["a"]}),
            "guided_choice",
        ),
        (
            json!({"structured_outputs": lark}),
            "structured_outputs.grammar",
        ),
        (
            json!({"guided_regex": "a", "ignore_eos": true}),
            "guided_regex",
        ),
    ] {
        let (status, code, named) = server.chat(fields.clone()).await.error();
        assert_eq!((status, code.as_str()), (400, "invalid_value"), "{fields}");
        assert_eq!(named.as_deref(), Some(param), "{fields}");
    }
    let tag = json!({"structured_outputs": {"structural_tag": "x"}});
    let (status, code, _) = server.chat(tag).await.error();
    assert_eq!((status, code.as_str()), (400, "unsupported_parameter"));
}

#[tokio::test]
async fn a_dead_end_is_an_error_of_the_request() {
    let server = Server::new();
    let fields = json!({"guided_regex": "[ab]{2}", "min_tokens": 20});
    let (status, code, _) = server.chat(fields.clone()).await.error();
    assert_eq!((status, code.as_str()), (400, "grammar_dead_end"));
    let stream = merged(fields, json!({"stream": true}));
    let events = server.chat(stream).await.events();
    let code = &events.last().unwrap()["error"]["code"];
    assert_eq!(code, "grammar_dead_end");
    let answer = server.chat(json!({"max_tokens": 3})).await.ok();
    assert_eq!(answer["usage"]["completion_tokens"], 3);
}
