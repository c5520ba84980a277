//! A full queue, and a step that fails.

use axum::body::Body;
use axum::http::{Method, Request};
use serde_json::json;
use sterna::api::App;
use sterna::engine::Limits;
use tower::ServiceExt;

use crate::TEXT;
use crate::harness::*;

impl Server {
    fn with(max_running: u32, submit_queue: usize) -> Server {
        Server::start(App::loading(), max_running, submit_queue)
    }
}

#[tokio::test]
async fn a_full_queue_is_503_with_retry_after() {
    let server = Server::with(1, 1);
    server.gate.close();
    let request = |max_tokens: u32| {
        let body = json!({"prompt": "Hello", "max_tokens": max_tokens}).to_string();
        let request = Request::post(TEXT)
            .header("content-type", "application/json")
            .body(Body::from(body))
            .unwrap();
        tokio::spawn(server.router.clone().oneshot(request))
    };
    let running = request(2);
    server.gate.arrivals(1).await;
    // The engine's thread waits in a step, so the next request fills the submit queue.
    let mut waiting = vec![request(2), request(2), request(2)];
    server
        .until("the server rejects two requests", |_| {
            waiting
                .iter()
                .filter(|waiting| waiting.is_finished())
                .count()
                == 2
        })
        .await;
    let rejected = server.complete(json!({"stream": true})).await;
    assert_eq!(rejected.error(), (503, "engine_overloaded".into(), None));
    assert!(rejected.header("retry-after").parse::<u64>().unwrap() >= 1);
    server.gate.open();
    assert_eq!(running.await.unwrap().unwrap().status(), 200);
    let mut answered = 0;
    for waiting in waiting.drain(..) {
        answered += usize::from(waiting.await.unwrap().unwrap().status() == 200);
    }
    assert_eq!(
        answered, 1,
        "the server answers only the request in the submit queue"
    );
    server.complete(json!({})).await.ok();
}

/// Sends a request in a task of its own.
fn send_complete(server: &Server) -> tokio::task::JoinHandle<Answer> {
    let router = server.router.clone();
    let body = json!({"prompt": "Hello", "max_tokens": 300}).to_string();
    let headers = [("content-type", "application/json")];
    tokio::spawn(async move { send(&router, Method::POST, TEXT, &headers, body).await })
}

/// Sends a body that only a parser can reject.
async fn send_malformed(server: &Server) -> Answer {
    let headers = [("content-type", "application/json")];
    server.send(Method::POST, TEXT, &headers, "{").await
}

/// A refusal waited for the end of the step, after its body was parsed and tokenized.
#[tokio::test]
async fn a_full_queue_refuses_at_once_and_parses_nothing() {
    let limits = Limits {
        max_queued: 1,
        ..Server::limits(1)
    };
    let server = Server::with_limits(App::loading(), limits, 64, 0);
    assert_eq!(send_malformed(&server).await.error().0, 400);
    server.gate.close();
    let running = send_complete(&server);
    server.gate.arrivals(1).await;
    let mut others = vec![send_complete(&server), send_complete(&server)];
    let is_refused = |_: &Server| others.iter().any(tokio::task::JoinHandle::is_finished);
    server.step_until("a request is refused", is_refused).await;
    let at = others.iter().position(|other| other.is_finished()).unwrap();
    let rejected = others.remove(at).await.unwrap();
    assert_eq!(rejected.error(), (503, "engine_overloaded".into(), None));

    // No step ends from here on.
    for _ in 0..3 {
        let rejected = send_malformed(&server).await;
        assert_eq!(rejected.error(), (503, "engine_overloaded".into(), None));
        assert!(rejected.header("retry-after").parse::<u64>().unwrap() >= 1);
        let rejected = server.complete(json!({"stream": true})).await;
        assert_eq!(rejected.error(), (503, "engine_overloaded".into(), None));
    }
    let name = "sterna_refusals_total{model_name=\"actor\",engine=\"0\",reason=\"queue_full\"}";
    assert_eq!(server.metric(name), 7.0);

    // A waiting request that leaves may have made room, so the next one goes to the scheduler.
    others[0].abort();
    let gone = |server: &Server| server.metric("sterna_client_disconnects_total") == 1.0;
    server.until("the waiting request leaves", gone).await;
    assert_eq!(send_malformed(&server).await.error().0, 400);
    assert_eq!(send_malformed(&server).await.error().0, 503);
    let has_room = |server: &Server| server.engine.status().queued == 0;
    server
        .step_until("the engine has seen that", has_room)
        .await;
    for _ in 0..2 {
        assert_eq!(send_malformed(&server).await.error().0, 400);
    }
    server.gate.open();
    assert_eq!(running.await.unwrap().status, 200);
}

#[tokio::test]
async fn a_full_submit_queue_refuses_at_once_and_parses_nothing() {
    let server = Server::with(1, 1);
    server.gate.close();
    let running = send_complete(&server);
    server.gate.arrivals(1).await;
    let waiting = send_complete(&server);
    let mut rejected = send_malformed(&server).await.error();
    while rejected.0 == 400 {
        tokio::task::yield_now().await;
        rejected = send_malformed(&server).await.error();
    }
    assert_eq!(rejected, (503, "engine_overloaded".into(), None));
    server.gate.open();
    assert_eq!(running.await.unwrap().status, 200);
    assert_eq!(waiting.await.unwrap().status, 200);
}

#[tokio::test]
async fn a_step_that_fails_is_a_500_and_the_next_step_works() {
    let server = Server::new();
    for stream in [false, true] {
        let failed = server
            .complete(json!({"prompt": [5, POISON], "stream": stream}))
            .await;
        assert_eq!(failed.error(), (500, "internal_error".into(), None));
        assert!(
            !failed.body.contains("made to fail"),
            "the message reveals internals: {}",
            failed.body
        );
        server.complete(json!({"stream": stream})).await;
    }
    server.complete(json!({})).await.ok();
}
