//! Several choices of one request: each equals the answer to a single request, and they succeed or
//! fail together.

#![expect(
    clippy::unwrap_used,
    reason = "a test that finds nothing to unwrap has failed"
)]

mod harness;

use std::sync::atomic::Ordering;

use axum::body::Body;
use axum::http::{Method, Request};
use harness::*;
use serde_json::{Value, json};
use sterna::api::App;
use sterna::engine::Limits;
use tokio::task::JoinHandle;
use tower::ServiceExt;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const JSON: [(&str, &str); 1] = [("content-type", "application/json")];
/// More tokens than a test draws before its client leaves.
const LONG: u32 = 3000;

/// Returns a body with a prompt for either endpoint, and `more`.
fn body(more: Value) -> Value {
    merged(
        json!({"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}),
        more,
    )
}

/// Returns a request with random draws, token ids and log-probabilities. The token that makes a
/// step fail is forbidden.
fn drawn(path: &str, more: Value) -> Value {
    let logprobs = if path == CHAT { json!(true) } else { json!(2) };
    body(merged(
        json!({
            "temperature": 2,
            "max_tokens": 30,
            "logit_bias": {POISON.to_string(): -100},
            "return_token_ids": true,
            "logprobs": logprobs,
        }),
        more,
    ))
}

/// Sends a request from its own task.
fn spawn(server: &Server, path: &'static str, body: &Value) -> JoinHandle<Answer> {
    let (router, body) = (server.router.clone(), body.to_string());
    tokio::spawn(async move { send(&router, Method::POST, path, &JSON, body).await })
}

async fn wait_until_idle(server: &Server) {
    let idle = |server: &Server| {
        let status = server.engine.status();
        (status.running, status.queued) == (0, 0)
            && server.metric("vllm:num_requests_running") == 0.0
            && server.metric("vllm:num_requests_waiting") == 0.0
    };
    server.until("nothing runs or waits", idle).await;
}

/// Returns the text, tokens, log-probabilities and finish reasons of a stream's choices, in the
/// form of an answer that is not streamed.
fn assembled(events: &[Value], count: usize) -> Vec<(String, Vec<Value>, Vec<Value>, Value)> {
    let mut choices = vec![(String::new(), Vec::new(), Vec::new(), Value::Null); count];
    for event in events {
        let Some(choice) = event["choices"].get(0) else {
            continue;
        };
        let (text, tokens, logprobs, end) =
            &mut choices[choice["index"].as_u64().unwrap() as usize];
        assert!(end.is_null(), "nothing follows the end of a choice");
        *text += streamed_text(std::slice::from_ref(event)).as_str();
        tokens.extend(choice["token_ids"].as_array().cloned().unwrap_or_default());
        logprobs.extend(tokens_with_logprobs(&choice["logprobs"]));
        end.clone_from(&choice["finish_reason"]);
    }
    choices
}

fn whole(choice: &Value) -> (String, Vec<Value>, Vec<Value>, Value) {
    let text = choice["message"]["content"]
        .as_str()
        .or(choice["text"].as_str());
    (
        text.unwrap().to_owned(),
        choice["token_ids"].as_array().unwrap().clone(),
        tokens_with_logprobs(&choice["logprobs"]),
        choice["finish_reason"].clone(),
    )
}

/// Returns the tokens with their log-probabilities, from either endpoint.
fn tokens_with_logprobs(logprobs: &Value) -> Vec<Value> {
    match (
        logprobs["content"].as_array(),
        logprobs["tokens"].as_array(),
    ) {
        (Some(entries), _) => entries.clone(),
        (_, Some(tokens)) => tokens
            .iter()
            .zip(logprobs["token_logprobs"].as_array().unwrap())
            .map(|(token, logprob)| json!([token, logprob]))
            .collect(),
        _ => Vec::new(),
    }
}

#[tokio::test]
async fn each_choice_equals_the_answer_to_its_own_seed() {
    let server = Server::new();
    for (path, seed) in [(CHAT, 7_i64), (CHAT, -2), (TEXT, 7), (TEXT, -2)] {
        let together = drawn(path, json!({"n": 4, "seed": seed}));
        let answer = server.post(path, &together).await.ok();
        let choices = answer["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 4);
        let mut completion_tokens = 0;
        for (index, choice) in choices.iter().enumerate() {
            let alone = drawn(path, json!({"seed": seed + index as i64}));
            let alone = server.post(path, &alone).await.ok();
            let mut expected = alone["choices"][0].clone();
            expected["index"] = json!(index);
            assert_eq!(*choice, expected, "{path}, seed {seed}");
            completion_tokens += alone["usage"]["completion_tokens"].as_u64().unwrap();
            assert_eq!(
                answer["usage"]["prompt_tokens"],
                alone["usage"]["prompt_tokens"]
            );
        }
        assert_ne!(choices[0]["token_ids"], choices[1]["token_ids"]);
        assert_eq!(answer["usage"]["completion_tokens"], completion_tokens);

        let options = json!({"stream": true, "stream_options": {"include_usage": true}});
        let events = server.post(path, &merged(together, options)).await.events();
        let expected: Vec<_> = choices.iter().map(whole).collect();
        assert_eq!(assembled(&events, 4), expected, "{path}, seed {seed}");
    }
}

#[tokio::test]
async fn without_a_seed_the_choices_differ() {
    let server = Server::new();
    // One choice in five draws the likeliest token each time, so two of them may be the same.
    let request = drawn(TEXT, json!({"n": 8}));
    let mut answers = Vec::new();
    for _ in 0..2 {
        let answer = server.post(TEXT, &request).await.ok();
        let tokens = (0..8).map(|index| answer["choices"][index]["token_ids"].clone());
        answers.push(tokens.collect::<Vec<Value>>());
    }
    assert!(answers[0].iter().any(|tokens| *tokens != answers[0][0]));
    assert_ne!(answers[0], answers[1]);
}

#[tokio::test]
async fn greedy_choices_are_all_the_same_and_the_prompt_counts_once() {
    let server = Server::new();
    let prompt = "one two three ".repeat(20);
    let alone = server
        .complete(json!({"prompt": prompt, "max_tokens": 9}))
        .await
        .ok();
    let answer = server
        .complete(json!({"prompt": prompt, "max_tokens": 9, "n": 8, "best_of": 1}))
        .await
        .ok();
    let prompt_tokens = alone["usage"]["prompt_tokens"].as_u64().unwrap();
    let text = server.script(prompt_tokens as usize, 9);
    let expected: Vec<Value> = (0..8)
        .map(|index| {
            json!({"index": index, "text": text, "logprobs": null, "finish_reason": "length"})
        })
        .collect();
    assert_eq!(answer["choices"], json!(expected));
    let usage = &answer["usage"];
    assert_eq!(usage["prompt_tokens"], prompt_tokens);
    assert_eq!(usage["completion_tokens"], 72);
    assert_eq!(usage["total_tokens"], prompt_tokens + 72);
    let cached = usage["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap();
    assert!((16..prompt_tokens).contains(&cached), "{cached}");
    let chat = server.chat(json!({"max_tokens": 3, "n": 2})).await.ok();
    assert_eq!(chat["choices"][0]["message"], chat["choices"][1]["message"]);
}

#[tokio::test]
async fn streamed_choices_interleave_and_the_stream_ends_once() {
    let server = Server::new();
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let request = json!({
        "n": 3,
        "max_tokens": 60,
        "stream": true,
        "stream_options": options,
        "return_token_ids": true,
    });
    let events = server.chat(request.clone()).await.events();
    for (index, event) in events[..3].iter().enumerate() {
        let choice = &event["choices"][0];
        assert_eq!(choice["index"], index);
        assert_eq!(choice["delta"], json!({"role": "assistant", "content": ""}));
        assert_eq!(event["usage"]["completion_tokens"], 0);
        assert_eq!(event["prompt_token_ids"].is_array(), index == 0);
    }
    let later = &events[3..];
    let first_end = later
        .iter()
        .position(|event| event["choices"][0]["finish_reason"].is_string())
        .unwrap();
    for index in 0..3 {
        assert!(
            later[..first_end]
                .iter()
                .any(|event| event["choices"][0]["index"] == index),
            "choice {index} waits for the end of another choice"
        );
    }
    let (usage, chunks) = events.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 180);
    assert!(usage["usage"]["prompt_tokens_details"]["cached_tokens"].is_u64());
    assert!(chunks.iter().all(|event| {
        event["choices"].as_array().unwrap().len() == 1 && event["id"] == usage["id"]
    }));
    let counts: Vec<u64> = events
        .iter()
        .map(|event| event["usage"]["completion_tokens"].as_u64().unwrap())
        .collect();
    assert!(counts.is_sorted(), "{counts:?}");

    let events = server.complete(request).await.events();
    let has_prompt = |event: &&Value| event["choices"][0]["prompt_token_ids"].is_array();
    assert_eq!(
        events.iter().filter(has_prompt).count(),
        3,
        "each choice once"
    );
}

#[tokio::test]
async fn a_stop_string_ends_its_own_choice_only() {
    let server = Server::new();
    let request = json!({"n": 4, "seed": 3});
    let free = server.post(TEXT, &drawn(TEXT, request.clone())).await.ok();
    let text = |index: usize| free["choices"][index]["text"].as_str().unwrap();
    let alone = |c: &char| c.is_ascii_graphic() && !text(0).contains(*c);
    let mut stops = (1..4).filter_map(|index| Some((index, text(index).chars().find(alone)?)));
    let (ended, stop) = stops.next().expect("the choices differ");
    let request = drawn(TEXT, merged(request, json!({"stop": stop.to_string()})));
    let answer = server.post(TEXT, &request).await.ok();
    let stopped = &answer["choices"][ended];
    assert_eq!(stopped["text"], text(ended).split(stop).next().unwrap());
    assert_eq!(stopped["finish_reason"], "stop");
    assert_eq!(answer["choices"][0], free["choices"][0]);
}

// ---- succeed or fail together ----

#[tokio::test]
async fn the_choices_of_a_request_take_one_place_in_the_submit_queue() {
    for stream in [false, true] {
        let server = Server::start(App::loading(), 1, 2);
        server.gate.close();
        let short = |n: u32| body(json!({"n": n, "max_tokens": 2, "temperature": 0}));
        let running = spawn(&server, TEXT, &short(1));
        server.gate.arrivals(1).await;
        let waiting = [3, 3, 3].map(|n| spawn(&server, TEXT, &short(n)));
        server
            .until("the submit queue is full", |_| {
                waiting.iter().any(JoinHandle::is_finished)
            })
            .await;
        let request = json!({"n": 3, "max_tokens": LONG, "stream": stream});
        let refused = server.complete(request).await;
        assert_eq!(refused.error(), (503, "engine_overloaded".into(), None));
        assert!(refused.header("retry-after").parse::<u64>().unwrap() >= 1);
        server.gate.open();
        running.await.unwrap().ok();
        let mut answered = 0;
        for request in waiting {
            let answer = request.await.unwrap();
            answered += usize::from(answer.status == 200);
        }
        assert_eq!(answered, 2, "two places for six choices");
        wait_until_idle(&server).await;
        assert_eq!(server.metric("vllm:generation_tokens_total"), 14.0);
        assert_eq!(server.metric("sterna_client_disconnects_total"), 0.0);
    }
}

#[tokio::test]
async fn a_request_that_the_scheduler_rejects_leaves_no_choice_behind() {
    for stream in [false, true] {
        let server = Server::start(App::loading(), 1, 128);
        server.gate.close();
        let long = |n: u32| body(json!({"n": n, "max_tokens": LONG, "temperature": 0}));
        let mut waiting = vec![spawn(&server, TEXT, &long(1))];
        server.gate.arrivals(1).await;
        waiting.extend((0..64).map(|_| spawn(&server, TEXT, &long(2))));
        let queued = || server.engine.status().queued;
        let are_queued = |_: &Server| queued() == 128;
        server.step_until("all are queued", are_queued).await;
        let refused = spawn(&server, TEXT, &merged(long(8), json!({"stream": stream})));
        let is_refused = |_: &Server| refused.is_finished();
        server.step_until("one is refused", is_refused).await;
        let refused = refused.await.unwrap();
        assert_eq!(refused.error(), (503, "engine_overloaded".into(), None));
        assert_eq!(queued(), 128);
        assert_eq!(server.metric("sterna_client_disconnects_total"), 0.0);
        waiting.iter().for_each(JoinHandle::abort);
        server.gate.open();
        wait_until_idle(&server).await;
    }
}

/// A client that asks for several choices cannot know the length of the server's queue.
#[tokio::test]
async fn more_choices_than_places_run_on_an_idle_server() {
    let limits = Limits {
        max_queued: 1,
        ..Server::limits(2)
    };
    let server = Server::with_limits(App::loading(), limits, 1, 0);
    let answer = server.complete(json!({"n": 8, "max_tokens": 3})).await.ok();
    assert_eq!(answer["choices"].as_array().unwrap().len(), 8);
    assert_eq!(answer["usage"]["completion_tokens"], 24);
}

#[tokio::test]
async fn a_choice_that_fails_cancels_the_others() {
    for stream in [false, true] {
        let server = Server::start(App::loading(), 2, 64);
        server.gate.close();
        let request = body(json!({"n": 3, "max_tokens": LONG, "temperature": 0, "stream": stream}));
        let response = spawn(&server, TEXT, &request);
        server.gate.arrivals(1).await;
        // Two choices run and have tokens; the third waits.
        let has_tokens = |server: &Server| {
            let status = server.engine.status();
            (status.running, status.queued) == (2, 1)
                && server.metric("vllm:generation_tokens_total") >= 20.0
        };
        server.step_until("two have tokens", has_tokens).await;
        let had = server.metric("vllm:generation_tokens_total");
        server.gate.failing.store(true, Ordering::SeqCst);
        server.gate.pass(3); // The step, and then each of its two sequences alone.
        let failed = response.await.unwrap();
        if stream {
            let events = failed.events();
            let error = events.last().unwrap();
            assert_eq!(error["error"]["code"], "internal_error", "{error}");
        } else {
            assert_eq!(failed.error(), (500, "internal_error".into(), None));
        }
        server.gate.failing.store(false, Ordering::SeqCst);
        server.gate.open();
        wait_until_idle(&server).await;
        let drawn = server.metric("vllm:generation_tokens_total");
        assert!(drawn <= had + 4.0, "{drawn} tokens after the failure");
        assert_eq!(server.metric("sterna_client_disconnects_total"), 0.0);
        server.complete(json!({"n": 2})).await.ok();
    }
}

#[tokio::test]
async fn a_client_that_leaves_cancels_every_choice() {
    for (path, stream) in [(CHAT, false), (CHAT, true), (TEXT, false), (TEXT, true)] {
        let server = Server::new();
        server.gate.close();
        server.gate.pass(3);
        let request = body(json!({"n": 3, "max_tokens": LONG, "temperature": 0, "stream": stream}));
        let request = Request::post(path)
            .header("content-type", "application/json")
            .body(Body::from(request.to_string()))
            .unwrap();
        let response = tokio::spawn(server.router.clone().oneshot(request));
        server.gate.arrivals(4).await;
        if stream {
            drop(response.await.unwrap().unwrap());
        } else {
            response.abort();
        }
        server
            .until("the server notices", |server| {
                server.metric("sterna_client_disconnects_total") == 3.0
            })
            .await;
        server.gate.open();
        wait_until_idle(&server).await;
        let drawn = server.metric("vllm:generation_tokens_total");
        assert!(
            drawn <= 15.0,
            "{path} stream {stream}: {drawn} tokens after the client left"
        );
        assert_eq!(server.get("/health").await.status, 200);
    }
}
