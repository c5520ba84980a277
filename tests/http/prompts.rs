//! What a prompt is made of: several prompts, truncation, special tokens, and where a conversation
//! ends. `/tokenize` and `/detokenize` are the reference.

use serde_json::{Value, json};
use sterna::api::{App, SamplingDefaults};

use crate::TEXT;
use crate::harness::*;

async fn tokens(server: &Server, body: Value) -> Vec<u64> {
    let answer = server.post("/tokenize", &body).await.ok();
    let tokens: Vec<u64> = serde_json::from_value(answer["tokens"].clone()).unwrap();
    assert_eq!(answer["count"], tokens.len());
    assert_eq!(answer["max_model_len"], MAX_MODEL_LEN);
    tokens
}

#[tokio::test]
async fn each_prompt_of_an_array_is_answered_as_if_it_were_alone() {
    let server = Server::new();
    let sampling = json!({
        "temperature": 2, "seed": 7, "max_tokens": 8, "return_token_ids": true, "logprobs": 1,
    });
    let prompts = [
        json!("one"),
        json!([20, 21, 22]),
        json!("three, and more of it"),
    ];
    for n in [1, 2] {
        let body = merged(sampling.clone(), json!({"n": n, "prompt": prompts}));
        let all = server.complete(body.clone()).await.ok();
        let mut expected = Vec::new();
        let mut prompt_tokens = 0;
        for prompt in &prompts {
            let body = merged(body.clone(), json!({ "prompt": prompt }));
            let alone = server.complete(body).await.ok();
            prompt_tokens += alone["usage"]["prompt_tokens"].as_u64().unwrap();
            expected.extend(alone["choices"].as_array().unwrap().clone());
        }
        for (index, choice) in expected.iter_mut().enumerate() {
            choice["index"] = index.into();
        }
        assert_eq!(all["choices"], json!(expected), "n = {n}");
        assert_eq!(all["usage"]["prompt_tokens"], prompt_tokens);
        assert_eq!(all["usage"]["completion_tokens"], 8 * 3 * n);

        let events = server
            .complete(merged(body, json!({"stream": true})))
            .await
            .events();
        for (index, choice) in expected.iter().enumerate() {
            let own = events.iter().map(|event| &event["choices"][0]);
            let own = own.filter(|choice| choice["index"] == index);
            let text: String = own.filter_map(|choice| choice["text"].as_str()).collect();
            assert_eq!(text, choice["text"], "choice {index}");
        }
    }
}

#[tokio::test]
async fn a_wrong_prompt_of_an_array_is_named() {
    let server = Server::new();
    let error = async |body: Value| server.complete(body).await.error();
    let invalid = |param: &str| (400, "invalid_value".to_owned(), Some(param.to_owned()));
    for (prompt, param) in [
        (json!(["a", 5]), "prompt[1]"),
        (json!(["a", []]), "prompt[1]"),
        (json!([[5], [309]]), "prompt[1]"),
        (json!(["a", "b", null]), "prompt[2]"),
        (json!(["a", {}]), "prompt[1]"),
        (json!(vec!["a"; 129]), "prompt"),
    ] {
        assert_eq!(
            error(json!({ "prompt": prompt })).await,
            invalid(param),
            "{prompt}"
        );
    }
    assert_eq!(
        error(json!({"prompt": vec!["a"; 65], "n": 2})).await,
        invalid("n")
    );
    let long = json!({"prompt": [[5], vec![5; 4096]]});
    let too_long = (
        400,
        "context_length_exceeded".to_owned(),
        Some("prompt[1]".to_owned()),
    );
    assert_eq!(error(long).await, too_long);
    let many = server
        .complete(json!({"prompt": vec!["a"; 64], "n": 2, "max_tokens": 1}))
        .await;
    assert_eq!(many.ok()["choices"].as_array().unwrap().len(), 128);
}

#[tokio::test]
async fn a_truncated_prompt_keeps_its_end() {
    let server = Server::new();
    let prompt: Vec<u32> = (20..60).collect();
    let used = async |more: Value| {
        let body = json!({"prompt": prompt, "max_tokens": 2, "return_token_ids": true});
        let answer = server.complete(merged(body, more)).await.ok();
        let prompt = answer["choices"][0]["prompt_token_ids"].clone();
        assert_eq!(
            answer["usage"]["prompt_tokens"],
            prompt.as_array().unwrap().len()
        );
        prompt
    };
    assert_eq!(
        used(json!({"truncate_prompt_tokens": 3})).await,
        json!([57, 58, 59])
    );
    for all in [json!(40), json!(1000), json!(-1), json!(null)] {
        assert_eq!(
            used(json!({"truncate_prompt_tokens": all})).await,
            json!(prompt)
        );
    }
    let long = vec![20; 5000];
    let to_fit = used(json!({"prompt": long, "truncate_prompt_tokens": -1})).await;
    assert_eq!(to_fit.as_array().unwrap().len() as u32, MAX_MODEL_LEN - 2);
    let refused = server.complete(json!({"truncate_prompt_tokens": 0})).await;
    let param = Some("truncate_prompt_tokens".into());
    assert_eq!(refused.error(), (400, "invalid_value".into(), param));
    let chat = json!({"truncate_prompt_tokens": 5, "max_tokens": 1});
    assert_eq!(server.chat(chat).await.ok()["usage"]["prompt_tokens"], 5);
}

#[tokio::test]
async fn special_tokens_of_a_raw_prompt_can_be_left_out() {
    let server = Server::new();
    let used = async |adds: Value| {
        let body = json!({"add_special_tokens": adds, "return_token_ids": true, "max_tokens": 1});
        server.complete(body).await.ok()["choices"][0]["prompt_token_ids"].clone()
    };
    let whole = tokens(&server, json!({"prompt": "Hello"})).await;
    assert_eq!(used(json!(true)).await, json!(whole));
    assert_eq!(used(json!(null)).await, json!(whole));
    assert_eq!(used(json!(false)).await, json!(whole[1..]));
    for body in [
        json!({"content": "Hello"}),
        json!({"prompt": "Hello", "add_special_tokens": false}),
        json!({"prompt": "Hello", "add_special": false}),
    ] {
        assert_eq!(tokens(&server, body).await, whole[1..]);
    }
    let added = json!({"content": "Hello", "add_special": true});
    assert_eq!(tokens(&server, added).await, whole);
}

#[tokio::test]
async fn a_conversation_can_end_without_a_new_message_or_be_continued() {
    let server = Server::new();
    let messages = json!([
        {"role": "user", "content": "Tell me a story."},
        {"role": "assistant", "content": "Once upon a time, "},
    ]);
    let body = |more: Value| merged(json!({ "messages": messages }), more);
    let text = async |more: Value| {
        let tokens = tokens(&server, body(more)).await;
        let answer = server
            .post("/detokenize", &json!({ "tokens": tokens }))
            .await
            .ok();
        assert_eq!(answer["prompt"], answer["content"]);
        answer["prompt"].as_str().unwrap().to_owned()
    };
    let next = text(json!({})).await;
    let last = text(json!({"add_generation_prompt": false})).await;
    let continued = text(json!({"continue_final_message": true})).await;
    assert!(
        next.starts_with(&last) && next.len() > last.len(),
        "{next:?} {last:?}"
    );
    assert!(
        last.starts_with(&continued) && last.len() > continued.len(),
        "{continued:?}"
    );
    assert!(
        continued.trim_end().ends_with("Once upon a time,"),
        "{continued:?}"
    );
    let both = json!({"continue_final_message": true, "add_generation_prompt": false});
    assert_eq!(text(both).await, continued);

    let chat = json!({"continue_final_message": true, "return_token_ids": true, "max_tokens": 1});
    let answer = server.chat(body(chat)).await.ok();
    let same = tokens(&server, body(json!({"continue_final_message": true}))).await;
    assert_eq!(answer["prompt_token_ids"], json!(same));

    let param = Some("continue_final_message".to_owned());
    for more in [
        json!({"continue_final_message": true, "add_generation_prompt": true}),
        json!({"continue_final_message": true, "messages": [{"role": "user", "content": " "}]}),
    ] {
        let refused = server.chat(body(more)).await;
        assert_eq!(
            refused.error(),
            (400, "invalid_value".into(), param.clone())
        );
    }
}

#[tokio::test]
async fn a_text_becomes_tokens_and_again_the_text() {
    let server = Server::new();
    let body = json!({"prompt": SCRIPT, "return_token_strs": true, "model": "gpt-x"});
    let answer = server.post("/tokenize", &body).await.ok();
    let texts = answer["token_strs"].as_array().unwrap();
    assert_eq!(texts.len(), answer["tokens"].as_array().unwrap().len());
    let ids: Vec<u32> = serde_json::from_value(answer["tokens"].clone()).unwrap();
    assert_eq!(ids, server.tokenizer.encode_prompt(SCRIPT).unwrap());
    let text = server
        .post("/detokenize", &json!({ "tokens": ids[1..] }))
        .await
        .ok();
    assert_eq!(text["prompt"], SCRIPT);
    let bare = server.post("/tokenize", &json!({"prompt": "a"})).await.ok();
    assert_eq!(bare["token_strs"], Value::Null);
    let version = server.get("/version").await.ok();
    assert_eq!(version, json!({"version": env!("CARGO_PKG_VERSION")}));
}

#[tokio::test]
async fn a_wrong_text_or_token_is_refused_by_the_name_of_its_field() {
    let server = Server::new();
    let error = async |path: &str, body: Value| {
        let (status, code, param) = server.post(path, &body).await.error();
        (status, code, param.unwrap_or_default())
    };
    for (path, body, code, param) in [
        ("/tokenize", json!({}), "invalid_value", "prompt"),
        ("/tokenize", json!({"prompt": 5}), "invalid_value", "prompt"),
        (
            "/tokenize",
            json!({"prompt": "a", "content": "a"}),
            "invalid_value",
            "content",
        ),
        (
            "/tokenize",
            json!({"messages": []}),
            "invalid_value",
            "messages",
        ),
        (
            "/tokenize",
            json!({"prompt": "a", "tools": [{}]}),
            "unsupported_parameter",
            "tools",
        ),
        (
            "/tokenize",
            json!({"prompt": "x".repeat(1 << 20)}),
            "context_length_exceeded",
            "prompt",
        ),
        ("/detokenize", json!({}), "invalid_value", "tokens"),
        (
            "/detokenize",
            json!({"tokens": "a"}),
            "invalid_value",
            "tokens",
        ),
        (
            "/detokenize",
            json!({"tokens": [309]}),
            "invalid_value",
            "tokens",
        ),
        (
            "/detokenize",
            json!({"tokens": vec![5; 4097]}),
            "invalid_value",
            "tokens",
        ),
    ] {
        assert_eq!(
            error(path, body).await,
            (400, code.into(), param.into()),
            "{path}"
        );
    }
    for path in ["/tokenize", "/detokenize"] {
        let body = json!({"prompt": "a", "tokens": [5], "model": "other"});
        assert_eq!(
            error(path, body).await,
            (404, "model_not_found".into(), "model".into())
        );
    }
}

#[tokio::test]
async fn logprobs_can_show_token_ids() {
    let server = Server::new();
    let ids = json!({"return_tokens_as_token_ids": true, "return_token_ids": true});
    let more = merged(ids, json!({"max_tokens": 20}));
    let answer = server
        .complete(merged(more.clone(), json!({"logprobs": 2})))
        .await
        .ok();
    let choice = &answer["choices"][0];
    let shown: Vec<String> = (choice["token_ids"].as_array().unwrap().iter())
        .map(|id| format!("token_id:{id}"))
        .collect();
    assert_eq!(choice["logprobs"]["tokens"], json!(shown));
    let top = choice["logprobs"]["top_logprobs"][0].as_object().unwrap();
    assert!(
        top.len() == 2 && top.keys().all(|token| token.starts_with("token_id:")),
        "{top:?}"
    );
    let chat = server
        .chat(merged(more, json!({"logprobs": true, "top_logprobs": 1})))
        .await
        .ok();
    let choice = &chat["choices"][0];
    for (id, entry) in (choice["token_ids"].as_array().unwrap().iter())
        .zip(choice["logprobs"]["content"].as_array().unwrap())
    {
        assert_eq!(entry["token"], format!("token_id:{id}"));
        assert_eq!(entry["top_logprobs"][0]["token"], entry["token"]);
    }
    assert!(
        server.post(TEXT, &json!({"prompt": "a"})).await.ok()["choices"][0]["logprobs"].is_null()
    );
}

#[tokio::test]
async fn a_checkpoints_sampling_parameters_count_where_a_request_has_none() {
    let greedy = SamplingDefaults::read(br#"{"top_k": 1, "max_new_tokens": 3}"#).unwrap();
    let server = Server::build(App::loading(), Server::limits(8), 64, 0, greedy);
    let drawn = async |body: Value| {
        let body = merged(json!({"prompt": "Hello", "return_token_ids": true}), body);
        let answer = server.post(TEXT, &body).await.ok();
        answer["choices"][0]["token_ids"]
            .as_array()
            .unwrap()
            .clone()
    };
    let expected = drawn(json!({"temperature": 0})).await;
    assert_eq!(expected.len(), 3);
    assert_eq!(drawn(json!({})).await, expected);
    assert_eq!(drawn(json!({"max_tokens": 2})).await, expected[..2]);
    let hot = json!({"temperature": 2, "top_k": 0, "max_tokens": 40, "seed": 1});
    let greedy = drawn(json!({"max_tokens": 40})).await;
    assert_ne!(drawn(hot).await, greedy);
}

/// Before, a server whose vocabulary has one long token encoded such a text whole.
#[tokio::test]
async fn every_route_refuses_a_text_that_is_far_too_long_before_it_is_encoded() {
    let server = Server::new();
    let digits = "7".repeat(70_000); // As many tokens. The longest token has 19 bytes.
    let messages = json!([{"role": "user", "content": digits}]);
    let chat = json!({"messages": messages, "max_tokens": 2});
    for (path, body) in [
        ("/v1/completions", json!({"prompt": digits})),
        ("/v1/completions", json!({"prompt": ["a", digits]})),
        ("/v1/completions/render", json!({"prompt": digits})),
        ("/v1/chat/completions", chat.clone()),
        ("/v1/chat/completions/render", chat.clone()),
        ("/v1/messages", chat.clone()),
        ("/v1/messages/count_tokens", json!({"messages": messages})),
        ("/v1/responses", json!({"input": digits})),
        ("/tokenize", json!({"prompt": digits})),
        (
            "/tokenize",
            json!({"content": digits, "parse_special": true}),
        ),
        ("/tokenize", json!({"messages": messages})),
        ("/completion", json!({"prompt": digits})),
        ("/generate", json!({"text": digits})),
    ] {
        let answer = server.post(path, &body).await;
        assert_eq!(answer.status, 400, "{path}");
        let text = answer.body.to_string();
        let found = "The prompt has 7";
        assert!(text.contains(found), "{path}: {text}");
        let least = format!("are at least {} tokens", 2 * MAX_MODEL_LEN + 1);
        assert!(text.contains(&least), "{path}: {text}");
    }
    let cut = json!({"prompt": "7".repeat(8_000), "max_tokens": 2, "truncate_prompt_tokens": 100});
    let answer = server.complete(cut.clone()).await.ok();
    assert_eq!(answer["usage"]["prompt_tokens"], 100);
    let refused = server
        .complete(merged(cut, json!({"prompt": digits})))
        .await;
    let reason = "does not encode a text that is far too long, not even to truncate it.";
    assert!(refused.body.contains(reason), "{}", refused.body);
    let param = Some("prompt".to_owned());
    assert_eq!(
        refused.error(),
        (400, "context_length_exceeded".to_owned(), param)
    );
}

/// Before, each prompt took a place, and such a request was told to retry for ever.
#[tokio::test]
async fn a_request_of_more_prompts_than_places_runs_on_an_idle_server() {
    let server = Server::start(App::loading(), 4, 8);
    let prompts: Vec<String> = (0..70).map(|number| format!("prompt {number}")).collect();
    let body = json!({"prompt": prompts, "max_tokens": 1});
    let answer = server.complete(body).await.ok();
    assert_eq!(answer["choices"].as_array().map(Vec::len), Some(70));
    assert_eq!(answer["usage"]["completion_tokens"], 70);
}
