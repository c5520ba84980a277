//! Bodies that arrive slowly: one tenant's must not delay another tenant's.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::{Body, Bytes};
use axum::http::Request;
use futures_util::{StreamExt, stream};
use serde_json::json;
use tokio::sync::mpsc;
use tower::ServiceExt;

use crate::harness::Answer;
use crate::{ALPHA, BETA, CONNECTIONS, JSON, TEXT, TenantServer, table};

/// This many bodies of one MiB exceed the quota of one tenant, and the server's limit.
const SLOW: usize = 70;
const MIB: usize = 1 << 20;

#[tokio::test]
async fn one_tenants_slow_bodies_leave_buffer_space_for_another_tenant() {
    let tenants = TenantServer::new(&(table("a", ALPHA, "") + &table("b", BETA, ""))).await;
    let mut beginning = json!({"prompt": "Hello", "max_tokens": 2, "temperature": 0}).to_string();
    beginning.truncate(beginning.len() - 1);
    beginning += &" ".repeat(MIB - beginning.len());
    let beginning = Bytes::from(beginning);
    let received = Arc::new(AtomicUsize::new(0)); // Beginnings that the server has.
    let mut slow = Vec::new();
    for _ in 0..SLOW {
        let (rest, frames) = mpsc::unbounded_channel();
        rest.send(beginning.clone()).unwrap();
        let received = Arc::clone(&received);
        let body = stream::unfold((frames, 0), move |(mut frames, polls)| {
            received.fetch_add(usize::from(polls == 1), Ordering::SeqCst);
            async move {
                let frame = frames.recv().await?;
                Some((Ok::<Bytes, Infallible>(frame), (frames, polls + 1)))
            }
        });
        let request = Request::post(TEXT)
            .header(JSON.0, JSON.1)
            .header("x-api-key", "alpha")
            .body(Body::from_stream(body))
            .unwrap();
        let answering = tenants.server.router.clone().oneshot(request);
        let answer = async move { Answer::read(answering.await.unwrap()).await };
        slow.push((rest, tokio::spawn(answer)));
    }
    let all_received = |_: &_| received.load(Ordering::SeqCst) == SLOW;
    tenants
        .server
        .until("every body except its end", all_received)
        .await;

    let short = json!({"max_tokens": 2});
    tenants.complete("beta", &short).await.ok();
    let long = json!({"max_tokens": 2, "user": "x".repeat(MIB)});
    tenants.complete("beta", &long).await.ok();
    let rejected = tenants.complete("alpha", &short).await;
    assert_eq!(rejected.error(), (429, "concurrency_limit".into(), None));
    assert!(rejected.headers.contains_key("retry-after"));

    let mut answered = 0;
    for (rest, answer) in slow {
        rest.send(Bytes::from_static(b"}")).unwrap();
        drop(rest);
        let answer = answer.await.unwrap();
        match answer.status.as_u16() {
            200 => answered += 1,
            _ => assert_eq!(answer.error(), (429, "concurrency_limit".into(), None)),
        }
    }
    assert_eq!(
        answered, 15,
        "of sixteen bodies, one exceeds the quota with its last byte"
    );
    tenants.complete("alpha", &short).await.ok();
    let refusals = tenants.server.metrics.render();
    let counted = format!(
        "tenant=\"other\",reason=\"tenant_queue_full\"}} {}",
        SLOW - answered + 1
    );
    assert!(refusals.contains(&counted), "{refusals}");
}

#[tokio::test]
async fn one_tenants_slow_bodies_leave_connections_for_another_tenant() {
    let tenants = TenantServer::new(&(table("a", ALPHA, "") + &table("b", BETA, ""))).await;
    let started = Arc::new(AtomicUsize::new(0)); // Bodies whose first byte the server has.
    let slow_request = || {
        let started = Arc::clone(&started);
        let first = stream::once(async move {
            started.fetch_add(1, Ordering::SeqCst);
            Ok::<Bytes, Infallible>(Bytes::from_static(b"{"))
        });
        let request = Request::post(TEXT)
            .header(JSON.0, JSON.1)
            .header("x-api-key", "alpha")
            .body(Body::from_stream(first.chain(stream::pending())))
            .unwrap();
        let answering = tenants.server.router.clone().oneshot(request);
        tokio::spawn(async move { Answer::read(answering.await.unwrap()).await })
    };
    let quota = CONNECTIONS / 4;
    let mut slow: Vec<_> = (0..quota).map(|_| slow_request()).collect();
    let all_started = |_: &_| started.load(Ordering::SeqCst) == quota;
    tenants
        .server
        .until("the first byte of each", all_started)
        .await;

    let rejected = slow_request().await.unwrap();
    assert_eq!(rejected.error(), (429, "concurrency_limit".into(), None));
    assert!(rejected.headers.contains_key("retry-after"));
    assert!(
        all_started(&tenants.server),
        "the server read a rejected body"
    );
    let short = json!({"max_tokens": 2});
    tenants.complete("beta", &short).await.ok();
    let aborted = slow.pop().unwrap();
    aborted.abort();
    assert!(aborted.await.is_err_and(|error| error.is_cancelled()));
    tenants.complete("alpha", &short).await.ok();
}
