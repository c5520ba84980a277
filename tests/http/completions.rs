//! `POST /v1/completions`: its answers, the forms of a prompt, seeds, usage and default lengths.

use std::sync::Arc;

use axum::http::Method;
use serde_json::{Value, json};
use sterna::api::{self, App, ModelCard, SamplingDefaults, Serving};
use sterna::text::TextFiles;
use sterna::tools::ToolFormat;

use crate::harness::*;
use crate::{CHAT, TEXT};

#[tokio::test]
async fn a_completion_has_openais_shape() {
    let server = Server::new();
    let answer = server.complete(json!({"prompt": "Hello"})).await.ok();
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(answer["object"], "text_completion");
    let prompt_tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    let text = server.script(prompt_tokens, 16);
    let choice = json!({"index": 0, "text": text, "logprobs": null, "finish_reason": "length"});
    assert_eq!(answer["choices"], json!([choice]));
    assert_eq!(answer["usage"]["completion_tokens"], 16);
}

#[tokio::test]
async fn all_forms_of_a_prompt_give_the_same_answer() {
    let server = Server::new();
    let tokens = server.tokenizer.encode_prompt("Hello").unwrap();
    let forms = [
        json!("Hello"),
        json!(["Hello"]),
        json!(tokens),
        json!([tokens]),
    ];
    let mut answers = Vec::new();
    for form in forms {
        let answer = server
            .complete(json!({"prompt": form, "return_token_ids": true}))
            .await
            .ok();
        assert_eq!(answer["choices"][0]["prompt_token_ids"], json!(tokens));
        assert_eq!(
            answer["choices"][0]["token_ids"].as_array().unwrap().len(),
            16
        );
        answers.push(answer["choices"].clone());
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]));
    let parts = json!([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]);
    let parts = json!([{"role": "user", "content": parts}]);
    let in_parts = server
        .chat(json!({"messages": parts, "max_tokens": 5}))
        .await
        .ok();
    assert_eq!(
        in_parts["choices"],
        server.chat(json!({"max_tokens": 5})).await.ok()["choices"]
    );
}

#[tokio::test]
async fn usage_counts_cached_tokens_and_grows_along_a_stream() {
    let server = Server::new();
    let prompt = "one two three ".repeat(40);
    let body = json!({"prompt": prompt, "max_tokens": 4});
    let fresh = server.complete(body.clone()).await.ok();
    assert_eq!(fresh["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let again = server.complete(body.clone()).await.ok();
    assert!(
        again["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
            >= 16
    );
    assert_eq!(again["choices"], fresh["choices"]);

    let usage = json!({"include_usage": true, "continuous_usage_stats": true});
    let options = json!({"stream": true, "stream_options": usage});
    let events = server.complete(merged(body, options)).await.events();
    let counts: Vec<u64> = events
        .iter()
        .map(|event| event["usage"]["completion_tokens"].as_u64().unwrap())
        .collect();
    assert!(
        counts.is_sorted() && counts.last() == Some(&4),
        "{counts:?}"
    );
}

#[tokio::test]
async fn the_seed_determines_the_drawn_tokens() {
    let server = Server::new();
    let drawn = async |seed: Value| {
        let hot = json!({"temperature": 2, "max_tokens": 400, "return_token_ids": true});
        let body = merged(hot, json!({ "seed": seed }));
        server.complete(body).await.ok()["choices"][0]["token_ids"].clone()
    };
    assert_eq!(drawn(json!(-7)).await, drawn(json!(-7)).await);
    assert_ne!(drawn(json!(1)).await, drawn(json!(2)).await);
    assert_ne!(drawn(json!(null)).await, drawn(json!(null)).await);
}

#[tokio::test]
async fn a_long_prompt_is_answered_or_rejected_by_its_length() {
    let server = Server::new();
    let prompt = "the capital ".repeat(1500);
    let tokens = server.tokenizer.encode_prompt(&prompt).unwrap().len();
    let answer = server
        .complete(json!({"prompt": prompt, "max_tokens": 2}))
        .await;
    if tokens as u32 + 2 > MAX_MODEL_LEN {
        assert_eq!(answer.error().1, "context_length_exceeded");
    } else {
        assert_eq!(answer.ok()["usage"]["prompt_tokens"], tokens);
    }
    let too_long = server
        .complete(json!({"prompt": "x".repeat(1 << 20)}))
        .await;
    assert_eq!(
        too_long.error(),
        (400, "context_length_exceeded".into(), Some("prompt".into()))
    );
}

#[tokio::test]
async fn the_default_output_length_fits_the_rest_of_the_context() {
    let server = Server::new();
    let tokens = vec![20; MAX_MODEL_LEN as usize - 3];
    let shortened = server.complete(json!({"prompt": tokens})).await.ok();
    assert_eq!(
        shortened["usage"]["completion_tokens"], 3,
        "the default length is cut to the rest of the context"
    );
    let answer = server.chat(json!({"ignore_eos": true})).await.ok();
    assert_eq!(answer["usage"]["total_tokens"], MAX_MODEL_LEN);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn text_that_needs_a_token_beyond_the_vocabulary_is_rejected() {
    let server = Server::new();
    // A model whose tokenizer has more tokens than its logits.
    let vocabulary = *server
        .tokenizer
        .encode_prompt("Hello")
        .unwrap()
        .iter()
        .max()
        .unwrap();
    let files = TextFiles {
        tokenizer: TOKENIZER,
        config: Some(CONFIG),
        chat_template: None,
        tool_template: None,
    };
    let (tokenizer, chat_template) = files.load(vocabulary).unwrap();
    let app = App::loading();
    let tokenizer = Arc::new(tokenizer);
    app.serve(Serving {
        tool_format: ToolFormat::find(chat_template.as_ref(), &tokenizer),
        model: ModelCard {
            name: "small".into(),
            aliases: Vec::new(),
            max_model_len: MAX_MODEL_LEN,
            vocabulary,
            stop_tokens: vec![1],
            ..ModelCard::default()
        },
        grammars: grammars::start(&tokenizer, &[1]),
        tokenizer,
        chat_template,
        defaults: SamplingDefaults::default(),
        engine: server.engine.clone(),
        metrics: server.metrics.clone(),
    });
    let router = api::router(app);
    let post = async |path: &str, body: Value| {
        let json = [("content-type", "application/json")];
        let answer = send(&router, Method::POST, path, &json, body.to_string()).await;
        answer.error()
    };
    let invalid = |param: &str| (400, "invalid_value".to_owned(), Some(param.to_owned()));
    assert_eq!(
        post(TEXT, json!({"prompt": "Hello"})).await,
        invalid("prompt")
    );
    let messages = json!([{"role": "user", "content": "Hello"}]);
    assert_eq!(
        post(CHAT, json!({"messages": messages})).await,
        invalid("messages")
    );
    assert_eq!(
        post(TEXT, json!({"prompt": [vocabulary]})).await,
        invalid("prompt")
    );
}
