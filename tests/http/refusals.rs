//! A full queue, and a step that fails.

use axum::body::Body;
use axum::http::Request;
use serde_json::json;
use sterna::api::App;
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
