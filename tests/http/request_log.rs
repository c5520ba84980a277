//! The log's line about each request: what it says, what it never says, and that there is one.

use std::cell::RefCell;
use std::io::Write;
use std::sync::{Arc, Mutex, Once};

use axum::Router;
use axum::body::{Body, BodyDataStream};
use axum::http::{Method, Request, StatusCode};
use serde_json::{Value, json};
use sterna::api::{self, App};
use tower::ServiceExt;

use crate::harness::*;
use crate::{CHAT, TEXT};

const TARGET: &str = "sterna::requests";
const JSON: (&str, &str) = ("content-type", "application/json");

/// What this test's thread logs. The server of a test runs on the test's own thread, except its
/// engine.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

thread_local! {
    static THREADS_LOG: RefCell<Option<Log>> = const { RefCell::new(None) };
}

/// Ends the log of this thread when it is dropped.
struct LogGuard;

impl Drop for LogGuard {
    fn drop(&mut self) {
        THREADS_LOG.take();
    }
}

impl Log {
    /// Logs as `--log-json` does, until the guard is dropped.
    ///
    /// All tests share one subscriber. With a subscriber for each thread, a line could be lost:
    /// `tracing` asks only the thread that reaches a line first whether a subscriber wants the
    /// line, if there is one subscriber, and keeps the answer for all threads.
    async fn start() -> (Log, LogGuard) {
        static SUBSCRIBER: Once = Once::new();
        SUBSCRIBER.call_once(|| {
            let logs = tracing_subscriber::fmt().json();
            let logs =
                logs.with_writer(|| THREADS_LOG.with_borrow(Clone::clone).unwrap_or_default());
            tracing::subscriber::set_global_default(logs.finish()).unwrap();
        });
        Document::get().await; // Its request would have a line too.
        let log = Log::default();
        THREADS_LOG.set(Some(log.clone()));
        (log, LogGuard)
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// Takes the lines so far and returns the fields of those about requests.
    fn take(&self) -> Vec<Value> {
        let text = self.text();
        self.0.lock().unwrap().clear();
        let lines = text.lines().map(|line| {
            let line: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
            line
        });
        let of_requests = lines.filter(|line| line["target"] == TARGET);
        of_requests.map(|line| line["fields"].clone()).collect()
    }

    /// Takes the only line.
    fn one(&self) -> Value {
        let mut lines = self.take();
        assert_eq!(lines.len(), 1, "{lines:?}");
        lines.remove(0)
    }
}

/// Sends a completion and returns its status and its body, which still streams.
pub(crate) async fn begin(router: &Router, body: Value) -> (StatusCode, BodyDataStream) {
    let request = Request::post(TEXT).header(JSON.0, JSON.1);
    let request = request.body(Body::from(body.to_string())).unwrap();
    let response = router.clone().oneshot(request).await.unwrap();
    (response.status(), response.into_body().into_data_stream())
}

fn seconds(line: &Value, name: &str) -> f64 {
    let seconds = line[name].as_f64();
    seconds.unwrap_or_else(|| panic!("no {name}: {line}"))
}

#[tokio::test]
async fn a_line_has_the_counts_and_times_of_its_request_and_never_its_text() {
    let server = Server::new();
    let (log, _guard) = Log::start().await;
    let secret = "an unusual sentence of forty-two letters. ";
    for (at, stream) in [(0, false), (1, true), (2, false)] {
        let options = if stream {
            json!({"include_usage": true})
        } else {
            Value::Null
        };
        let body = json!({
            "messages": [{"role": "user", "content": secret.repeat(4)}],
            "max_tokens": 9,
            "stream": stream,
            "stream_options": options,
            "user": "a-users-name",
        });
        let headers = [
            JSON,
            ("x-request-id", "mine"),
            ("authorization", "Bearer a-key-that-nobody-may-see"),
        ];
        let sent = server.send(Method::POST, CHAT, &headers, body.to_string());
        let answer = sent.await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let (usage, text) = match stream {
            true => {
                let events = answer.events();
                (
                    events.last().unwrap()["usage"].clone(),
                    streamed_text(&events),
                )
            }
            false => {
                let answer = answer.ok();
                let text = answer["choices"][0]["message"]["content"].clone();
                (answer["usage"].clone(), text.as_str().unwrap().to_owned())
            }
        };
        let all = log.text();
        for hidden in [&secret[..20], &text[..8], "nobody-may-see", "a-users-name"] {
            assert!(!all.contains(hidden), "{hidden:?} is in {all}");
        }
        let line = log.one();
        assert_eq!(line["id"], "mine");
        assert_eq!(line["tenant"], "default");
        assert_eq!(line["endpoint"], CHAT);
        assert_eq!(line["status"], 200);
        assert_eq!(line["finish"], "length");
        assert_eq!(line["prompt_tokens"], usage["prompt_tokens"]);
        assert_eq!(line["completion_tokens"], 9);
        let cached = &usage["prompt_tokens_details"]["cached_tokens"];
        assert_eq!(line["cached_tokens"], *cached);
        assert_eq!(cached.as_u64().unwrap() > 0, at > 0, "{usage}");
        let queue = seconds(&line, "queue_seconds");
        let first = seconds(&line, "first_token_seconds");
        let total = seconds(&line, "total_seconds");
        assert!(0.0 <= queue && queue <= first && first <= total, "{line}");
        assert_eq!(line.get("trace_id"), None, "it has no trace");
    }
}

#[tokio::test]
async fn the_choices_of_a_request_share_a_line() {
    let server = Server::new();
    let (log, _guard) = Log::start().await;
    let body = json!({"prompt": ["Hello", "Hi"], "n": 2, "max_tokens": 5});
    let usage = server.complete(body).await.ok()["usage"].clone();
    let line = log.one();
    assert_eq!(line["prompt_tokens"], usage["prompt_tokens"]);
    assert_eq!(line["completion_tokens"], 20);
    assert_eq!(line["finish"], "length");
}

#[tokio::test]
async fn a_refused_request_has_a_line_with_the_name_of_its_error() {
    let server = Server::new();
    let loading = api::router(App::loading());
    let (log, _guard) = Log::start().await;
    let prompt = r#"{"prompt": "hidden words", "model": "none"}"#;
    for (path, headers, body, status, finish) in [
        (TEXT, &[JSON][..], prompt, 404, "model_not_found"),
        (TEXT, &[JSON], "{hidden words", 400, "invalid_json"),
        (TEXT, &[], prompt, 415, "unsupported_content_type"),
        ("/v1/messages", &[JSON], "{}", 400, "invalid_value"),
        (
            "/hidden words".trim_end_matches(" words"),
            &[],
            "",
            404,
            "not_found",
        ),
        ("/health", &[], "", 405, "method_not_allowed"),
    ] {
        let answer = server.send(Method::POST, path, headers, body).await;
        assert_eq!(answer.status, status, "{}", answer.body);
        assert!(!log.text().contains("hidden"), "{}", log.text());
        let line = log.one();
        assert_eq!(line["status"], status);
        assert_eq!(line["finish"], finish);
        assert_eq!(line["id"], answer.header("x-request-id"));
        let endpoint = match path {
            "/hidden" => "unknown",
            known => known,
        };
        assert_eq!(line["endpoint"], endpoint);
        assert_eq!(line.get("prompt_tokens"), None, "{line}");
    }
    let refused = send(&loading, Method::POST, TEXT, &[JSON], prompt).await;
    assert_eq!(refused.status, 503);
    assert_eq!(log.one()["finish"], "loading");
    server.engine.drain();
    server.complete(json!({})).await;
    assert_eq!(log.one()["finish"], "draining");
}

#[tokio::test]
async fn probes_that_succeed_have_no_line_at_the_usual_level() {
    let server = Server::new();
    let loading = api::router(App::loading());
    let (log, _guard) = Log::start().await;
    for path in ["/health", "/ready", "/metrics"] {
        server.get(path).await;
    }
    assert_eq!(log.take(), [] as [Value; 0]);
    send(&loading, Method::GET, "/ready", &[], Body::empty()).await;
    assert_eq!(log.one()["status"], 503);
}

#[tokio::test]
async fn a_failed_request_has_a_line_even_if_its_response_had_begun() {
    let server = Server::new();
    let (log, _guard) = Log::start().await;
    server.complete(json!({"prompt": [5, POISON]})).await;
    let line = log.one();
    assert_eq!(line["status"], 500);
    assert_eq!(line["finish"], "internal_error");

    server.gate.close();
    server.gate.pass(1);
    let request = json!({"prompt": "Hi", "max_tokens": 50, "stream": true});
    let (status, body) = begin(&server.router, request).await;
    assert_eq!(status, 200);
    server
        .gate
        .failing
        .store(true, std::sync::atomic::Ordering::SeqCst);
    server.gate.open();
    let rest = axum::body::to_bytes(Body::from_stream(body), 1 << 20).await;
    let rest = String::from_utf8(rest.unwrap().to_vec()).unwrap();
    assert!(rest.contains("internal_error"), "{rest}");
    let line = log.one();
    assert_eq!(line["status"], 200);
    assert_eq!(line["finish"], "internal_error");
    assert_eq!(line["completion_tokens"], 1);
}

#[tokio::test]
async fn a_client_that_leaves_has_a_line() {
    let server = Server::new();
    let (log, _guard) = Log::start().await;
    server.gate.close();
    // Before the response.
    let request = json!({"prompt": "Hi", "max_tokens": 50});
    let router = server.router.clone();
    let waiting = tokio::spawn(async move { begin(&router, request).await });
    server.gate.arrivals(1).await;
    assert_eq!(log.take(), [] as [Value; 0]);
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    let line = log.one();
    assert_eq!(line["finish"], "disconnected");
    assert_eq!(line.get("status"), None, "no response was sent: {line}");
    assert!(line["prompt_tokens"].as_u64().unwrap() > 0);
    assert_eq!(line["completion_tokens"], 0);
    // Amid the response.
    server.gate.pass(2);
    let request = json!({"prompt": "Hi", "max_tokens": 50, "stream": true});
    let (status, body) = begin(&server.router, request).await;
    assert_eq!(status, 200);
    assert_eq!(log.take(), [] as [Value; 0]);
    drop(body);
    let line = log.one();
    assert_eq!(line["finish"], "disconnected");
    assert_eq!(line["status"], 200);
    assert!(line["first_token_seconds"].is_f64(), "{line}");
    server.gate.open();
}

#[tokio::test]
async fn a_clients_id_forges_no_line_and_no_field() {
    let server = Server::new();
    let id = r#"x"}} {"target":"sterna::requests", tenant="other" status=500 \n"#;
    let (log, _guard) = Log::start().await;
    for path in ["/v1/models", "/nowhere"] {
        let headers = [("x-request-id", id)];
        server.send(Method::GET, path, &headers, "").await;
        assert_eq!(log.text().lines().count(), 1, "{}", log.text());
        let line = log.one();
        assert_eq!(line["id"], id);
        assert_ne!(line["status"], 500);
    }
    let long = "x".repeat(129);
    for id in ["a\tb", "é", "", &long] {
        let headers = [("x-request-id", id)];
        server.send(Method::GET, "/v1/models", &headers, "").await;
        let line = log.one();
        assert!(line["id"].as_str().unwrap().starts_with("req-"), "{line}");
    }
    // The text for people quotes the id too.
    let text = Log::default();
    let writer = text.clone();
    let logs = tracing_subscriber::fmt().with_ansi(false);
    let logs = logs.with_writer(move || writer.clone()).finish();
    let _inner = tracing::subscriber::set_default(logs);
    let headers = [("x-request-id", id)];
    server.send(Method::GET, "/v1/models", &headers, "").await;
    let text = text.text();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains(&format!("id={id:?}")), "{text}");
}

#[tokio::test]
async fn a_line_names_the_trace_of_its_request() {
    let server = Server::new();
    let (log, _guard) = Log::start().await;
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let headers = [("traceparent", trace), ("tracestate", "a=b,c=d")];
    server.send(Method::GET, "/v1/models", &headers, "").await;
    let line = log.one();
    assert_eq!(line["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!(line["parent_id"], "00f067aa0ba902b7");
    for malformed in [&trace[1..], "", "é", &trace.to_uppercase()] {
        let headers = [("traceparent", malformed)];
        let answer = server.send(Method::GET, "/v1/models", &headers, "").await;
        assert_eq!(answer.status, 200);
        assert_eq!(log.one().get("trace_id"), None, "{malformed}");
    }
}
