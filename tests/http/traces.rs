//! What the API hands to the traces: which requests, and when they did what. `tests/otlp.rs` checks
//! what a collector gets.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

use serde_json::json;
use sterna::api::App;
use sterna::traces::{GenAiOperation, RequestTrace, TraceSink};

use crate::harness::*;
use crate::request_log::begin;

/// Keeps the traces for the test.
struct Kept(Mutex<mpsc::Sender<RequestTrace>>);

impl TraceSink for Kept {
    fn record(&self, request: &RequestTrace) {
        self.0.lock().unwrap().send(request.clone()).unwrap();
    }

    fn flush(&self) {}
}

fn start() -> (Server, mpsc::Receiver<RequestTrace>) {
    let (sender, traces) = mpsc::channel();
    let app = App::loading();
    app.set_traces(Arc::new(Kept(Mutex::new(sender))));
    (Server::start(app, 8, 64), traces)
}

#[tokio::test]
async fn the_moments_of_a_trace_are_those_of_the_steps() {
    let (server, traces) = start();
    server.gate.close();
    let sent = Instant::now();
    let router = server.router.clone();
    let body = json!({"prompt": "Hello", "max_tokens": 3, "stream": true});
    let answer = tokio::spawn(async move { begin(&router, body).await });
    server.gate.arrivals(1).await;
    let in_prefill = Instant::now();
    server.gate.pass(1);
    server.gate.arrivals(2).await;
    let in_decode = Instant::now();
    server.gate.open();
    drop(
        axum::body::to_bytes(
            axum::body::Body::from_stream(answer.await.unwrap().1),
            1 << 20,
        )
        .await,
    );
    let phases = traces.recv_timeout(PATIENCE).unwrap().phases;
    let moments = [
        sent,
        phases.arrived,
        phases.submitted.unwrap(),
        in_prefill,
        phases.first_token.unwrap(),
        in_decode,
        phases.last_token.unwrap(),
        phases.ended,
        Instant::now(),
    ];
    assert!(moments.is_sorted(), "{moments:?}");
    // The turn that admits a request may have begun before its submission.
    let admitted = phases.admitted.unwrap();
    assert!(sent <= admitted && admitted <= in_prefill, "{phases:?}");
    assert!(phases.grammar.is_none());
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_trace_with_an_error() {
    let (server, traces) = start();
    server.gate.close();
    let router = server.router.clone();
    let body = json!({"prompt": "Hello", "max_tokens": 64, "stream": true});
    let answer = tokio::spawn(async move { begin(&router, body).await });
    server.gate.arrivals(1).await;
    server.gate.pass(16);
    server.gate.arrivals(17).await;
    let (status, stream) = answer.await.unwrap();
    assert!(
        traces.try_recv().is_err(),
        "a request that runs has no trace yet"
    );
    drop(stream);
    let trace = traces.recv_timeout(PATIENCE).unwrap();
    assert_eq!(trace.status, Some(status.as_u16()));
    assert_eq!(trace.error.as_deref(), Some("disconnected"));
    assert!(trace.phases.first_token.is_some() && trace.phases.last_token.is_none());
    assert!(trace.ends.is_empty());
    server.gate.open();
}

#[tokio::test]
async fn every_endpoint_that_runs_the_model_has_traces() {
    let (server, traces) = start();
    server.gate.immune.store(true, Ordering::SeqCst);
    let chat = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8});
    let text = json!({"prompt": "Hello", "max_tokens": 8});
    let choice = json!({"guided_regex": "[ab]{2,4}", "n": 2, "temperature": 0.7, "top_p": 0.9});
    let native = json!({"text": "Hello", "sampling_params": {"max_new_tokens": 8}});
    let whole = json!({"input": "Hello", "max_output_tokens": 8});
    for (path, body, operation) in [
        (
            "/v1/chat/completions",
            merged(chat.clone(), choice),
            GenAiOperation::Chat,
        ),
        ("/chat/completions", chat.clone(), GenAiOperation::Chat),
        ("/v1/messages", chat, GenAiOperation::Chat),
        ("/v1/responses", whole, GenAiOperation::Chat),
        (
            "/v1/completions",
            text.clone(),
            GenAiOperation::TextCompletion,
        ),
        ("/completions", text.clone(), GenAiOperation::TextCompletion),
        ("/completion", text, GenAiOperation::TextCompletion),
        ("/generate", native, GenAiOperation::TextCompletion),
    ] {
        let answer = server.post(path, &body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        let trace = traces.recv_timeout(PATIENCE).unwrap();
        assert_eq!(
            (trace.endpoint.as_str(), trace.operation),
            (path, operation)
        );
        assert_eq!((trace.status, trace.error), (Some(200), None));
        assert_eq!(trace.model.as_deref(), Some("actor"));
        assert_eq!((trace.tenant.as_str(), trace.ends.len()), ("default", 1));
        assert_eq!(trace.request_id, answer.header("x-request-id"));
        let counts = trace.counts.unwrap();
        assert!(counts.prompt > 0 && counts.output > 0, "{path}: {counts:?}");
        let given = trace.answer.unwrap();
        if let Some(id) = given.id {
            assert!(answer.body.contains(&id), "{path}: {id} in {}", answer.body);
        }
        let has_grammar = body.get("guided_regex").is_some();
        let grammar = trace.phases.grammar;
        assert_eq!(grammar.is_some(), has_grammar, "{path}");
        if let Some(grammar) = grammar {
            let (ended, has_failed) = grammar.ended.unwrap();
            assert!(!has_failed && grammar.began <= ended);
            assert!(ended <= trace.phases.submitted.unwrap());
            let given = given.parameters;
            assert_eq!((given.max_tokens, given.choices), (Some(8), 2));
            assert_eq!((given.temperature, given.top_p), (0.7, 0.9));
        }
    }
    for path in ["/health", "/v1/models", "/metrics", "/v1/completions"] {
        server.get(path).await;
    }
    server.post("/tokenize", &json!({"prompt": "Hello"})).await;
    assert!(traces.try_recv().is_err(), "the model did not run");
}

#[tokio::test]
async fn a_refused_request_has_a_trace_with_its_error() {
    let (server, traces) = start();
    let path = "/v1/completions";
    let wrong = json!({"prompt": "Hello", "model": "none"});
    let answer = server.post(path, &wrong).await;
    assert_eq!(answer.status, 404);
    let trace = traces.recv_timeout(PATIENCE).unwrap();
    assert_eq!(trace.error.as_deref(), Some("model_not_found"));
    assert!(trace.phases.submitted.is_none() && trace.answer.is_none());

    let wrong = json!({"prompt": "Hello", "guided_regex": "(?=a)"});
    let answer = server.post(path, &wrong).await;
    assert_eq!(answer.status, 400);
    let trace = traces.recv_timeout(PATIENCE).unwrap();
    assert!(trace.error.is_some());
    let (_, has_failed) = trace.phases.grammar.unwrap().ended.unwrap();
    assert!(has_failed && trace.phases.submitted.is_none());
}
