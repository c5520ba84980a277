//! Reasoning: what stands between `<think>` and `</think>` has a field of its own in a chat answer.

use serde_json::{Value, json};
use sterna::engine::TokenId;
use sterna::text::Tokenizer;

use std::collections::HashMap;

use crate::harness::*;
use crate::speaker::{self, chat, post, tokenizer_with};
use crate::{CHAT, TEXT};

const OPEN: TokenId = VOCABULARY;
const CLOSE: TokenId = VOCABULARY + 1;

/// As in Qwen 3, with a variable that makes it open the reasoning.
const TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\
    {% if message.reasoning_content is string %}({{ message.reasoning_content }}){% endif %}\
    {% endfor %}assistant:\n\
    {% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n\
    {% elif opened %}<think>\n{% endif %}";

/// How a checkpoint has the tags.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Tags {
    /// Added tokens that are not special, as in Qwen 3.
    Added,
    Special,
    Text,
    /// Neither the vocabulary nor the template has them.
    Missing,
}

fn tokenizer_json(tags: Tags) -> Vec<u8> {
    match tags {
        Tags::Added | Tags::Special => {
            tokenizer_with(&["<think>", "</think>"], tags == Tags::Special)
        }
        Tags::Text | Tags::Missing => TOKENIZER.to_vec(),
    }
}

/// Returns the tokens of an answer. A tag is its token if the checkpoint has one.
fn answer_tokens(tokenizer: &Tokenizer, tags: Tags, answer: &str) -> Vec<TokenId> {
    let plain = |text: &str| tokenizer.encode_prompt(text).unwrap().split_off(1);
    if let Tags::Text | Tags::Missing = tags {
        return plain(answer);
    }
    let mut tokens = Vec::new();
    for part in answer.split_inclusive("</think>") {
        let (part, close) = match part.strip_suffix("</think>") {
            Some(part) => (part, Some(CLOSE)),
            None => (part, None),
        };
        let (before, after) = part
            .split_once("<think>")
            .map_or((part, None), |(a, b)| (a, Some(b)));
        tokens.extend(plain(before));
        if let Some(after) = after {
            tokens.push(OPEN);
            tokens.extend(plain(after));
        }
        tokens.extend(close);
    }
    tokens
}

/// Starts a server whose model says `answer`.
fn start(tags: Tags, answer: &str) -> axum::Router {
    let json = tokenizer_json(tags);
    let template = match tags {
        Tags::Missing => TEMPLATE.replace("think>", "thought>"),
        _ => TEMPLATE.to_owned(),
    };
    speaker::start(&json, &template, CLOSE + 1, |tokenizer| {
        answer_tokens(tokenizer, tags, answer)
    })
}

/// Returns the reasoning, the content and the log-probabilities of a choice, whole and streamed,
/// which must be equal.
async fn both(router: &axum::Router, more: Value) -> (String, Option<String>, Vec<Value>) {
    let more = merged(json!({"logprobs": true}), more);
    let whole = chat(router, more.clone()).await.ok();
    let choice = &whole["choices"][0];
    let message = &choice["message"];
    assert_eq!(
        message["reasoning"], message["reasoning_content"],
        "{message}"
    );
    let reasoning = message["reasoning"].as_str().unwrap_or_default().to_owned();
    let content = message["content"].as_str().map(str::to_owned);
    let logprobs = choice["logprobs"]["content"].as_array().unwrap().clone();

    let events = chat(router, merged(more, json!({"stream": true})))
        .await
        .events();
    let (mut streamed, mut streamed_logprobs) = ((String::new(), String::new()), Vec::new());
    for event in &events {
        let choice = &event["choices"][0];
        let delta = &choice["delta"];
        assert_eq!(delta["reasoning"], delta["reasoning_content"], "{event}");
        streamed.0 += delta["reasoning"].as_str().unwrap_or_default();
        streamed.1 += delta["content"].as_str().unwrap_or_default();
        let logprobs = choice["logprobs"]["content"].as_array();
        streamed_logprobs.extend(logprobs.into_iter().flatten().cloned());
    }
    let expected = (reasoning.clone(), content.clone().unwrap_or_default());
    assert_eq!(streamed, expected, "{events:?}");
    assert_eq!(streamed_logprobs, logprobs);
    (reasoning, content, logprobs)
}

fn parts(reasoning: &str, content: Option<&str>) -> (String, Option<String>) {
    (reasoning.to_owned(), content.map(str::to_owned))
}

#[tokio::test]
async fn a_budget_ends_the_reasoning_after_exactly_so_many_tokens() {
    let long = format!("<think>{}", "hm ".repeat(60));
    for (tags, opened) in [
        (Tags::Added, false),
        (Tags::Special, true),
        (Tags::Text, false),
        (Tags::Text, true),
    ] {
        // The model never closes its reasoning.
        let answer = if opened {
            &long["<think>".len()..]
        } else {
            &long
        };
        let router = start(tags, answer);
        let kwargs = json!({"chat_template_kwargs": {"opened": opened}});
        for budget in [0, 1, 7, 20] {
            for field in ["thinking_token_budget", "thinking_budget_tokens"] {
                let more = merged(
                    kwargs.clone(),
                    json!({field: budget, "return_token_ids": true}),
                );
                let (reasoning, content, _) = both(&router, more.clone()).await;
                let choice = chat(&router, more).await.ok()["choices"][0].clone();
                let ids = choice["token_ids"].as_array().unwrap();
                let texts = json!({"tokens": ids});
                let text = post(&router, "/detokenize", &texts).await.ok()["prompt"].clone();
                let (inside, after) = text.as_str().unwrap().split_once("</think>").unwrap();
                let inside = inside.strip_prefix("<think>").unwrap_or(inside);
                assert_eq!(inside, reasoning, "{tags:?} {budget}");
                let after = after.trim_end_matches("<|eot_id|>");
                assert_eq!(content.unwrap(), after, "{tags:?} {budget}");
                let tokens = json!({"content": reasoning});
                let count = post(&router, "/tokenize", &tokens).await.ok()["count"].clone();
                assert_eq!(count, budget, "{tags:?} {reasoning:?}");
            }
        }
        let (reasoning, content, _) = both(
            &router,
            merged(
                kwargs,
                json!({
                    "thinking_token_budget": -1, "max_tokens": 90,
                }),
            ),
        )
        .await;
        assert!(reasoning.len() > 60 && content.is_none(), "{tags:?}");
    }
}

#[tokio::test]
async fn structured_answers_and_calls_follow_a_budget() {
    let schema = json!({
        "type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"],
    });
    let format = json!({"response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": schema},
    }});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": schema}});
    let calls = json!({"tools": [tool], "tool_choice": "required", "parallel_tool_calls": false});
    let long = format!("<think>{}", "hm ".repeat(60));
    for tags in [Tags::Added, Tags::Special, Tags::Text] {
        let router = start(tags, &long);
        let budget = json!({"thinking_token_budget": 9, "seed": 3});
        let (reasoning, content, _) = both(&router, merged(format.clone(), budget.clone())).await;
        assert!(
            reasoning.starts_with("hm hm") && reasoning.len() < 40,
            "{reasoning}"
        );
        let value: Value = serde_json::from_str(&content.unwrap()).unwrap();
        assert!(["b", "c"].contains(&value["a"].as_str().unwrap()));
        let answer = chat(&router, merged(calls.clone(), budget)).await.ok();
        let message = &answer["choices"][0]["message"];
        assert_eq!(message["reasoning"], reasoning, "{message}");
        assert_eq!(message["tool_calls"][0]["function"]["name"], "f");
    }
}

#[tokio::test]
async fn a_budget_gives_the_same_tokens_in_any_company() {
    let router = start(Tags::Text, &format!("<think>{}", "hm ".repeat(60)));
    let ask = |budget: u32| {
        let more = json!({"thinking_token_budget": budget, "return_token_ids": true, "seed": 1});
        let router = &router;
        async move { chat(router, more).await.ok()["choices"][0]["token_ids"].clone() }
    };
    let alone = [ask(3).await, ask(11).await, ask(40).await];
    let together = tokio::join!(ask(3), ask(11), ask(40), ask(3), ask(11), ask(40));
    assert_eq!(alone, [together.0, together.1, together.2]);
    assert_eq!(alone, [together.3, together.4, together.5]);
}

#[tokio::test]
async fn an_effort_is_a_variable_of_the_template() {
    let template = "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}\
        {{ reasoning_effort }}:{{ messages[0].content }}";
    let router = speaker::start(TOKENIZER, template, VOCABULARY, |_| Vec::new());
    for (more, expected) in [
        (json!({}), ":Why?"),
        (json!({"reasoning_effort": "high"}), "high:Why?"),
        (json!({"reasoning_effort": "none"}), "offnone:Why?"),
        (
            json!({"reasoning_effort": "none", "enable_thinking": true}),
            "none:Why?",
        ),
        (
            json!({
                "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "own"},
            }),
            "own:Why?",
        ),
    ] {
        let rendered = chat(
            &router,
            merged(more.clone(), json!({"return_token_ids": true})),
        );
        let tokens = rendered.await.ok()["prompt_token_ids"].clone();
        let text = json!({"tokens": tokens});
        let text = post(&router, "/detokenize", &text).await.ok();
        assert_eq!(text["prompt"], expected, "{more}");
    }
    let (status, _, param) = chat(&router, json!({"reasoning_effort": "huge"}))
        .await
        .error();
    assert_eq!((status, param.as_deref()), (400, Some("reasoning_effort")));
}

const ANSWER: &str = "<think>\nÄ, 你好 < why </ not?\n</think>\n\nBecause <think> is a tag.";
const REASONING: &str = "\nÄ, 你好 < why </ not?\n";
const CONTENT: &str = "Because <think> is a tag.";

#[tokio::test]
async fn reasoning_and_content_have_fields_of_their_own() {
    for tags in [Tags::Added, Tags::Special, Tags::Text] {
        let router = start(tags, ANSWER);
        let (reasoning, content, logprobs) = both(&router, json!({})).await;
        // A special token is not spelled out.
        let expected = match tags {
            Tags::Special => CONTENT.replace("<think>", ""),
            _ => CONTENT.to_owned(),
        };
        let found = (reasoning, content);
        assert_eq!(found, parts(REASONING, Some(&expected)), "{tags:?}");
        let whole = chat(&router, json!({})).await.ok();
        let tokens = whole["usage"]["completion_tokens"].as_u64().unwrap() as usize;
        assert_eq!(
            logprobs.len(),
            tokens - 1,
            "{tags:?}: all except the end of the turn"
        );
        let hidden = chat(&router, json!({"include_reasoning": false}))
            .await
            .ok();
        let message = json!({"role": "assistant", "content": expected});
        assert_eq!(hidden["choices"][0]["message"], message, "{tags:?}");
    }
}

#[tokio::test]
async fn a_model_without_the_tags_has_content_only() {
    let router = start(Tags::Missing, ANSWER);
    let whole = chat(&router, json!({})).await.ok();
    let message = json!({"role": "assistant", "content": ANSWER});
    assert_eq!(whole["choices"][0]["message"], message);
    let router = start(Tags::Added, "No tag at all.");
    let whole = chat(&router, json!({})).await.ok();
    let message = json!({"role": "assistant", "content": "No tag at all."});
    assert_eq!(whole["choices"][0]["message"], message);
}

#[tokio::test]
async fn an_answer_cut_after_any_token_is_split_alike() {
    for tags in [Tags::Added, Tags::Special, Tags::Text] {
        let router = start(tags, ANSWER);
        let whole = chat(&router, json!({})).await.ok();
        let tokens = whole["usage"]["completion_tokens"].as_u64().unwrap();
        for max_tokens in 1..tokens {
            let cut = json!({"max_tokens": max_tokens});
            let (reasoning, content, logprobs) = both(&router, cut).await;
            assert_eq!(logprobs.len() as u64, max_tokens, "{tags:?}");
            let message = &whole["choices"][0]["message"];
            let all = message["reasoning"].as_str().unwrap();
            // A half tag or character at the end is text.
            let known = reasoning.trim_end_matches(|c| "</think>\u{fffd}".contains(c));
            assert!(all.starts_with(known), "{tags:?}: {reasoning:?}");
            if let Some(content) = content.filter(|text| !text.starts_with('<')) {
                let all = message["content"].as_str().unwrap();
                let known = content.trim_end_matches('\u{fffd}');
                assert!(all.starts_with(known), "{tags:?}: {content:?}");
            }
        }
    }
}

#[tokio::test]
async fn the_template_may_open_the_reasoning_or_leave_it_out() {
    for tags in [Tags::Added, Tags::Special, Tags::Text] {
        let opened = json!({"chat_template_kwargs": {"opened": true}});
        let router = start(tags, "why\n</think>\n\nSo.");
        let (reasoning, content, _) = both(&router, opened.clone()).await;
        assert_eq!(
            (reasoning, content),
            parts("why\n", Some("So.")),
            "{tags:?}"
        );
        let router = start(tags, "never closed");
        let (reasoning, content, _) = both(&router, opened).await;
        assert_eq!(
            (reasoning, content),
            parts("never closed", None),
            "{tags:?}"
        );
        for off in [
            json!({"enable_thinking": false}),
            json!({"chat_template_kwargs": {"enable_thinking": false}}),
            json!({"chat_template_kwargs": {"enable_thinking": false}, "enable_thinking": true}),
        ] {
            let (reasoning, content, _) = both(&router, off).await;
            assert_eq!(
                (reasoning, content),
                parts("", Some("never closed")),
                "{tags:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_model_thinks_before_it_writes_what_a_format_asks_for() {
    for tags in [Tags::Added, Tags::Special, Tags::Text] {
        for (answer, more) in [
            ("<think>\nHm {.\n</think>\n\n{\"a\": 1}", json!({})),
            (
                "\nHm {.\n</think>\n\n{\"a\": 1}",
                json!({"chat_template_kwargs": {"opened": true}}),
            ),
        ] {
            let router = start(tags, answer);
            let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}},
                "required": ["a"], "additionalProperties": false});
            let format = json!({"type": "json_schema", "json_schema": {"schema": schema}});
            let more = merged(more, json!({"response_format": format}));
            let (reasoning, content, _) = both(&router, more).await;
            let expected = parts("\nHm {.\n", Some("{\"a\": 1}"));
            assert_eq!((reasoning, content), expected, "{tags:?}");
        }
        // Neither a model that does not think nor one that may not is made to think.
        let object = json!({"response_format": {"type": "json_object"}});
        for more in [json!({}), json!({"enable_thinking": false})] {
            let router = start(tags, "{\"a\": 1}");
            let (reasoning, content, _) = both(&router, merged(more, object.clone())).await;
            assert_eq!(
                (reasoning, content),
                parts("", Some("{\"a\": 1}")),
                "{tags:?}"
            );
        }
        let router = start(tags, "<think>x</think>{}");
        let off = merged(json!({"enable_thinking": false, "max_tokens": 9}), object);
        let (reasoning, content, _) = both(&router, off).await;
        assert_eq!(reasoning, "", "{tags:?}");
        assert!(content.unwrap().starts_with('{'), "{tags:?}");
    }
}

#[tokio::test]
async fn stop_strings_end_the_reasoning_too() {
    for tags in [Tags::Added, Tags::Text] {
        let router = start(tags, ANSWER);
        for (stop, reasoning, content) in [
            ("why", "\nÄ, 你好 < ", None),
            ("</think>", REASONING, None),
            ("\n</think>", "\nÄ, 你好 < why </ not?", None),
            ("think>\n\n", "\nÄ, 你好 < why </ not?\n", None),
            ("Bec", REASONING, None),
            ("cau", REASONING, Some("Be")),
        ] {
            let found = both(&router, json!({"stop": [stop]})).await;
            let text = found
                .0
                .strip_suffix("</")
                .filter(|_| stop.starts_with("think"));
            let found = (text.unwrap_or(&found.0).to_owned(), found.1);
            assert_eq!(found, parts(reasoning, content), "{tags:?} {stop:?}");
        }
    }
}

#[tokio::test]
async fn completions_are_not_split() {
    let router = start(Tags::Added, "<think>a</think>b");
    let body = json!({"prompt": "x", "max_tokens": 50, "temperature": 0});
    let answer = post(&router, TEXT, &body).await.ok();
    assert_eq!(answer["choices"][0]["text"], "<think>a</think>b");
}

#[tokio::test]
async fn reasoning_that_a_client_sends_back_reaches_the_template() {
    let router = start(Tags::Added, "x");
    let tokens = async |assistant: Value| {
        let user = json!({"role": "user", "content": "a"});
        let body = json!({"messages": [user, assistant, user], "max_tokens": 1});
        let answer = post(&router, CHAT, &body).await.ok();
        answer["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let said = |name: &str| json!({"role": "assistant", "content": "b", name: "because"});
    let without = tokens(said("other")).await;
    let with = tokens(said("reasoning_content")).await;
    assert!(with > without);
    assert_eq!(tokens(said("reasoning")).await, with);
    let user = json!({"role": "user", "content": "b", "reasoning_content": "because"});
    assert!(tokens(user).await < with, "only an assistant has reasoned");
}

#[tokio::test]
async fn template_variables_that_the_server_cannot_use_are_refused_by_name() {
    let router = start(Tags::Added, "x");
    let long = "x".repeat(257);
    let many: HashMap<String, bool> = (0..17).map(|i| (format!("v{i}"), true)).collect();
    for (kwargs, expected) in [
        (json!(5), "must be an object; got the number 5."),
        (json!([]), "must be an object; got an array."),
        (json!({"a": [1]}), "'a' is an array."),
        (json!({"a": {}}), "'a' is an object."),
        (
            json!({"a": long.clone()}),
            "at most 256 bytes; 'a' has 257.",
        ),
        (
            json!({long: 1}),
            "keys of at most 256 bytes; got one of 257.",
        ),
        (json!(many), "at most 16 entries; got 17."),
        (
            json!({"messages": 1}),
            "must not set 'messages', which the server sets itself.",
        ),
        (
            json!({"bos_token": "x"}),
            "must not set 'bos_token', which the server sets itself.",
        ),
        (
            json!({"a": "<think>"}),
            "the text of 'a' contains a control token",
        ),
    ] {
        let answer = chat(&router, json!({"chat_template_kwargs": kwargs})).await;
        let (status, code, param) = answer.error();
        assert_eq!(
            (status, code.as_str()),
            (400, "invalid_value"),
            "{}",
            answer.body
        );
        assert_eq!(
            param.as_deref(),
            Some("chat_template_kwargs"),
            "{}",
            answer.body
        );
        assert!(
            answer.body.contains(expected),
            "{expected}: {}",
            answer.body
        );
    }
    for kwargs in [
        json!(null),
        json!({}),
        json!({"a": null, "b": 1.5, "c": -2, "d": "x"}),
    ] {
        chat(&router, json!({"chat_template_kwargs": kwargs}))
            .await
            .ok();
    }
}
