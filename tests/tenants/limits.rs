//! What a tenant meets at its own limits, and what its headers tell.

use std::time::{Duration, Instant};

use axum::http::Method;
use futures_util::future::select_all;
use serde_json::json;
use sterna::api::App;
use sterna::engine::TenantsRefused;

use crate::harness::{Answer, Server, streamed_text};
use crate::program;
use crate::{ALPHA, BETA, CONNECTIONS, File, Guarded, JSON, TEXT, begin, table};

/// Holds a server's steps while the clock passes `moment`.
async fn pass_by(server: &Server, moment: Instant) {
    server.until("the clock", |_| Instant::now() > moment).await;
}

#[tokio::test]
async fn used_up_requests_are_429_and_the_headers_count_down() {
    let limited = table("a", ALPHA, "requests_per_minute = 2\nrequest_burst = 2");
    let guarded = Guarded::new(&(limited + &table("b", BETA, ""))).await;
    let short = json!({"max_tokens": 2});
    for remaining in ["1", "0"] {
        for_free(&guarded).await;
        let answer = guarded.complete("alpha", &short).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.header("x-ratelimit-limit-requests"), "2");
        assert_eq!(answer.header("x-ratelimit-remaining-requests"), remaining);
        assert!(answer.header("x-ratelimit-reset-requests").ends_with('s'));
        assert!(!answer.headers.contains_key("x-ratelimit-limit-tokens"));
    }
    for stream in [false, true] {
        let body = json!({"max_tokens": 2, "stream": stream});
        let refused = guarded.complete("alpha", &body).await;
        assert_eq!(refused.error(), (429, "rate_limit_exceeded".into(), None));
        let seconds: u64 = refused.header("retry-after").parse().unwrap();
        let millis: u64 = refused.header("retry-after-ms").parse().unwrap();
        assert!((1..=30).contains(&seconds), "{seconds}");
        assert_eq!(millis.div_ceil(1000), seconds);
        assert_eq!(refused.header("x-ratelimit-remaining-requests"), "0");
    }
    for_free(&guarded).await;
}

/// The other tenant is not concerned.
async fn for_free(guarded: &Guarded) {
    let answer = guarded.complete("beta", &json!({"max_tokens": 2})).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert!(!answer.headers.contains_key("x-ratelimit-limit-requests"));
}

#[tokio::test]
async fn tokens_may_run_into_debt_once() {
    let limited = table("a", ALPHA, "tokens_per_minute = 60\ntoken_burst = 10");
    let guarded = Guarded::new(&limited).await;
    let long = json!({"max_tokens": 60});
    let answer = guarded.complete("alpha", &long).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(answer.header("x-ratelimit-limit-tokens"), "10");
    let refused = guarded.complete("alpha", &long).await;
    assert_eq!(refused.error(), (429, "rate_limit_exceeded".into(), None));
    assert_eq!(refused.header("x-ratelimit-remaining-tokens"), "0");
    assert!(
        refused.body.contains("tokens per minute"),
        "{}",
        refused.body
    );
}

#[tokio::test]
async fn a_full_queue_of_its_own_is_429_and_no_other_tenants() {
    let limited = table("a", ALPHA, "max_running = 1\nmax_queued = 1");
    let guarded = Guarded::new(&(limited + &table("b", BETA, ""))).await;
    let server = &guarded.server;
    server.gate.close();
    let body = json!({"prompt": "Hello", "max_tokens": 300});
    let running = begin(server, "alpha", &body);
    server.gate.arrivals(1).await;
    let waiting = [begin(server, "alpha", &body), begin(server, "alpha", &body)];
    let other = begin(server, "beta", &body);
    tokio::task::yield_now().await; // They run, into the lane.
    // They are taken after this step, and told so after the next.
    for steps in 2..=3 {
        server.gate.pass(1);
        server.gate.arrivals(steps).await;
    }
    // No step is left that could end one of them, but for the one that was refused.
    let (refused, _, mut waiting) = select_all(waiting).await;
    let refused = refused.unwrap();
    assert_eq!(refused.error(), (429, "concurrency_limit".into(), None));
    assert!(refused.headers.contains_key("retry-after"));
    server.gate.open();
    other.await.unwrap().ok();
    running.await.unwrap().ok();
    waiting.remove(0).await.unwrap().ok();
}

#[tokio::test]
async fn a_first_token_that_comes_too_late_is_504() {
    let hurried = table("a", ALPHA, "first_token_seconds = 2");
    let roster = File::new(&(hurried + &table("b", BETA, ""))).roster();
    let server = Server::start(
        App::for_tenants(roster.tenants(), false, CONNECTIONS),
        1,
        64,
    );
    server.engine.set_tenants(roster.policies()).await.unwrap();
    server.gate.close();
    let running = begin(
        &server,
        "beta",
        &json!({"prompt": "Hello", "max_tokens": 3000}),
    );
    server.gate.arrivals(1).await;
    let late = begin(&server, "alpha", &json!({"prompt": "Hello"}));
    let mut steps = 1;
    while server.engine.status().queued == 0 {
        server.gate.pass(1);
        steps += 1;
        server.gate.arrivals(steps).await;
        tokio::task::yield_now().await;
    }
    pass_by(&server, Instant::now() + Duration::from_secs(2)).await;
    server.gate.open();
    let late = late.await.unwrap();
    assert_eq!(late.error(), (504, "deadline_exceeded".into(), None));
    running.await.unwrap().ok();
}

#[tokio::test]
async fn an_answer_that_takes_too_long_ends_with_an_error_event() {
    let guarded = Guarded::new(&table("a", ALPHA, "total_seconds = 3")).await;
    let server = &guarded.server;
    server.gate.close();
    let began = Instant::now();
    let body = json!({"prompt": "Hello", "max_tokens": 300, "stream": true});
    let asked = begin(server, "alpha", &body);
    server.gate.pass(2);
    server.gate.arrivals(3).await;
    pass_by(server, began + Duration::from_secs(3)).await;
    server.gate.open();
    let events = asked.await.unwrap().events();
    let (last, pieces) = events.split_last().unwrap();
    assert_eq!(last["error"]["type"], "timeout_error");
    assert!(!streamed_text(pieces).is_empty());
}

#[tokio::test]
async fn more_pages_than_there_are_cannot_be_guaranteed() {
    let guarded = Guarded::new(&table("a", ALPHA, "guaranteed_pages = 1000")).await;
    let file = File::new(&table("a", ALPHA, "guaranteed_pages = 1025"));
    let roster = file.roster();
    let refused = guarded.server.engine.set_tenants(roster.policies()).await;
    assert!(
        matches!(refused, Err(TenantsRefused::Impossible(_))),
        "{refused:?}"
    );
    file.write(&table("a", ALPHA, "guaranteed_pages = 4000000000"));
    let message = program::refused(&["--tenants", file.path()]);
    assert!(
        message.contains("`guaranteed_pages` together are 4000000000"),
        "{message}"
    );
}

#[tokio::test]
async fn every_answer_to_a_tenant_with_rates_tells_them() {
    let rates =
        "requests_per_minute = 1\nrequest_burst = 2\ntokens_per_minute = 600\nmodels = [\"actor\"]";
    let guarded = Guarded::new(&(table("a", ALPHA, rates) + &table("b", BETA, ""))).await;
    let server = &guarded.server;
    let key = ("x-api-key", "alpha");
    let left = |answer: &Answer| {
        assert_eq!(answer.header("x-ratelimit-limit-requests"), "2");
        assert_eq!(answer.header("x-ratelimit-limit-tokens"), "600");
        assert!(answer.headers.contains_key("x-ratelimit-remaining-tokens"));
        assert!(answer.headers.contains_key("x-ratelimit-reset-tokens"));
        let reset = answer.header("x-ratelimit-reset-requests");
        let remaining = answer.header("x-ratelimit-remaining-requests");
        assert_eq!(reset == "0s", remaining == "2", "{reset} {remaining}");
        remaining.to_owned()
    };
    let unasked = server.send(Method::GET, "/v1/models", &[key], "").await;
    assert_eq!(left(&unasked), "2");
    let answer = guarded.complete("alpha", &json!({"max_tokens": 2})).await;
    assert_eq!((answer.status.as_u16(), left(&answer)), (200, "1".into()));
    let large = format!("\"{}\"", "x".repeat(2 << 20));
    for (method, path, kind, body, status) in [
        (Method::GET, "/v1/models", "", "", 200),
        (Method::GET, "/v1/models/other", "", "", 404),
        (Method::GET, "/metrics", "", "", 200),
        (Method::GET, "/v1/nothing", "", "", 404),
        (Method::GET, TEXT, "", "", 405),
        (Method::POST, TEXT, "text/plain", "{}", 415),
        (Method::POST, TEXT, JSON.1, "{", 400),
        (
            Method::POST,
            TEXT,
            JSON.1,
            "{\"prompt\": \"\", \"n\": 0}",
            400,
        ),
        (Method::POST, TEXT, JSON.1, &large, 413),
        (Method::POST, TEXT, JSON.1, "{\"model\": \"other\"}", 404),
    ] {
        let headers = [key, ("content-type", kind)];
        let answer = server.send(method, path, &headers, body.to_owned()).await;
        assert_eq!(answer.status, status, "{path} {}", answer.body);
        assert_eq!(left(&answer), "1", "{path} {status}");
    }
    let none = |answer: &Answer| {
        let mut names = answer.headers.keys().map(|name| name.as_str());
        assert!(!names.any(|name| name.starts_with("x-ratelimit-")));
    };
    none(&server.get("/v1/models").await); // A stranger's.
    none(&server.get("/health").await);
    none(&guarded.complete("beta", &json!({"n": 0})).await);
}

#[tokio::test]
async fn a_new_rate_stands_in_the_next_answer() {
    let guarded = Guarded::new(&table(
        "a",
        ALPHA,
        "requests_per_minute = 1\nrequest_burst = 2",
    ))
    .await;
    guarded
        .complete("alpha", &json!({"max_tokens": 2}))
        .await
        .ok();
    let file = File::new(&table(
        "a",
        ALPHA,
        "requests_per_minute = 1\nrequest_burst = 9",
    ));
    let roster = file.roster();
    let engine = &guarded.server.engine;
    engine.set_tenants(roster.policies()).await.unwrap();
    guarded.app.set_tenants(roster.tenants());
    let key = [("x-api-key", "alpha")];
    let answer = guarded
        .server
        .send(Method::GET, "/v1/models", &key, "")
        .await;
    assert_eq!(answer.header("x-ratelimit-limit-requests"), "9");
    assert_eq!(answer.header("x-ratelimit-remaining-requests"), "8");
}

#[tokio::test]
async fn several_choices_are_one_request_to_the_rates() {
    let limited = table("a", ALPHA, "requests_per_minute = 1\nrequest_burst = 1");
    let guarded = Guarded::new(&limited).await;
    let body = json!({"max_tokens": 2, "n": 3});
    let answer = guarded.complete("alpha", &body).await;
    assert_eq!(answer.header("x-ratelimit-remaining-requests"), "0");
    assert_eq!(answer.ok()["choices"].as_array().unwrap().len(), 3);
    let refused = guarded.complete("alpha", &json!({"max_tokens": 2})).await;
    assert_eq!(refused.error(), (429, "rate_limit_exceeded".into(), None));
}

#[tokio::test]
async fn a_tenants_pages_are_told_until_they_are_gone() {
    let guarded = Guarded::new(&(table("a", ALPHA, "") + &table("b", BETA, ""))).await;
    let server = &guarded.server;
    let names = [(1, "a".to_owned()), (2, "b".to_owned())];
    server.metrics.set_tenants(&names);
    let pages = |server: &Server| {
        let labels = "{model_name=\"actor\",engine=\"0\",tenant=\"a\"}";
        server.metric(&format!("sterna_tenant_kv_pages{labels}"))
    };
    let long = json!({"prompt": vec![20; 400], "max_tokens": 2});
    guarded.complete("alpha", &long).await.ok();
    let cached = |server: &Server| pages(server) >= 25.0;
    server.until("its cached pages", cached).await;
    server.engine.reset_prefix_cache();
    server
        .until("no page of its", |server| pages(server) == 0.0)
        .await;
}
