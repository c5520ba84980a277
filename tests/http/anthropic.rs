//! Anthropic's API: messages, whole and streamed, and its errors.

use axum::Router;
use axum::body::Body;
use axum::http::Method;
use serde_json::{Value, json};
use sterna::text::Tokenizer;

use crate::harness::*;
use crate::speaker::{self, post};

const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";
const TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\
    {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}\
    {% if enable_thinking %}<think>{% endif %}";
const CALL: &str = "<tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"zone\": \"UTC\"}}\n\
    </tool_call>";

fn say(answer: &str) -> Router {
    say_in(TEMPLATE, answer)
}

fn say_in(template: &str, answer: &str) -> Router {
    speaker::start(TOKENIZER, template, VOCABULARY, |tokenizer| {
        tokenizer.encode_prompt(answer).unwrap().split_off(1)
    })
}

fn body(more: Value) -> Value {
    let messages = json!([{"role": "user", "content": "Why?"}]);
    merged(
        json!({"messages": messages, "max_tokens": 500, "temperature": 0}),
        more,
    )
}

fn tools() -> Value {
    let zone = json!({"enum": ["UTC", "CET"]});
    let schema = json!({"type": "object", "properties": {"zone": zone}, "required": ["zone"]});
    json!({"tools": [{"name": "get_time", "description": "x", "input_schema": schema}]})
}

/// Returns the events of a stream, whose names must be their types.
fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.body);
    let frames = answer.body.strip_suffix("\n\n").unwrap().split("\n\n");
    let event = |frame: &str| {
        let (name, data) = frame.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: ").unwrap(), data["type"]);
        data
    };
    frames.map(event).collect()
}

/// Puts the events of a stream together as Anthropic's clients do.
fn accumulated(events: &[Value]) -> Value {
    let kind = |event: &Value| event["type"].as_str().unwrap().to_owned();
    assert_eq!(kind(&events[0]), "message_start");
    assert_eq!(kind(&events[1]), "ping");
    assert_eq!(kind(events.last().unwrap()), "message_stop");
    let mut message = events[0]["message"].clone();
    let mut partial = String::new();
    for event in events {
        let index = event["index"].as_u64().map(|index| index as usize);
        match kind(event).as_str() {
            "content_block_start" => {
                let content = message["content"].as_array_mut().unwrap();
                assert_eq!(index, Some(content.len()));
                content.push(event["content_block"].clone());
                partial.clear();
            }
            "content_block_delta" => {
                let block = &mut message["content"][index.unwrap()];
                let delta = &event["delta"];
                let add = |block: &mut Value, field: &str| {
                    let more = delta[field].as_str().unwrap();
                    block[field] = (block[field].as_str().unwrap().to_owned() + more).into();
                };
                match delta["type"].as_str().unwrap() {
                    "text_delta" => add(block, "text"),
                    "thinking_delta" => add(block, "thinking"),
                    "input_json_delta" => partial += delta["partial_json"].as_str().unwrap(),
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" => {
                let block = &mut message["content"][index.unwrap()];
                if block["type"] == "tool_use" {
                    block["input"] = serde_json::from_str(&partial).unwrap();
                }
            }
            "message_delta" => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            _ => {}
        }
    }
    message
}

/// Returns a message without its ids, whole and streamed, which must be equal.
async fn both(router: &Router, more: Value) -> Value {
    let plain = |mut message: Value| {
        message["id"] = Value::Null;
        for block in message["content"].as_array_mut().unwrap() {
            if let Some(id) = block.get_mut("id") {
                assert!(id.as_str().unwrap().starts_with("toolu_"));
                *id = Value::Null;
            }
        }
        message
    };
    let whole = plain(post(router, MESSAGES, &body(more.clone())).await.ok());
    let stream = body(merged(more, json!({"stream": true})));
    let streamed = plain(accumulated(&events(&post(router, MESSAGES, &stream).await)));
    for (name, value) in whole
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| *name != "usage")
    {
        assert_eq!(streamed[name], *value, "{name}");
    }
    whole
}

#[tokio::test]
async fn a_message_has_text_and_counts() {
    let message = both(&say("Grüße, you."), json!({"system": "Be kind."})).await;
    assert_eq!(message["type"], "message");
    assert_eq!(message["role"], "assistant");
    assert_eq!(
        message["content"],
        json!([{"type": "text", "text": "Grüße, you."}])
    );
    assert_eq!(message["stop_reason"], "end_turn");
    assert_eq!(message["stop_sequence"], Value::Null);
    let usage = &message["usage"];
    assert!(usage["input_tokens"].as_u64().unwrap() > 0, "{usage}");
    assert_eq!(usage["cache_read_input_tokens"], 0);
    // The same prompt again comes from the cache, except for its end.
    let router = say("x");
    let long = json!({"system": "word ".repeat(40)});
    let first = post(&router, MESSAGES, &body(long.clone())).await.ok()["usage"].clone();
    let again = post(&router, MESSAGES, &body(long)).await.ok()["usage"].clone();
    let count = |usage: &Value, field: &str| usage[field].as_u64().unwrap();
    let cached = count(&again, "cache_read_input_tokens");
    assert!(cached > 0, "{again}");
    let all = count(&again, "input_tokens") + cached;
    assert_eq!(all, count(&first, "input_tokens"));
}

#[tokio::test]
async fn a_message_ends_for_one_of_four_reasons() {
    let router = say("one two three");
    let stop = both(&router, json!({"stop_sequences": ["zzz", " two"]})).await;
    assert_eq!(stop["stop_reason"], "stop_sequence");
    assert_eq!(stop["stop_sequence"], " two");
    assert_eq!(stop["content"][0]["text"], "one");
    let length = both(&router, json!({"max_tokens": 1})).await;
    assert_eq!(length["stop_reason"], "max_tokens");
    let router = say(&format!("Hm.\n{CALL}"));
    let call = both(&router, tools()).await;
    assert_eq!(call["stop_reason"], "tool_use");
    let block =
        json!({"type": "tool_use", "id": null, "name": "get_time", "input": {"zone": "UTC"}});
    assert_eq!(
        call["content"],
        json!([{"type": "text", "text": "Hm."}, block])
    );
}

#[tokio::test]
async fn a_choice_of_tools_is_guaranteed() {
    // A model that may reason could do so until the end.
    let router = say_in(&TEMPLATE.replace("<think>", ""), "Hello!");
    for choice in [
        json!({"type": "any", "disable_parallel_tool_use": true}),
        json!({"type": "tool", "name": "get_time"}),
    ] {
        let message = both(&router, merged(tools(), json!({"tool_choice": choice}))).await;
        let content = message["content"].as_array().unwrap();
        assert_eq!(
            (content.len(), &message["stop_reason"]),
            (1, &json!("tool_use"))
        );
        let zone = content[0]["input"]["zone"].as_str().unwrap();
        assert!(["UTC", "CET"].contains(&zone), "{zone}");
    }
    let none = json!({"tool_choice": {"type": "none"}});
    let message = both(&router, merged(tools(), none)).await;
    assert_eq!(message["content"][0]["text"], "Hello!");
}

#[tokio::test]
async fn thinking_is_a_block_of_its_own_if_the_client_wants_it() {
    let router = say("mumble</think>done");
    let on = json!({"thinking": {"type": "enabled", "budget_tokens": 100}});
    let message = both(&router, on).await;
    let thinking = json!({"type": "thinking", "thinking": "mumble", "signature": ""});
    assert_eq!(
        message["content"],
        json!([thinking, {"type": "text", "text": "done"}])
    );
    let router = say("<think>mumble</think>done");
    let message = both(&router, json!({"thinking": {"type": "disabled"}})).await;
    assert_eq!(
        message["content"],
        json!([{"type": "text", "text": "done"}])
    );
}

async fn prompt(router: &Router, messages: Value) -> String {
    // The chat endpoint's messages mean the same.
    let tokens = post(router, "/tokenize", &json!({"messages": messages}))
        .await
        .ok();
    let text = post(router, "/detokenize", &json!({"tokens": tokens["tokens"]}))
        .await
        .ok();
    text["prompt"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn blocks_become_the_messages_of_a_chat() {
    let router = say("x");
    let messages = json!([
        {"role": "user", "content": [
            {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "b"},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "text", "text": "c"},
            {"type": "tool_use", "id": "toolu_1", "name": "get_time", "input": {"zone": "UTC"}},
        ]},
        {"role": "user", "content": [
            {
                "type": "tool_result", "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "noon"}],
            },
            {"type": "text", "text": "d"},
        ]},
    ]);
    let system = json!([{"type": "text", "text": "s1"}, {"type": "text", "text": "s2"}]);
    let request = json!({"messages": messages, "system": system});
    let count = post(&router, COUNT, &request).await.ok()["input_tokens"].clone();
    let call =
        json!({"id": "t", "function": {"name": "get_time", "arguments": "{\"zone\": \"UTC\"}"}});
    let chat = json!([
        {"role": "system", "content": "s1\n\ns2"},
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "t", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": "noon"},
        {"role": "user", "content": "d"},
    ]);
    let tokens = post(&router, "/tokenize", &json!({"messages": chat}))
        .await
        .ok();
    assert_eq!(tokens["count"], count, "{}", prompt(&router, chat).await);
    let message = both(&router, request).await;
    let usage = &message["usage"];
    let parts = ["input_tokens", "cache_read_input_tokens"];
    let total: u64 = parts
        .iter()
        .map(|part| usage[*part].as_u64().unwrap())
        .sum();
    assert_eq!(total, count.as_u64().unwrap());
    // The answer continues the final message of the assistant.
    let prefill =
        json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "The"}]);
    let continued = post(&router, COUNT, &json!({"messages": prefill}))
        .await
        .ok();
    let text = json!({"content": "user: a\nassistant: The"});
    let plain = post(&router, "/tokenize", &text).await.ok();
    assert_eq!(continued["input_tokens"], plain["count"]);
}

/// A template that has no place for instructions inside of a conversation, as Qwen 3.5's.
const SYSTEM_FIRST: &str = "{% for message in messages %}{% if message.role == 'system' and not \
    loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}\
    {{ message.role }}: {{ message.content }}\n{% endfor %}";

/// A template that leaves such instructions out, as SmolLM3's.
const SYSTEM_LOST: &str = "{% if messages[0].role == 'system' %}system: {{ messages[0].content }}\n\
    {% endif %}{% for message in messages %}{% if message.role != 'system' %}\
    {{ message.role }}: {{ message.content }}\n{% endif %}{% endfor %}";

/// A template that writes every other role as the assistant.
const SYSTEM_AS_ASSISTANT: &str = "{% if messages[0].role == 'system' %}system: \
    {{ messages[0].content }}\n{% set messages = messages[1:] %}{% endif %}\
    {% for message in messages %}{% if message.role == 'user' %}user\
    {% else %}assistant{% endif %}: {{ message.content }}\n{% endfor %}";

#[tokio::test]
async fn instructions_inside_of_a_conversation_stay_at_their_place() {
    let messages = json!([
        {"role": "system", "content": "s1"},
        {"role": "user", "content": "a"},
        {"role": "system", "content": [{"type": "text", "text": "s2"}]},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": "s3"},
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
    ]);
    let reminder = |text: &str| format!("<system-reminder>\n{text}\n</system-reminder>");
    let own = "system: s0\n\ns1\nuser: a\nsystem: s2\nassistant: b\nsystem: s3\nuser: c\n\nd\n";
    let merged = format!(
        "system: s0\n\ns1\nuser: a\n\n{}\nassistant: b\nuser: {}\n\nc\n\nd\n",
        reminder("s2"),
        reminder("s3"),
    );
    for (template, expected) in [
        (TEMPLATE, &format!("{own}assistant:")),
        (SYSTEM_FIRST, &merged),
        (SYSTEM_LOST, &merged),
        (SYSTEM_AS_ASSISTANT, &merged),
    ] {
        let router = say_in(template, "x");
        let request = json!({"messages": messages, "system": "s0"});
        let count = post(&router, COUNT, &request).await.ok()["input_tokens"].clone();
        let text = json!({"content": expected});
        let plain = post(&router, "/tokenize", &text).await.ok();
        assert_eq!(plain["count"], count, "{template}");
        both(&router, request).await;
    }
}

#[tokio::test]
async fn what_claude_code_sends_with_every_request_is_accepted() {
    let router = say("Hello!");
    let edits = json!([{"type": "clear_thinking_20251015", "keep": "all"}]);
    let more = json!({
        "context_management": {"edits": edits},
        "output_config": {"effort": "high"},
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "x"},
    });
    let message = both(&router, more).await;
    assert_eq!(message["stop_reason"], "end_turn");
    // A model of a smaller context answers as long as it can.
    let long = speaker::start(TOKENIZER, TEMPLATE, VOCABULARY, |_| {
        vec![70; MAX_MODEL_LEN as usize]
    });
    let message = both(&long, json!({"max_tokens": 32_000})).await;
    assert_eq!(message["stop_reason"], "max_tokens");
    let usage = &message["usage"];
    let parts = ["input_tokens", "cache_read_input_tokens", "output_tokens"];
    let all = parts.iter().map(|part| usage[*part].as_u64().unwrap());
    assert_eq!(all.sum::<u64>(), u64::from(MAX_MODEL_LEN));
    // The server runs no tools of its own.
    let own = json!({"type": "web_search_20250305", "name": "web_search", "max_uses": 5});
    let mut tools = tools();
    tools["tools"].as_array_mut().unwrap().insert(0, own);
    let call = both(&say(CALL), tools).await;
    assert_eq!(call["stop_reason"], "tool_use");
}

#[tokio::test]
async fn an_answer_follows_the_format_of_messages_parse() {
    let schema = json!({
        "type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"],
        "additionalProperties": false,
    });
    let router = say_in(&TEMPLATE.replace("<think>", ""), "Hello!");
    let format = json!({"type": "json_schema", "schema": schema});
    for more in [
        json!({"output_config": {"format": format, "effort": "low"}}),
        json!({"output_format": format}),
    ] {
        let message = both(&router, more).await;
        let text = message["content"][0]["text"].as_str().unwrap();
        let parsed: Value = serde_json::from_str(text).unwrap();
        assert!(
            ["b", "c"].contains(&parsed["a"].as_str().unwrap()),
            "{text}"
        );
    }
    let unenforceable = json!({"type": "json_schema", "schema": {"minimum": 1e300}});
    let refused = json!({"output_config": {"format": unenforceable}});
    let (status, _, message) = error(&post(&router, MESSAGES, &body(refused)).await);
    assert_eq!(status, 400);
    assert!(
        message.contains("'output_config.format.schema'"),
        "{message}"
    );
}

/// Before, only the other routes refused such a request; here the answer never ended.
#[tokio::test]
async fn a_format_needs_a_token_that_ends_the_answer() {
    let answer = |tokenizer: &Tokenizer| tokenizer.encode_prompt("Hello!").unwrap();
    let template = TEMPLATE.replace("<think>", "");
    let router = speaker::start_with_stops(TOKENIZER, &template, VOCABULARY, vec![], answer);
    let format = json!({"type": "json_schema", "schema": {"type": "integer"}});
    for (field, more) in [
        (
            "output_config.format.schema",
            json!({"output_config": {"format": format}}),
        ),
        ("output_format.schema", json!({"output_format": format})),
    ] {
        let (status, _, message) = error(&post(&router, MESSAGES, &body(more)).await);
        let needs = format!("'{field}' needs a token that ends the answer");
        assert!(
            status == 400 && message.contains(&needs),
            "{status} {message}"
        );
    }
    let unconstrained = post(&router, MESSAGES, &body(json!({"max_tokens": 5}))).await;
    assert_eq!(unconstrained.status, 200, "{}", unconstrained.body);
}

fn error(answer: &Answer) -> (u16, String, String) {
    let body: Value = serde_json::from_str(&answer.body).unwrap();
    assert_eq!(body["type"], "error", "{body}");
    assert_eq!(body["request_id"], answer.header("x-request-id"));
    assert_eq!(answer.header("request-id"), answer.header("x-request-id"));
    let text = |field: &str| body["error"][field].as_str().unwrap().to_owned();
    (answer.status.as_u16(), text("type"), text("message"))
}

#[tokio::test]
async fn errors_have_anthropics_form_and_name_the_field() {
    let router = say("x");
    let image = json!([{"type": "image", "source": {"type": "url", "url": "x"}}]);
    let of_user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    for (more, named) in [
        (json!({"max_tokens": 0}), "'max_tokens'"),
        (json!({"max_tokens": null}), "'max_tokens'"),
        (json!({"messages": []}), "'messages'"),
        (
            json!({"messages": [{"role": "tool", "content": "a"}]}),
            "'messages[0].role'",
        ),
        (
            json!({"messages": [{"role": "system", "content": [{"type": "tool_result"}]}]}),
            "messages[0].content[0].type",
        ),
        (
            json!({"output_config": {"effort": "a lot"}}),
            "'output_config.effort'",
        ),
        (json!({"context_management": "all"}), "'context_management'"),
        (of_user(image), "'image'"),
        (of_user(json!([{"type": "document"}])), "'document'"),
        (
            of_user(json!([{"type": "tool_use", "id": "a", "name": "b", "input": {}}])),
            "content[0].type",
        ),
        (
            of_user(json!([{"type": "tool_result"}])),
            "messages[0].content[0].tool_use_id",
        ),
        (
            json!({"tools": [{"name": "a b", "input_schema": {}}]}),
            "tools[0].name",
        ),
        (json!({"tools": [{"name": "a"}]}), "tools[0].input_schema"),
        (json!({"tool_choice": {"type": "any"}}), "'tool_choice'"),
        (json!({"thinking": {"type": "often"}}), "'thinking.type'"),
        (json!({"mcp_servers": [{}]}), "'mcp_servers'"),
        (json!({"stop_sequences": [5]}), "'stop_sequences'"),
        (json!({"stop_sequences": [""]}), "'stop_sequences'"),
        (
            json!({"stop_sequences": ["a".repeat(2000)]}),
            "'stop_sequences'",
        ),
        (
            json!({"stop_sequences": ["a", "b", "c", "d", "e"]}),
            "'stop_sequences'",
        ),
    ] {
        let (status, kind, message) = error(&post(&router, MESSAGES, &body(more.clone())).await);
        assert_eq!(
            (status, kind.as_str()),
            (400, "invalid_request_error"),
            "{more}"
        );
        assert!(message.contains(named), "{message}");
    }
}

#[tokio::test]
async fn errors_of_the_server_have_anthropics_form_on_its_paths_only() {
    let router = say("x");
    let unknown = post(&router, MESSAGES, &body(json!({"model": "claude-x"}))).await;
    assert_eq!(error(&unknown).1, "not_found_error");
    let kind = [("content-type", "application/json")];
    for (method, path, kinds, text, status, named) in [
        (
            Method::POST,
            "/v1/messages/batches",
            kind,
            "{}".to_owned(),
            404,
            "not_found_error",
        ),
        (
            Method::GET,
            MESSAGES,
            kind,
            String::new(),
            405,
            "invalid_request_error",
        ),
        (
            Method::POST,
            MESSAGES,
            [("content-type", "text/plain")],
            "{}".to_owned(),
            415,
            "invalid_request_error",
        ),
        (
            Method::POST,
            MESSAGES,
            kind,
            "{".to_owned(),
            400,
            "invalid_request_error",
        ),
        (
            Method::POST,
            MESSAGES,
            kind,
            " ".repeat(3 << 20),
            413,
            "request_too_large",
        ),
    ] {
        let answer = send(&router, method, path, &kinds, Body::from(text)).await;
        let (found, kind, _) = error(&answer);
        assert_eq!((found, kind.as_str()), (status, named), "{path}");
    }
    // Other paths keep OpenAI's form.
    let other = send(&router, Method::GET, "/v1/messagesx", &[], Body::empty()).await;
    assert_eq!(other.error().1, "not_found");
}

#[tokio::test]
async fn a_server_that_loads_says_so_in_anthropics_form() {
    let router = sterna::api::router(sterna::api::App::loading());
    let answer = post(&router, MESSAGES, &body(json!({}))).await;
    assert_eq!(error(&answer).1, "overloaded_error");
    assert!(answer.headers.contains_key("retry-after"));
}

#[tokio::test]
async fn an_error_in_a_stream_is_an_event() {
    let server = Server::new();
    let grammar = json!({"tool_choice": {"type": "any"}, "max_tokens": 50});
    let failing = merged(merged(tools(), grammar), json!({"stream": true}));
    server
        .gate
        .failing
        .store(true, std::sync::atomic::Ordering::SeqCst);
    let answer = server.post(MESSAGES, &body(failing)).await;
    // Nothing was sent before the error, so it is a plain one.
    let (status, kind, _) = error(&answer);
    assert_eq!((status, kind.as_str()), (500, "api_error"));
}
