//! OpenAI's responses: whole, streamed, and their errors.

use axum::Router;
use serde_json::{Value, json};

use crate::harness::*;
use crate::speaker::{self, post};

const RESPONSES: &str = "/v1/responses";
const TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\
    {% endfor %}assistant:";
const CALL: &str = "<tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"zone\": \"UTC\"}}\n\
    </tool_call>";

fn say(answer: &str) -> Router {
    speaker::start(TOKENIZER, TEMPLATE, VOCABULARY, |tokenizer| {
        tokenizer.encode_prompt(answer).unwrap().split_off(1)
    })
}

fn body(more: Value) -> Value {
    merged(json!({"input": "Why?", "temperature": 0}), more)
}

fn tools() -> Value {
    let zone = json!({"enum": ["UTC", "CET"]});
    let schema = json!({"type": "object", "properties": {"zone": zone}, "required": ["zone"]});
    json!({"tools": [{"type": "function", "name": "get_time", "parameters": schema}]})
}

/// Returns the events of a stream, whose names must be their types, in the order of their numbers.
fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.body);
    let frames = answer.body.strip_suffix("\n\n").unwrap().split("\n\n");
    let event = |(index, frame): (usize, &str)| {
        let (name, data) = frame.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: ").unwrap(), data["type"]);
        assert_eq!(data["sequence_number"], index);
        data
    };
    frames.enumerate().map(event).collect()
}

/// Replaces what differs between two answers.
fn plain(mut response: Value) -> Value {
    for name in ["id", "created_at", "usage"] {
        response[name] = Value::Null;
    }
    for item in response["output"].as_array_mut().unwrap() {
        for (name, prefix) in [("id", ""), ("call_id", "call_")] {
            if let Some(id) = item.get_mut(name) {
                assert!(id.as_str().unwrap().starts_with(prefix));
                *id = Value::Null;
            }
        }
    }
    response
}

/// Returns a response, whole and streamed, which must be equal. The deltas must be its texts.
async fn both(router: &Router, more: Value) -> Value {
    let whole = plain(post(router, RESPONSES, &body(more.clone())).await.ok());
    let stream = body(merged(more, json!({"stream": true})));
    let events = events(&post(router, RESPONSES, &stream).await);
    let last = events.last().unwrap();
    assert_eq!(plain(last["response"].clone()), whole);
    let status = whole["status"].as_str().unwrap();
    assert_eq!(last["type"], format!("response.{status}"));
    let kinds: Vec<&str> = events
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds[..2], ["response.created", "response.in_progress"]);
    for (index, item) in whole["output"].as_array().unwrap().iter().enumerate() {
        let own = |event: &&Value| event["output_index"] == index;
        let own: Vec<&Value> = events.iter().filter(own).collect();
        let text: String = own
            .iter()
            .filter_map(|event| event["delta"].as_str())
            .collect();
        let expected = match item["type"].as_str().unwrap() {
            "function_call" => &item["arguments"],
            _ => &item["content"][0]["text"],
        };
        assert_eq!(*expected, text);
        let kinds = own.iter().map(|event| event["type"].as_str().unwrap());
        let mut kinds: Vec<&str> = kinds
            .map(|kind| kind.trim_start_matches("response."))
            .collect();
        kinds.dedup();
        let order: &[&str] = match item["type"].as_str().unwrap() {
            "message" => &[
                "output_item.added",
                "content_part.added",
                "output_text.delta",
                "output_text.done",
                "content_part.done",
                "output_item.done",
            ],
            "reasoning" => &[
                "output_item.added",
                "reasoning_text.delta",
                "reasoning_text.done",
                "output_item.done",
            ],
            _ => &[
                "output_item.added",
                "function_call_arguments.delta",
                "function_call_arguments.done",
                "output_item.done",
            ],
        };
        assert_eq!(kinds, order);
    }
    whole
}

#[tokio::test]
async fn a_response_has_a_message_and_repeats_its_request() {
    let more = json!({"instructions": "Be kind.", "max_output_tokens": 50, "store": true});
    let response = both(&say("Grüße, you."), more).await;
    assert_eq!(response["object"], "response");
    assert_eq!(response["status"], "completed");
    let text =
        json!({"type": "output_text", "text": "Grüße, you.", "annotations": [], "logprobs": []});
    let message = json!({
        "id": null, "type": "message", "status": "completed", "role": "assistant",
        "content": [text],
    });
    assert_eq!(response["output"], json!([message]));
    assert_eq!(response["instructions"], "Be kind.");
    assert_eq!(response["max_output_tokens"], 50);
    assert_eq!(response["store"], false);
    let cut = both(&say("one two three"), json!({"max_output_tokens": 2})).await;
    assert_eq!(cut["status"], "incomplete");
    assert_eq!(cut["incomplete_details"]["reason"], "max_output_tokens");
    let usage = post(&say("x"), RESPONSES, &body(json!({}))).await.ok()["usage"].clone();
    assert_eq!(usage["output_tokens"], 2, "{usage}");
}

#[tokio::test]
async fn calls_and_reasoning_are_items() {
    let router = say(&format!("Hm.\n{CALL}"));
    let response = both(&router, tools()).await;
    assert_eq!(response["output"][0]["content"][0]["text"], "Hm.");
    let call = &response["output"][1];
    assert_eq!(
        (&call["type"], &call["name"]),
        (&json!("function_call"), &json!("get_time"))
    );
    assert_eq!(call["arguments"], "{\"zone\": \"UTC\"}");
    let named = json!({"tool_choice": {"type": "function", "name": "get_time"}});
    let response = both(&say("Hello!"), merged(tools(), named)).await;
    assert_eq!(response["output"][0]["type"], "function_call");
    assert_eq!(response["tool_choice"]["name"], "get_time");
    let template = format!("{TEMPLATE}{{# <think></think> #}}");
    let router = speaker::start(TOKENIZER, &template, VOCABULARY, |tokenizer| {
        let text = "<think>mumble</think>done";
        tokenizer.encode_prompt(text).unwrap().split_off(1)
    });
    let response = both(&router, json!({})).await;
    assert_eq!(response["output"][0]["content"][0]["text"], "mumble");
    assert_eq!(response["output"][1]["content"][0]["text"], "done");
}

#[tokio::test]
async fn text_follows_its_format() {
    let schema = json!({
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "name": "x", "schema": schema, "strict": true});
    let response = both(&say("Hello"), json!({"text": {"format": format}})).await;
    let text = response["output"][0]["content"][0]["text"]
        .as_str()
        .unwrap();
    let value: Value = serde_json::from_str(text).unwrap();
    assert!(value["a"].is_boolean(), "{text}");
}

#[tokio::test]
async fn items_become_the_messages_of_a_chat() {
    let router = say("x");
    let items = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{\"x\": 1}"},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
        {
            "type": "function_call_output", "call_id": "2",
            "output": [{"type": "input_text", "text": "d"}],
        },
    ]);
    let more = json!({"input": items, "instructions": "s"});
    let response = post(&router, RESPONSES, &body(more)).await.ok();
    let call = |id: &str, name: &str, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        json!({"id": id, "function": function})
    };
    let calls = [call("1", "f", "{}"), call("2", "g", "{\"x\": 1}")];
    let chat = json!({"messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "c"},
        {"role": "tool", "tool_call_id": "2", "content": "d"},
    ]});
    let tokens = post(&router, "/tokenize", &chat).await.ok();
    assert_eq!(response["usage"]["input_tokens"], tokens["count"]);
}

#[tokio::test]
async fn errors_name_the_field() {
    let router = say("x");
    let item = |item: Value| json!({"input": [item]});
    for (more, code, param) in [
        (json!({"input": []}), "invalid_value", "input"),
        (json!({"input": null}), "invalid_value", "input"),
        (
            json!({"input": [{"content": "a"}]}),
            "invalid_value",
            "input[0].role",
        ),
        (
            item(json!({"type": "function_call", "call_id": "1"})),
            "invalid_value",
            "input[0].name",
        ),
        (
            item(json!({"type": "item_reference", "id": "x"})),
            "unsupported_parameter",
            "input[0].type",
        ),
        (
            item(json!({"role": "user", "content": [{"type": "input_image"}]})),
            "unsupported_parameter",
            "input[0].content[0].type",
        ),
        (
            json!({"tools": [{"type": "function", "name": "a b"}]}),
            "invalid_value",
            "tools[0].name",
        ),
        (
            json!({"previous_response_id": "resp_1"}),
            "unsupported_parameter",
            "previous_response_id",
        ),
        (
            json!({"background": true}),
            "unsupported_parameter",
            "background",
        ),
        (
            json!({"truncation": "auto"}),
            "unsupported_parameter",
            "truncation",
        ),
        (
            json!({"max_output_tokens": 0}),
            "invalid_value",
            "max_output_tokens",
        ),
        (
            json!({"max_output_tokens": 100_000}),
            "context_length_exceeded",
            "max_output_tokens",
        ),
        (
            json!({"text": {"format": {"type": "json_schema"}}}),
            "invalid_value",
            "text.format.schema",
        ),
    ] {
        let (status, found, named) = post(&router, RESPONSES, &body(more.clone())).await.error();
        assert_eq!((status, found.as_str()), (400, code), "{more}");
        assert_eq!(named.as_deref(), Some(param), "{more}");
    }
}

#[tokio::test]
async fn the_tokens_of_a_prompt_are_counted() {
    let router = say("x");
    let more = merged(tools(), json!({"instructions": "Be kind.", "stream": true}));
    let path = format!("{RESPONSES}/input_tokens");
    let counted = post(&router, &path, &body(more.clone())).await.ok();
    assert_eq!(counted["object"], "response.input_tokens");
    let whole = merged(more.clone(), json!({"stream": false}));
    let answer = post(&router, RESPONSES, &body(whole)).await.ok();
    assert_eq!(counted["input_tokens"], answer["usage"]["input_tokens"]);
    let none = merged(more, json!({"tool_choice": "none"}));
    let fewer = post(&router, &path, &body(none)).await.ok();
    assert!(fewer["input_tokens"].as_u64() < counted["input_tokens"].as_u64());
    let (status, _, param) = post(&router, &path, &json!({"input": []})).await.error();
    assert_eq!((status, param.as_deref()), (400, Some("input")));
}

#[tokio::test]
async fn a_format_may_allow_properties_that_its_schema_does_not_list() {
    let router = say("{\"a\": 1, \"b\": 2}");
    let schema = json!({"properties": {"a": {"type": "integer"}}, "type": "object"});
    let format = json!({"type": "json_schema", "name": "x", "schema": schema});
    for (more, expected) in [
        (json!({}), "{\"a\": 1}"),
        (
            json!({"disable_additional_properties": false}),
            "{\"a\": 1, \"b\": 2}",
        ),
    ] {
        let text = json!({"text": {"format": merged(format.clone(), more)}});
        let answer = post(&router, RESPONSES, &body(text)).await.ok();
        let output = &answer["output"][0]["content"][0]["text"];
        let parsed: Value = serde_json::from_str(output.as_str().unwrap()).unwrap();
        let expected: Value = serde_json::from_str(expected).unwrap();
        let names = |value: &Value| {
            value
                .as_object()
                .unwrap()
                .keys()
                .cloned()
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&parsed), names(&expected), "{output}");
    }
}
