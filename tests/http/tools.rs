//! Calls of tools in a chat: what the model writes in the format of its family is a call, whole and
//! streamed.

use serde_json::{Value, json};

use crate::harness::*;
use crate::speaker::{self, chat, post};

const OPEN: u32 = VOCABULARY;

/// A template without tools.
const PLAIN: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\
    {% endfor %}assistant:";
/// Templates that write tools and calls as Qwen, Falcon and Llama do.
const QWEN: &str = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}\
    {% if tools %}<tool_call>\n{\"name\": \"x\", \"arguments\": {}}\n</tool_call>{% endif %}\
    {% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}\
    {% if opened %}<think>{% endif %}";
const FALCON: &str = "{% if tools %}{{ tools | tojson }}\n<tool_call>\\n[{% endif %}\
    {% for message in messages %}{{ message.content }}{% endfor %}";
const LLAMA: &str = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}\
    {\"name\": name, \"parameters\": arguments}\
    {% for message in messages %}{{ message.content }}{% endfor %}";

/// Starts a server whose model says `answer`. Each of `added` is a token.
fn start(template: &str, added: &[&str], answer: &str) -> axum::Router {
    let json = speaker::tokenizer_with(added, false);
    let vocabulary = VOCABULARY + 8;
    speaker::start(&json, template, vocabulary, |tokenizer| {
        let mut tokens = Vec::new();
        let mut rest = answer;
        while !rest.is_empty() {
            let found = added
                .iter()
                .filter_map(|text| Some((rest.find(text)?, text)));
            let (at, text) = found.min().unwrap_or((rest.len(), &""));
            tokens.extend(tokenizer.encode_prompt(&rest[..at]).unwrap().split_off(1));
            let token = added.iter().position(|one| one == text);
            tokens.extend(token.map(|index| OPEN + index as u32));
            rest = &rest[at + text.len()..];
        }
        tokens
    })
}

fn weather() -> Value {
    json!({"type": "function", "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Bern"]}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    }})
}

fn time() -> Value {
    json!({"type": "function", "function": {"name": "get_time"}})
}

fn tools() -> Value {
    json!({"tools": [weather(), time()]})
}

/// What an answer consists of, without the ids of its calls.
#[derive(Debug, Default, PartialEq)]
struct Parts {
    content: String,
    calls: Vec<(String, String)>,
    finish_reason: String,
}

fn parts(content: &str, calls: &[(&str, &str)], finish_reason: &str) -> Parts {
    let calls = calls
        .iter()
        .map(|(name, arguments)| ((*name).into(), (*arguments).into()));
    Parts {
        content: content.to_owned(),
        calls: calls.collect(),
        finish_reason: finish_reason.to_owned(),
    }
}

fn whole(choice: &Value) -> Parts {
    let message = &choice["message"];
    let calls = message["tool_calls"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    for call in &calls {
        assert!(call["id"].as_str().unwrap().starts_with("call_"), "{call}");
        assert_eq!(call["type"], "function");
        assert_eq!(call.get("index"), None);
    }
    assert!(message.as_object().unwrap().contains_key("content"));
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let call = |call: &Value| {
        (
            text(&call["function"]["name"]),
            text(&call["function"]["arguments"]),
        )
    };
    Parts {
        content: message["content"].as_str().unwrap_or_default().to_owned(),
        calls: calls.iter().map(call).collect(),
        finish_reason: text(&choice["finish_reason"]),
    }
}

/// Puts the chunks of a choice together as OpenAI's clients do, and checks their form.
fn streamed(events: &[Value], index: u32) -> Parts {
    let mut parts = Parts::default();
    let mut ids = Vec::new();
    for event in events {
        let Some(choice) = event["choices"]
            .get(0)
            .filter(|choice| choice["index"] == index)
        else {
            continue;
        };
        let delta = &choice["delta"];
        parts.content += delta["content"].as_str().unwrap_or_default();
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            if let Some(id) = call["id"].as_str() {
                assert_eq!(call["index"], ids.len());
                assert_eq!(call["type"], "function");
                assert_eq!(call["function"]["arguments"], "");
                assert!(!ids.contains(&id.to_owned()));
                ids.push(id.to_owned());
                let name = call["function"]["name"].as_str().unwrap();
                parts.calls.push((name.to_owned(), String::new()));
            } else {
                assert_eq!(call["index"], ids.len() - 1);
                let fields: Vec<&String> = call.as_object().unwrap().keys().collect();
                assert_eq!(fields, ["index", "function"]);
                let more = call["function"]["arguments"].as_str().unwrap();
                parts.calls.last_mut().unwrap().1 += more;
            }
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            parts.finish_reason = reason.to_owned();
        }
    }
    parts
}

/// Returns the parts of an answer, whole and streamed, which must be equal.
async fn both(router: &axum::Router, more: Value) -> Parts {
    let answer = chat(router, more.clone()).await.ok();
    let parts = whole(&answer["choices"][0]);
    let events = chat(router, merged(more, json!({"stream": true})))
        .await
        .events();
    assert_eq!(streamed(&events, 0), parts);
    parts
}

const PARIS: (&str, &str) = ("get_weather", "{\"city\": \"Paris\"}");
const BERN: (&str, &str) = ("get_weather", "{\"city\": \"Bern\", \"days\": 2}");
const TIME: (&str, &str) = ("get_time", "{}");

#[tokio::test]
async fn a_call_in_the_format_of_each_family_is_a_call() {
    let hermes = "Lé us see.\n\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": \
        {\"city\": \"Paris\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"get_time\", \
        \"arguments\": {}}\n</tool_call>";
    let falcon = "Lé us see.\n<tool_call>\n[\n  {\"name\": \"get_weather\", \"arguments\": \
        {\"city\": \"Paris\"}},\n  {\"name\": \"get_time\", \"arguments\": {}}\n]\n</tool_call>";
    let llama = "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Paris\"}}; \
        {\"name\": \"get_time\", \"parameters\": {}}";
    let tags = ["<tool_call>", "</tool_call>"];
    let text = "Lé us see.";
    for (template, added, answer, content) in [
        (PLAIN, &[][..], hermes.to_owned(), text),
        (QWEN, &[], hermes.to_owned(), text),
        (QWEN, &tags, hermes.to_owned(), text),
        (FALCON, &[], falcon.to_owned(), text),
        (FALCON, &tags, falcon.to_owned(), text),
        (LLAMA, &[], llama.to_owned(), ""),
        (
            LLAMA,
            &["<|python_tag|>"],
            format!("<|python_tag|>{llama}"),
            "",
        ),
    ] {
        let router = start(template, added, &answer);
        let expected = parts(content, &[PARIS, TIME], "tool_calls");
        assert_eq!(both(&router, tools()).await, expected, "{template}");
        let more = merged(tools(), json!({"skip_special_tokens": false}));
        assert_eq!(both(&router, more).await, expected, "{template}");
    }
}

#[tokio::test]
async fn an_answer_without_a_call_is_text() {
    for (template, answer) in [
        (PLAIN, "No tool, <tool> or <tool_cal"),
        (QWEN, "{\"name\": \"get_weather\"}\n"),
        (LLAMA, "[{\"name\": \"get_weather\", \"parameters\": {}}]"),
        (LLAMA, "{\"json\": [1, 2]}"),
    ] {
        let router = start(template, &[], answer);
        assert_eq!(both(&router, tools()).await, parts(answer, &[], "stop"));
        // Nothing is parsed if the client offers no tool.
        let none = merged(tools(), json!({"tool_choice": "none"}));
        assert_eq!(both(&router, none).await, parts(answer, &[], "stop"));
    }
    let call = "<tool_call>\n{\"name\": \"get_time\", \"arguments\": {}}\n</tool_call>";
    let router = start(PLAIN, &[], call);
    let none = merged(tools(), json!({"tool_choice": "none"}));
    assert_eq!(both(&router, none).await, parts(call, &[], "stop"));
    assert_eq!(both(&router, json!({})).await, parts(call, &[], "stop"));
}

#[tokio::test]
async fn a_call_follows_its_schema_once_it_has_begun() {
    for (template, before, after) in [
        (
            PLAIN,
            "Hm <tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"",
            "</tool_call>",
        ),
        (LLAMA, "{\"name\":\"get_weather\", \"parameters\": {\"", ""),
    ] {
        let answer = format!("{before}town\": [1, \"Paris\"]}}}}{after}");
        let router = start(template, &[], &answer);
        let found = both(&router, merged(tools(), json!({"max_tokens": 400}))).await;
        assert_eq!(found.calls.len(), 1, "{found:?}");
        let arguments: Value = serde_json::from_str(&found.calls[0].1).unwrap();
        let cities = [json!("Paris"), json!("Bern")];
        assert!(cities.contains(&arguments["city"]), "{arguments}");
    }
}

#[tokio::test]
async fn a_choice_of_tools_is_guaranteed() {
    let hello = "Hello! I call nothing.";
    // A model that may reason could do so until the end.
    let qwen = QWEN.replace("<think>", "");
    for template in [PLAIN, &qwen, FALCON, LLAMA] {
        let router = start(template, &[], hello);
        let base = merged(
            tools(),
            json!({"max_tokens": 1000, "parallel_tool_calls": false}),
        );
        let required = merged(base.clone(), json!({"tool_choice": "required"}));
        let found = both(&router, required).await;
        assert_eq!(
            (found.content.as_str(), found.calls.len()),
            ("", 1),
            "{found:?}"
        );
        assert_eq!(found.finish_reason, "tool_calls");
        let choice = json!({"type": "function", "function": {"name": "get_time"}});
        let named = merged(base, json!({"tool_choice": choice}));
        assert_eq!(both(&router, named).await, parts("", &[TIME], "tool_calls"));
    }
    let several = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Bern\", \
        \"days\": 2}}\n</tool_call>\n<tool_call>\n{\"name\": \"get_time\", \"arguments\": {}}\n\
        </tool_call>";
    let router = start(PLAIN, &[], several);
    let required = merged(tools(), json!({"tool_choice": "required"}));
    let expected = parts("", &[BERN, TIME], "tool_calls");
    assert_eq!(both(&router, required.clone()).await, expected);
    let one = merged(required, json!({"parallel_tool_calls": false}));
    assert_eq!(both(&router, one).await, parts("", &[BERN], "tool_calls"));
}

#[tokio::test]
async fn each_choice_has_calls_of_its_own() {
    let call = "<tool_call>\n{\"name\": \"get_time\", \"arguments\": {}}\n</tool_call>";
    let router = start(PLAIN, &[], call);
    let more = merged(
        tools(),
        json!({"n": 3, "logprobs": true, "return_token_ids": true}),
    );
    let answer = chat(&router, more.clone()).await.ok();
    let mut ids = Vec::new();
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!(whole(choice), parts("", &[TIME], "tool_calls"));
        ids.push(choice["message"]["tool_calls"][0]["id"].clone());
        assert_eq!(choice["message"]["content"], Value::Null);
        // Log-probabilities cover the call, and so do the tokens.
        let logprobs = choice["logprobs"]["content"].as_array().unwrap();
        let tokens = choice["token_ids"].as_array().unwrap();
        assert_eq!(
            logprobs.len() + 1,
            tokens.len(),
            "the last token ends the turn"
        );
    }
    ids.dedup();
    assert_eq!(ids.len(), 3, "{ids:?}");
    let events = chat(&router, merged(more, json!({"stream": true})))
        .await
        .events();
    for index in 0..3 {
        assert_eq!(streamed(&events, index), parts("", &[TIME], "tool_calls"));
    }
}

#[tokio::test]
async fn reasoning_comes_before_calls() {
    let call = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}\n\
        </tool_call>";
    let thought = "I write <tool_call> and {\"name\": ...";
    let closed = format!("{thought}</think>\n\n{call}");
    for added in [&[][..], &["<think>", "</think>"]] {
        for (answer, opened) in [(format!("<think>{closed}"), false), (closed.clone(), true)] {
            let router = start(QWEN, added, &answer);
            let kwargs = json!({"opened": opened});
            for choice in ["auto", "required"] {
                let more = json!({"chat_template_kwargs": kwargs, "tool_choice": choice});
                let more = merged(tools(), more);
                let expected = parts("", &[PARIS], "tool_calls");
                assert_eq!(
                    both(&router, more.clone()).await,
                    expected,
                    "{added:?} {more}"
                );
                let message = &chat(&router, more).await.ok()["choices"][0]["message"];
                assert_eq!(message["reasoning_content"], thought);
            }
        }
    }
}

#[tokio::test]
async fn reasoning_comes_before_an_answer_of_the_response_format_too() {
    let router = start(
        QWEN,
        &["<think>", "</think>"],
        "<think>Why</think>\n\n{\"a\": 1}",
    );
    let more = merged(tools(), json!({"response_format": {"type": "json_object"}}));
    let found = both(&router, more).await;
    assert_eq!(found, parts("{\"a\": 1}", &[], "stop"));
}

/// A template that prints tools and calls as Qwen 3.5 does.
const XML: &str = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}\
    {% if tools %}<tool_call>\n<function=x>\n<parameter=a>\n...{% endif %}\
    {% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}\
    {% if opened %}<think>{% endif %}";

#[tokio::test]
async fn calls_in_xml_are_calls_and_follow_their_schema() {
    let call = "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n\
        <parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n\
        <function=get_time>\n</function>\n</tool_call>";
    let tags = ["<tool_call>", "</tool_call>"];
    for added in [&[][..], &tags] {
        let router = start(XML, added, &format!("Lé us see.\n\n{call}"));
        let expected = parts("Lé us see.", &[BERN, TIME], "tool_calls");
        assert_eq!(both(&router, tools()).await, expected, "{added:?}");
        let router = start(XML, added, call);
        let required = merged(tools(), json!({"tool_choice": "required"}));
        let expected = parts("", &[BERN, TIME], "tool_calls");
        assert_eq!(both(&router, required).await, expected, "{added:?}");
        // The model says something else, and the grammar makes a call of it.
        for said in [
            "No.",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome",
        ] {
            let router = start(&XML.replace("<think>", ""), added, said);
            let choice = json!({"type": "function", "function": {"name": "get_time"}});
            let named = merged(tools(), json!({"tool_choice": choice}));
            assert_eq!(
                both(&router, named).await,
                parts("", &[TIME], "tool_calls"),
                "{said}"
            );
            let choice = json!({"type": "function", "function": {"name": "get_weather"}});
            let named = merged(tools(), json!({"tool_choice": choice}));
            let found = both(&router, named).await;
            let arguments: Value = serde_json::from_str(&found.calls[0].1).unwrap();
            let city = arguments["city"].as_str().unwrap();
            assert!(["Paris", "Bern"].contains(&city), "{found:?}");
        }
    }
    let thought = format!("<think>I write <tool_call>.</think>\n\n{call}");
    let router = start(XML, &["<think>", "</think>"], &thought);
    assert_eq!(
        both(&router, tools()).await,
        parts("", &[BERN, TIME], "tool_calls")
    );
    let cut = merged(
        tools(),
        json!({"tool_choice": "required", "max_tokens": 12}),
    );
    assert_eq!(both(&router, cut).await.finish_reason, "length");
}

/// A template that prints tools in a format that the server cannot read.
const OTHER: &str = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}\
    {% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}";

#[tokio::test]
async fn a_call_in_an_unknown_format_is_text_unless_it_is_forced() {
    let answer = "[CALL]get_time{}";
    let router = start(OTHER, &[], answer);
    assert_eq!(both(&router, tools()).await, parts(answer, &[], "stop"));
    let json = json!({"response_format": {"type": "json_object"}, "max_tokens": 9});
    let found = both(&router, merged(tools(), json)).await;
    assert!(found.content.starts_with('{'), "{found:?}");
    let choice = json!({"type": "function", "function": {"name": "get_time"}});
    let forced = merged(tools(), json!({"tool_choice": choice}));
    assert_eq!(
        both(&router, forced).await,
        parts("", &[TIME], "tool_calls")
    );
}

#[tokio::test]
async fn an_answer_that_is_cut_off_has_what_was_written() {
    let answer = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Bern\", \
        \"days\": 2}}\n</tool_call>";
    let router = start(PLAIN, &[], answer);
    let stop = merged(tools(), json!({"stop": ["\"days"]}));
    let found = both(&router, stop).await;
    let cut = ("get_weather", "{\"city\": \"Bern\", ");
    assert_eq!(found, parts("", &[cut], "stop"));
    let stop = merged(tools(), json!({"stop": ["weather"]}));
    let found = both(&router, stop).await;
    assert_eq!(found, parts("<tool_call>\n{\"name\": \"get_", &[], "stop"));
    let length = merged(tools(), json!({"max_tokens": 5}));
    assert_eq!(both(&router, length).await.finish_reason, "length");
    // An answer that has to be a call has no text.
    let forced = merged(tools(), json!({"tool_choice": "required"}));
    for max_tokens in 1..9 {
        let cut = merged(forced.clone(), json!({"max_tokens": max_tokens}));
        let found = both(&router, cut).await;
        assert_eq!(found, parts("", &[], "length"), "{max_tokens}");
    }
    let stop = merged(forced, json!({"stop": ["weather"]}));
    assert_eq!(both(&router, stop).await, parts("", &[], "stop"));
}

#[tokio::test]
async fn a_required_call_goes_before_a_response_format() {
    let format = json!({"response_format": {"type": "json_object"}, "max_tokens": 200});
    let more = merged(tools(), format);
    let call = "<tool_call>\n{\"name\": \"get_time\", \"arguments\": {}}\n</tool_call>";
    assert_eq!(
        both(&start(PLAIN, &[], call), more.clone()).await,
        parts("", &[TIME], "tool_calls")
    );
    let object = "{\"name\": \"get_time\"}";
    let router = start(PLAIN, &[], object);
    assert_eq!(
        both(&router, more.clone()).await,
        parts(object, &[], "stop")
    );
    let required = merged(more, json!({"tool_choice": "required"}));
    assert_eq!(
        both(&start(PLAIN, &[], call), required).await,
        parts("", &[TIME], "tool_calls")
    );
}

#[tokio::test]
async fn the_prompt_has_tools_calls_and_results() {
    let router = start(QWEN, &[], "x");
    let call = json!({
        "id": "call_1", "type": "function",
        "function": {"name": "get_time", "arguments": "{\"a\": 1}"},
    });
    let messages = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "b"}]},
    ]);
    let text = async |template: &str, more: Value| {
        let router = start(template, &[], "x");
        let body = merged(json!({"messages": messages}), more);
        let tokens = post(&router, "/tokenize", &body).await.ok()["tokens"].clone();
        let text = post(&router, "/detokenize", &json!({"tokens": tokens}))
            .await
            .ok();
        text["prompt"].as_str().unwrap().to_owned()
    };
    let with = text(QWEN, json!({"tools": [time()]})).await;
    let time = "{\"type\": \"function\", \"function\": {\"name\": \"get_time\", \"parameters\": \
        {\"type\": \"object\", \"properties\": {}}}}";
    assert!(with.starts_with(time), "{with}");
    assert!(with.ends_with("user: aassistant: tool: b"), "{with}");
    let plain = text(PLAIN, json!({})).await;
    let expected = "user: a\nassistant: <tool_call>\n{\"name\": \"get_time\", \"arguments\": \
        {\"a\": 1}}\n</tool_call>\nuser: <tool_response>\nb\n</tool_response>\nassistant:";
    assert_eq!(plain, expected);
    let answer = chat(
        &router,
        json!({"messages": messages, "tools": tools()["tools"]}),
    )
    .await;
    assert_eq!(whole(&answer.ok()["choices"][0]).content, "x");
}

#[tokio::test]
async fn errors_name_the_field_by_its_path() {
    let router = start(PLAIN, &[], "x");
    let function = |more: Value| json!({"type": "function", "function": more});
    let with = |schema: Value| json!([function(json!({"name": "f", "parameters": schema}))]);
    let long = "x".repeat(70_000);
    let many: Vec<Value> = (0..129)
        .map(|i| function(json!({"name": format!("f{i}")})))
        .collect();
    let strict = json!({"name": "f", "strict": true, "parameters": {"contains": {}}});
    for (tools, param) in [
        (json!([{"type": "function"}]), "tools[0].function"),
        (json!([function(json!({}))]), "tools[0].function.name"),
        (
            json!([time(), function(json!({"name": "a b"}))]),
            "tools[1].function.name",
        ),
        (json!([time(), time()]), "tools[1].function.name"),
        (with(json!([])), "tools[0].function.parameters"),
        (
            with(json!({"description": long})),
            "tools[0].function.parameters",
        ),
        (
            with(json!({"x-guidance": {}})),
            "tools[0].function.parameters",
        ),
        (
            json!([time(), function(strict)]),
            "tools[1].function.parameters",
        ),
        (
            with(json!({"$ref": "#/nowhere"})),
            "tools[0].function.parameters",
        ),
        (json!(many), "tools"),
        (json!("x"), "tools"),
    ] {
        let (status, code, named) = chat(&router, json!({"tools": tools})).await.error();
        assert_eq!((status, code.as_str()), (400, "invalid_value"), "{param}");
        assert_eq!(named.as_deref(), Some(param));
    }
}

#[tokio::test]
async fn errors_of_choices_and_messages_name_the_field_by_its_path() {
    let router = start(PLAIN, &[], "x");
    let unknown = json!({"type": "function", "function": {"name": "g"}});
    for (more, param) in [
        (
            json!({"tool_choice": unknown, "tools": [time()]}),
            "tool_choice",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (
            json!({"tool_choice": "any", "tools": [time()]}),
            "tool_choice",
        ),
        (json!({"tools": [time()], "ignore_eos": true}), "tools"),
    ] {
        let (status, _, named) = chat(&router, more).await.error();
        assert_eq!((status, named.as_deref()), (400, Some(param)));
    }
    let call =
        |arguments: &str| json!([{"id": "a", "function": {"name": "f", "arguments": arguments}}]);
    for (message, param) in [
        (
            json!({"role": "assistant", "tool_calls": call("[1]")}),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            json!({"role": "user", "content": "x", "tool_calls": call("{}")}),
            "messages[0].tool_calls",
        ),
        (
            json!({"role": "tool", "content": "x"}),
            "messages[0].tool_call_id",
        ),
    ] {
        let (status, _, named) = chat(&router, json!({"messages": [message]})).await.error();
        assert_eq!((status, named.as_deref()), (400, Some(param)));
    }
}

#[tokio::test]
async fn a_keyword_that_a_grammar_lacks_is_ignored_unless_the_tool_is_strict() {
    let router = start(PLAIN, &[], "Hello");
    let parameters = json!({"type": "object", "minProperties": 1, "contains": {}});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    let answer = chat(&router, json!({"tools": [tool]})).await.ok();
    assert_eq!(answer["choices"][0]["message"]["content"], "Hello");
}

#[tokio::test]
async fn tools_that_are_no_functions_are_skipped() {
    let router = start(QWEN, &[], "Hello");
    let others = [
        json!({"type": "web_search"}),
        json!({"type": "namespace", "name": "n", "tools": [weather()]}),
        json!({"type": "custom", "custom": {"name": "c"}}),
    ];
    let prompt = async |tools: Value| {
        let more = json!({"tools": tools, "return_token_ids": true});
        chat(&router, more).await.ok()["prompt_token_ids"].clone()
    };
    let all = [&others[..], &[time()]].concat();
    assert_eq!(prompt(json!(all)).await, prompt(json!([time()])).await);
    assert_eq!(prompt(json!(others)).await, prompt(json!([])).await);
    // Nothing is left that could be called.
    let required = json!({"tools": others, "tool_choice": "required"});
    let (status, _, named) = chat(&router, required).await.error();
    assert_eq!((status, named.as_deref()), (400, Some("tool_choice")));
    let (status, _, named) = chat(&router, json!({"tools": [{"type": "function"}]}))
        .await
        .error();
    assert_eq!((status, named.as_deref()), (400, Some("tools[0].function")));
}
