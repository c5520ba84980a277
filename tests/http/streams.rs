//! Streams: they say the same as whole answers, and end correctly.

use std::sync::atomic::Ordering;

use axum::body::{Body, to_bytes};
use axum::http::Request;
use serde_json::{Value, json};
use sterna::api::App;
use tower::ServiceExt;

use crate::harness::*;
use crate::{CHAT, TEXT};

fn finish_reason(events: &[Value]) -> &str {
    let reasons: Vec<&str> = events
        .iter()
        .filter_map(|event| event["choices"][0]["finish_reason"].as_str())
        .collect();
    assert_eq!(reasons.len(), 1, "a choice has one finish reason");
    reasons[0]
}

#[tokio::test]
async fn streamed_text_equals_the_text_of_the_whole_answer() {
    let server = Server::new();
    let mut stopped = 0;
    for max_tokens in [1, 2, 3, 7, 20, 21, 22, 23, 24, 25, 90] {
        for stop in [
            json!(null),
            json!("two"),
            json!(["e, n", "好 "]),
            json!(["👧", "👩"]),
            json!("\u{200d}"),
            json!("\u{FFFD}"),
        ] {
            for include in [false, true] {
                let body = json!({
                    "max_tokens": max_tokens,
                    "stop": stop,
                    "include_stop_str_in_output": include,
                });
                let whole = server.chat(body.clone()).await.ok();
                let events = server
                    .chat(merged(body.clone(), json!({"stream": true})))
                    .await
                    .events();
                let choice = &whole["choices"][0];
                assert_eq!(
                    streamed_text(&events),
                    choice["message"]["content"].as_str().unwrap(),
                    "{body}"
                );
                assert_eq!(finish_reason(&events), choice["finish_reason"], "{body}");
                let whole = server.complete(body.clone()).await.ok();
                let events = server
                    .complete(merged(body.clone(), json!({"stream": true})))
                    .await
                    .events();
                let choice = &whole["choices"][0];
                assert_eq!(
                    streamed_text(&events),
                    choice["text"].as_str().unwrap(),
                    "{body}"
                );
                assert_eq!(finish_reason(&events), choice["finish_reason"], "{body}");
                stopped += usize::from(choice["finish_reason"] == "stop");
            }
        }
    }
    assert!(
        stopped > 20,
        "only {stopped} answers ended with a stop string"
    );
}

#[tokio::test]
async fn no_delta_splits_a_character() {
    let server = Server::new();
    let events = server
        .chat(json!({"max_tokens": 200, "stream": true}))
        .await
        .events();
    assert!(events.len() < 200, "no token was a part of a character");
    let text = streamed_text(&events);
    assert!(text.contains("👩\u{200d}👩\u{200d}👧"));
    assert!(
        !text.trim_matches('\u{FFFD}').contains('\u{FFFD}'),
        "a delta split a character: {text}"
    );
}

#[tokio::test]
async fn streamed_token_ids_equal_those_of_the_whole_answer() {
    let server = Server::new();
    let end = json!({"max_tokens": 50, "stop": "two", "return_token_ids": true});
    let whole = server.chat(end.clone()).await.ok();
    let events = server
        .chat(merged(end, json!({"stream": true})))
        .await
        .events();
    let ids = |event: &Value| {
        event["choices"][0]["token_ids"]
            .as_array()
            .cloned()
            .unwrap_or_default()
    };
    let streamed: Vec<Value> = events.iter().flat_map(ids).collect();
    assert_eq!(json!(streamed), whole["choices"][0]["token_ids"]);
    assert_eq!(json!(streamed.len()), whole["usage"]["completion_tokens"]);
    assert_eq!(events[0]["prompt_token_ids"], whole["prompt_token_ids"]);
}

#[tokio::test]
async fn speculative_decoding_does_not_change_the_answer() {
    let (plain, drafting) = (Server::new(), Server::drafting(App::loading(), 8, 64, 6));
    let stop_token = plain.tokenizer.encode_prompt(SCRIPT).unwrap()[20];
    let comparable = |mut answer: Value| {
        let fields = answer.as_object_mut().unwrap();
        fields.remove("id");
        fields.remove("created");
        answer
    };
    for options in [
        json!({}),
        json!({"stop": "two"}),
        json!({"stop": ["naïve П"], "include_stop_str_in_output": true}),
        json!({"logprobs": 2, "return_token_ids": true}),
        json!({"stop_token_ids": [stop_token], "min_tokens": 30}),
    ] {
        // The prompt contains the script, so the server can draft every token of the answer.
        let prompt = json!({"prompt": SCRIPT.repeat(2), "max_tokens": 90});
        let body = merged(prompt, options);
        let expected = comparable(plain.complete(body.clone()).await.ok());
        assert_eq!(
            comparable(drafting.complete(body.clone()).await.ok()),
            expected
        );
        let body = merged(body, json!({"stream": true}));
        let streamed = |answer: Answer| {
            answer
                .events()
                .into_iter()
                .map(comparable)
                .collect::<Vec<_>>()
        };
        let expected = streamed(plain.complete(body.clone()).await);
        assert_eq!(streamed(drafting.complete(body).await), expected);
    }
    let steps = |server: &Server| server.metric("sterna_engine_steps_total");
    assert!(
        2.0 * steps(&drafting) < steps(&plain),
        "few steps accepted draft tokens"
    );
}

#[tokio::test(start_paused = true)]
async fn a_waiting_stream_sends_keep_alive_comments() {
    let server = Server::new();
    server.gate.close();
    let body =
        json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": true})
            .to_string();
    let request = Request::post(CHAT)
        .header("content-type", "application/json")
        .body(Body::from(body))
        .unwrap();
    let response = server.router.clone().oneshot(request).await.unwrap();
    let mut frames = response.into_body().into_data_stream();
    let mut next = async || {
        let frame = std::future::poll_fn(|context| {
            futures_util::Stream::poll_next(std::pin::Pin::new(&mut frames), context)
        })
        .await;
        frame.map(|frame| String::from_utf8(frame.unwrap().to_vec()).unwrap())
    };
    assert!(next().await.unwrap().contains("\"role\":\"assistant\""));
    let began = tokio::time::Instant::now();
    assert_eq!(next().await.as_deref(), Some(": keep-alive\n\n"));
    assert!((10..=15).contains(&began.elapsed().as_secs()));
    assert_eq!(next().await.as_deref(), Some(": keep-alive\n\n"));
    server.gate.open();
    let mut last = None;
    while let Some(frame) = next().await {
        last = Some(frame);
    }
    assert_eq!(last.as_deref(), Some("data: [DONE]\n\n"));
}

#[tokio::test]
async fn an_error_after_the_first_token_ends_the_stream_with_done() {
    let server = Server::new();
    server.gate.close();
    server.gate.pass(2);
    let body =
        json!({"prompt": "Hello", "max_tokens": 9, "stream": true, "temperature": 0}).to_string();
    let request = Request::post(TEXT)
        .header("content-type", "application/json")
        .body(Body::from(body))
        .unwrap();
    let answering = tokio::spawn(server.router.clone().oneshot(request));
    server.gate.arrivals(3).await;
    let response = answering.await.unwrap().unwrap();
    assert_eq!(response.status(), 200);
    server.gate.failing.store(true, Ordering::SeqCst);
    server.gate.open();
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, 1 << 20).await.unwrap();
    let answer = Answer {
        status: parts.status,
        headers: parts.headers,
        body: String::from_utf8(body.to_vec()).unwrap(),
    };
    let events = answer.events();
    let (error, text) = events.split_last().unwrap();
    assert_eq!(error["error"]["code"], "internal_error");
    assert!(!streamed_text(text).is_empty());
}
