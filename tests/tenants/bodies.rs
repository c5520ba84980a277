//! Bodies that arrive slowly: one tenant's must not delay another tenant's.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::{Body, Bytes};
use axum::http::Request;
use futures_util::{StreamExt, stream};
use serde_json::json;
use sterna::api::App;
use sterna::tenants::keygen;
use tokio::sync::mpsc;
use tower::ServiceExt;

use crate::harness::{Answer, Server};
use crate::{ALPHA, BETA, CONNECTIONS, JSON, TEXT, TempFile, TenantServer, table};

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

/// A tenant with a key of its own: the key, and the tenant's table in the tenants file.
fn new_tenant(id: &str) -> (String, String) {
    let (mut terminal, mut table) = (Vec::new(), Vec::new());
    keygen(Some(id), &mut terminal, &mut table).unwrap();
    let terminal = String::from_utf8(terminal).unwrap();
    let key = terminal.lines().last().unwrap().trim().to_owned();
    (key, String::from_utf8(table).unwrap())
}

#[tokio::test]
async fn however_many_tenants_fill_the_buffer_another_one_gets_in() {
    for floods in [4, 1000] {
        let of_each = 32 / floods.min(32);
        let bytes = (64 * MIB) / (floods * of_each.max(1));
        let (keys, tables): (Vec<_>, Vec<_>) = (0..=floods)
            .map(|number| new_tenant(&format!("t{number}")))
            .unzip();
        let (late, floods) = keys.split_first().unwrap();
        let roster = TempFile::new(&tables.concat()).roster();
        let app = App::for_tenants(roster.tenants(), false, 4096);
        let server = Server::start(app.clone(), 8, 64);
        server.engine.set_tenants(roster.policies()).await.unwrap();
        let tenants = TenantServer { server, app };

        let received = Arc::new(AtomicUsize::new(0)); // Bodies that have filled their part.
        let frame = Bytes::from(vec![b' '; bytes]);
        let flood = floods
            .iter()
            .flat_map(|key| std::iter::repeat_n(key, of_each.max(1)));
        let flooding: Vec<_> = flood
            .map(|key| {
                let (received, frame) = (Arc::clone(&received), frame.clone());
                let frames = stream::unfold(Some(frame), move |frame| {
                    received.fetch_add(usize::from(frame.is_none()), Ordering::SeqCst);
                    async move {
                        match frame {
                            Some(frame) => Some((Ok::<Bytes, Infallible>(frame), None)),
                            None => std::future::pending().await,
                        }
                    }
                });
                let request = Request::post(TEXT)
                    .header(JSON.0, JSON.1)
                    .header("x-api-key", key)
                    .body(Body::from_stream(frames))
                    .unwrap();
                let answering = tenants.server.router.clone().oneshot(request);
                tokio::spawn(async move { Answer::read(answering.await.unwrap()).await })
            })
            .collect();
        let all_received = |_: &_| received.load(Ordering::SeqCst) == flooding.len();
        tenants
            .server
            .until("the flood fills the buffer", all_received)
            .await;

        let short = json!({"max_tokens": 2, "user": "x".repeat(840)});
        tenants.complete(late, &short).await.ok();
        let gave_way = |_: &_| flooding.iter().any(tokio::task::JoinHandle::is_finished);
        tenants
            .server
            .until("a body that gives way", gave_way)
            .await;
        for answering in flooding {
            if answering.is_finished() {
                let answer = answering.await.unwrap();
                assert_eq!(answer.error(), (429, "concurrency_limit".into(), None));
            }
        }
    }
}
