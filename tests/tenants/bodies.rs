//! Bodies that come slowly, and whom they hold up.

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
use crate::{ALPHA, BETA, CONNECTIONS, Guarded, JSON, TEXT, table};

/// Larger than the parts of one tenant together, and of all.
const SLOW: usize = 70;
const MIB: usize = 1 << 20;

#[tokio::test]
async fn one_tenants_slow_bodies_leave_room_for_anothers() {
    let guarded = Guarded::new(&(table("a", ALPHA, "") + &table("b", BETA, ""))).await;
    let mut beginning = json!({"prompt": "Hello", "max_tokens": 2, "temperature": 0}).to_string();
    beginning.truncate(beginning.len() - 1);
    beginning += &" ".repeat(MIB - beginning.len());
    let beginning = Bytes::from(beginning);
    let taken = Arc::new(AtomicUsize::new(0)); // Beginnings that the server has.
    let mut slow = Vec::new();
    for _ in 0..SLOW {
        let (rest, frames) = mpsc::unbounded_channel();
        rest.send(beginning.clone()).unwrap();
        let taken = Arc::clone(&taken);
        let body = stream::unfold((frames, 0), move |(mut frames, asked)| {
            taken.fetch_add(usize::from(asked == 1), Ordering::SeqCst);
            async move {
                let frame = frames.recv().await?;
                Some((Ok::<Bytes, Infallible>(frame), (frames, asked + 1)))
            }
        });
        let request = Request::post(TEXT)
            .header(JSON.0, JSON.1)
            .header("x-api-key", "alpha")
            .body(Body::from_stream(body))
            .unwrap();
        let answering = guarded.server.router.clone().oneshot(request);
        let answer = async move { Answer::read(answering.await.unwrap()).await };
        slow.push((rest, tokio::spawn(answer)));
    }
    let came = |_: &_| taken.load(Ordering::SeqCst) == SLOW;
    guarded.server.until("every body but its end", came).await;

    let short = json!({"max_tokens": 2});
    guarded.complete("beta", &short).await.ok();
    let long = json!({"max_tokens": 2, "user": "x".repeat(MIB)});
    guarded.complete("beta", &long).await.ok();
    let own = guarded.complete("alpha", &short).await;
    assert_eq!(own.error(), (429, "concurrency_limit".into(), None));
    assert!(own.headers.contains_key("retry-after"));

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
    assert_eq!(answered, 15, "the end of one of the sixteen finds no room");
    guarded.complete("alpha", &short).await.ok();
    let refusals = guarded.server.metrics.render();
    let counted = format!(
        "tenant=\"other\",reason=\"tenant_queue_full\"}} {}",
        SLOW - answered + 1
    );
    assert!(refusals.contains(&counted), "{refusals}");
}

#[tokio::test]
async fn one_tenants_dribbling_bodies_leave_connections_for_anothers() {
    let guarded = Guarded::new(&(table("a", ALPHA, "") + &table("b", BETA, ""))).await;
    let begun = Arc::new(AtomicUsize::new(0)); // Bodies of which the server has the first byte.
    let dribble = || {
        let begun = Arc::clone(&begun);
        let first = stream::once(async move {
            begun.fetch_add(1, Ordering::SeqCst);
            Ok::<Bytes, Infallible>(Bytes::from_static(b"{"))
        });
        let request = Request::post(TEXT)
            .header(JSON.0, JSON.1)
            .header("x-api-key", "alpha")
            .body(Body::from_stream(first.chain(stream::pending())))
            .unwrap();
        let answering = guarded.server.router.clone().oneshot(request);
        tokio::spawn(async move { Answer::read(answering.await.unwrap()).await })
    };
    let part = CONNECTIONS / 4;
    let mut slow: Vec<_> = (0..part).map(|_| dribble()).collect();
    let came = |_: &_| begun.load(Ordering::SeqCst) == part;
    guarded.server.until("the first byte of each", came).await;

    let refused = dribble().await.unwrap();
    assert_eq!(refused.error(), (429, "concurrency_limit".into(), None));
    assert!(refused.headers.contains_key("retry-after"));
    assert!(came(&guarded.server), "none of it was read");
    let short = json!({"max_tokens": 2});
    guarded.complete("beta", &short).await.ok();
    let gone = slow.pop().unwrap();
    gone.abort();
    assert!(gone.await.is_err_and(|error| error.is_cancelled()));
    guarded.complete("alpha", &short).await.ok();
}
