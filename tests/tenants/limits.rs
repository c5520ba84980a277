//! The limits of a tenant, and the headers that report them.

use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Method, Request};
use futures_util::FutureExt;
use futures_util::future::select_all;
use serde_json::json;
use sterna::api::App;
use sterna::engine::{TenantId, TenantsRefused};
use tokio::task::JoinHandle;
use tower::ServiceExt;

use crate::harness::{self, Answer, Server, streamed_text};
use crate::program;
use crate::{
    ALPHA, BETA, CONNECTIONS, DELTA, EPSILON, GAMMA, JSON, TEXT, TempFile, TenantServer, begin,
    greedy, table,
};

/// Waits until the clock has passed `moment`.
async fn wait_until(server: &Server, moment: Instant) {
    server.until("the clock", |_| Instant::now() > moment).await;
}

#[tokio::test]
async fn a_used_up_request_rate_is_429_and_the_headers_count_down() {
    let limited = table("a", ALPHA, "requests_per_minute = 2\nrequest_burst = 2");
    let tenants = TenantServer::new(&(limited + &table("b", BETA, ""))).await;
    let short = json!({"max_tokens": 2});
    for remaining in ["1", "0"] {
        other_tenant_is_unaffected(&tenants).await;
        let answer = tenants.complete("alpha", &short).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.header("x-ratelimit-limit-requests"), "2");
        assert_eq!(answer.header("x-ratelimit-remaining-requests"), remaining);
        assert!(answer.header("x-ratelimit-reset-requests").ends_with('s'));
        assert!(!answer.headers.contains_key("x-ratelimit-limit-tokens"));
    }
    for stream in [false, true] {
        let body = json!({"max_tokens": 2, "stream": stream});
        let rejected = tenants.complete("alpha", &body).await;
        assert_eq!(rejected.error(), (429, "rate_limit_exceeded".into(), None));
        let seconds: u64 = rejected.header("retry-after").parse().unwrap();
        let millis: u64 = rejected.header("retry-after-ms").parse().unwrap();
        assert!((1..=30).contains(&seconds), "{seconds}");
        assert_eq!(millis.div_ceil(1000), seconds);
        assert_eq!(rejected.header("x-ratelimit-remaining-requests"), "0");
    }
    other_tenant_is_unaffected(&tenants).await;
}

/// Before, a tenant could have texts encoded for ever, at no cost.
#[tokio::test]
async fn requests_about_text_only_count_as_requests_and_as_service() {
    let limited = table("a", ALPHA, "requests_per_minute = 1\nrequest_burst = 6");
    let tenants = TenantServer::new(&limited).await;
    let names = [(TenantId(1), "a".to_owned())];
    tenants.server.metrics.set_tenants(&names, Vec::new());
    let messages = json!([{"role": "user", "content": "the capital ".repeat(500)}]);
    let key = [("x-api-key", "alpha")];
    for (path, body) in [
        ("/tokenize", json!({"messages": messages})),
        ("/detokenize", json!({"tokens": [20, 21]})),
        ("/v1/messages/count_tokens", json!({"messages": messages})),
        ("/v1/responses/input_tokens", json!({"input": "Hello"})),
        ("/v1/chat/completions/render", json!({"messages": messages})),
        ("/v1/completions/render", json!({"prompt": "Hello"})),
    ] {
        let answer = tenants.ask(path, &key, &body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    }
    tenants
        .server
        .until("the tenant was charged", |server| {
            let labels = "{model_name=\"actor\",engine=\"0\",tenant=\"a\"}";
            server.metric(&format!("sterna_tenant_service_seconds_total{labels}")) > 0.0
        })
        .await;
    for _ in 0..2 {
        let refused = tenants
            .ask("/tokenize", &key, &json!({"prompt": "Hello"}))
            .await;
        assert_eq!(refused.error(), (429, "rate_limit_exceeded".into(), None));
    }
}

/// Before, a client that disconnected while its text was read paid nothing.
#[tokio::test]
async fn a_client_that_leaves_while_its_text_is_read_pays_for_it() {
    let limits = "requests_per_minute = 1\nrequest_burst = 2";
    let tables = [("a", ALPHA), ("b", BETA), ("c", GAMMA)].map(|(id, key)| table(id, key, limits));
    let tenants = TenantServer::new(&tables.concat()).await;
    let names = [(1, "a"), (2, "b"), (3, "c")];
    let names = names.map(|(number, id)| (TenantId(number), id.to_owned()));
    tenants.server.metrics.set_tenants(&names, Vec::new());
    let text = "the capital ".repeat(500);
    // A request that the engine would get counts when the engine gets it.
    for (tenant, key, path, body, remaining) in [
        ("a", "alpha", "/tokenize", json!({"prompt": text}), "0"),
        (
            "b",
            "beta",
            TEXT,
            json!({"prompt": text, "max_tokens": 0}),
            "0",
        ),
        ("c", "gamma", TEXT, json!({"prompt": text}), "1"),
    ] {
        let request = Request::post(path).header(JSON.0, JSON.1);
        let request = request.header("x-api-key", key);
        let request = request.body(Body::from(body.to_string())).unwrap();
        let router = tenants.server.router.clone();
        let left = Box::pin(router.oneshot(request)).now_or_never();
        assert!(left.is_none(), "another thread reads the text");
        let labels = format!("{{model_name=\"actor\",engine=\"0\",tenant=\"{tenant}\"}}");
        let service = format!("sterna_tenant_service_seconds_total{labels}");
        let is_charged = |server: &Server| server.metric(&service) > 0.0;
        let server = &tenants.server;
        server.until("the tenant was charged", is_charged).await;
        let keys = [("x-api-key", key)];
        let next = tenants
            .ask("/tokenize", &keys, &json!({"prompt": "Hi"}))
            .await;
        assert_eq!(next.status, 200, "{tenant}: {}", next.body);
        assert_eq!(
            next.header("x-ratelimit-remaining-requests"),
            remaining,
            "{tenant}"
        );
    }
}

/// Checks that the other tenant gets its answer, without rate headers.
async fn other_tenant_is_unaffected(tenants: &TenantServer) {
    let answer = tenants.complete("beta", &json!({"max_tokens": 2})).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert!(!answer.headers.contains_key("x-ratelimit-limit-requests"));
}

#[tokio::test]
async fn a_request_that_fails_counts_as_one_request() {
    let limited = table("a", ALPHA, "requests_per_minute = 2\nrequest_burst = 4");
    let tenants = TenantServer::new(&limited).await;
    let invalid = json!({"max_tokens": 0});
    let other_model = json!({"model": "none"});
    for (body, status, remaining) in [(&invalid, 400, "3"), (&other_model, 404, "2")] {
        let failed = tenants.complete("alpha", body).await;
        assert_eq!(failed.status, status, "{}", failed.body);
        assert_eq!(failed.header("x-ratelimit-remaining-requests"), remaining);
    }
    let answered = tenants.complete("alpha", &json!({"max_tokens": 2})).await;
    assert_eq!(answered.header("x-ratelimit-remaining-requests"), "1");
    let headers = [JSON, ("x-api-key", "alpha")];
    let send = async |body: &'static str| {
        let server = &tenants.server;
        server.send(Method::POST, TEXT, &headers, body).await
    };
    let failed = send("{").await;
    assert_eq!(failed.status, 400);
    assert_eq!(failed.header("x-ratelimit-remaining-requests"), "0");
    let limited = send("{").await;
    assert_eq!(limited.error(), (429, "rate_limit_exceeded".into(), None));
    assert!(limited.headers.contains_key("retry-after"));
}

#[tokio::test]
async fn one_request_may_exceed_the_token_rate() {
    let limited = table("a", ALPHA, "tokens_per_minute = 60\ntoken_burst = 10");
    let tenants = TenantServer::new(&limited).await;
    let long = json!({"max_tokens": 60});
    let answer = tenants.complete("alpha", &long).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(answer.header("x-ratelimit-limit-tokens"), "10");
    let rejected = tenants.complete("alpha", &long).await;
    assert_eq!(rejected.error(), (429, "rate_limit_exceeded".into(), None));
    assert_eq!(rejected.header("x-ratelimit-remaining-tokens"), "0");
    assert!(
        rejected.body.contains("tokens per minute"),
        "{}",
        rejected.body
    );
}

#[tokio::test]
async fn a_full_tenant_queue_is_429_and_does_not_affect_other_tenants() {
    let limited = table("a", ALPHA, "max_running = 1\nmax_queued = 1");
    let tenants = TenantServer::new(&(limited + &table("b", BETA, ""))).await;
    let server = &tenants.server;
    server.gate.close();
    let body = json!({"prompt": "Hello", "max_tokens": 300});
    let running = begin(server, "alpha", &body);
    server.gate.arrivals(1).await;
    let waiting = [begin(server, "alpha", &body), begin(server, "alpha", &body)];
    let other = begin(server, "beta", &body);
    tokio::task::yield_now().await; // The tasks submit their requests.
    // The engine accepts the requests after this step and reports that after the next step.
    for steps in 2..=3 {
        server.gate.pass(1);
        server.gate.arrivals(steps).await;
    }
    // No step has run that could end an accepted request, so the request that ended was rejected.
    let (rejected, _, mut waiting) = select_all(waiting).await;
    let rejected = rejected.unwrap();
    assert_eq!(rejected.error(), (429, "concurrency_limit".into(), None));
    assert!(rejected.headers.contains_key("retry-after"));
    server.gate.open();
    other.await.unwrap().ok();
    running.await.unwrap().ok();
    waiting.remove(0).await.unwrap().ok();
}

/// Sends requests of one tenant without a pause until it is aborted.
fn flood(server: &Server, key: &'static str) -> JoinHandle<()> {
    let (router, body) = (server.router.clone(), greedy(&json!({"max_tokens": 20})));
    let body = harness::merged(json!({"prompt": "Hello"}), body).to_string();
    tokio::spawn(async move {
        loop {
            let headers = [JSON, ("x-api-key", key)];
            let answer = harness::send(&router, Method::POST, TEXT, &headers, body.clone()).await;
            assert!(
                [200, 429, 503].contains(&answer.status.as_u16()),
                "{}",
                answer.body
            );
            tokio::task::yield_now().await;
        }
    })
}

#[tokio::test]
async fn a_tenant_is_served_beside_four_flooding_tenants() {
    let flooding = [
        ("alpha", ALPHA),
        ("beta", BETA),
        ("gamma", GAMMA),
        ("delta", DELTA),
    ];
    let tables = flooding.map(|(id, hash)| table(id, hash, "max_queued = 16"));
    let tables = tables.concat() + &table("epsilon", EPSILON, "");
    let tenants = TenantServer::queueing(&tables, 4, 16).await;
    let server = &tenants.server;
    let floods = flooding
        .iter()
        .flat_map(|(key, _)| (0..12).map(|_| flood(server, key)));
    let floods: Vec<_> = floods.collect();
    let refused = "sterna_refusals_total{model_name=\"actor\",engine=\"0\",reason=\"queue_full\"}";
    let is_full = |server: &Server| server.metric(refused) > 50.0;
    server.until("the queue is full", is_full).await;
    for request in 0..64 {
        let answer = tenants.complete("epsilon", &json!({"max_tokens": 5})).await;
        assert_eq!(answer.status, 200, "request {request}: {}", answer.body);
    }
    for flood in floods {
        assert!(!flood.is_finished(), "the flood went on");
        flood.abort();
    }
}

/// The head of a stream waits for its first token, so a displaced stream can still be refused.
#[tokio::test]
async fn a_displaced_stream_is_503_and_its_place_goes_to_the_other_tenant() {
    let tables = table("a", ALPHA, "") + &table("b", BETA, "");
    let tenants = TenantServer::queueing(&tables, 1, 2).await;
    let server = &tenants.server;
    server.gate.close();
    let body = json!({"prompt": "Hello", "max_tokens": 300, "stream": true, "n": 2});
    let running = begin(server, "alpha", &body);
    server.gate.arrivals(1).await;
    let mut waiting = Vec::new();
    for queued in [3, 5] {
        waiting.push(begin(server, "alpha", &body));
        let is_queued = |server: &Server| server.engine.status().queued >= queued;
        server.step_until("the request is queued", is_queued).await;
    }
    let victim = begin(server, "beta", &json!({"prompt": "Hello", "max_tokens": 3}));
    let is_displaced = |_: &Server| waiting[1].is_finished();
    server
        .step_until("a stream is displaced", is_displaced)
        .await;
    let displaced = waiting.remove(1).await.unwrap();
    assert_eq!(displaced.error(), (503, "engine_overloaded".into(), None));
    assert!(displaced.headers.contains_key("retry-after"));
    server.gate.open();
    victim.await.unwrap().ok();
    for answered in [running, waiting.remove(0)] {
        assert_eq!(answered.await.unwrap().status, 200);
    }
    let idle = |server: &Server| server.engine.status().running == 0;
    server.until("nothing runs", idle).await;
    assert_eq!(server.metric("sterna_client_disconnects_total"), 0.0);
}

/// Six requests of eight choices came at once, and all of them ran.
#[tokio::test]
async fn a_token_rate_is_exceeded_by_one_request_and_retry_after_is_true() {
    let limited = table("a", ALPHA, "tokens_per_minute = 60000\ntoken_burst = 100");
    let tenants = TenantServer::new(&limited).await;
    let server = &tenants.server;
    server.gate.close();
    let body = json!({"prompt": "Hello", "max_tokens": 50, "n": 8});
    let mut requests: Vec<_> = (0..6).map(|_| begin(server, "alpha", &body)).collect();
    let are_rejected = |_: &Server| {
        let ended = requests.iter().filter(|request| request.is_finished());
        ended.count() == 5
    };
    server.step_until("five are rejected", are_rejected).await;
    let accepted = requests
        .iter()
        .position(|request| !request.is_finished())
        .unwrap();
    let accepted = requests.remove(accepted);
    let mut latest = Duration::ZERO;
    for request in requests {
        let rejected = request.await.unwrap();
        assert_eq!(rejected.error(), (429, "rate_limit_exceeded".into(), None));
        let millis: u64 = rejected.header("retry-after-ms").parse().unwrap();
        latest = latest.max(Duration::from_millis(millis));
    }
    assert!(
        latest > Duration::from_millis(200),
        "{latest:?} for 400 tokens"
    );
    wait_until(server, Instant::now() + latest).await;
    server.gate.open();
    accepted.await.unwrap().ok();
    tenants
        .complete("alpha", &json!({"max_tokens": 2}))
        .await
        .ok();
}

#[tokio::test]
async fn a_first_token_after_its_deadline_is_504() {
    let hurried = table("a", ALPHA, "first_token_seconds = 2");
    let roster = TempFile::new(&(hurried + &table("b", BETA, ""))).roster();
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
    let is_queued = |server: &Server| server.engine.status().queued > 0;
    server.step_until("the request is queued", is_queued).await;
    wait_until(&server, Instant::now() + Duration::from_secs(2)).await;
    server.gate.open();
    let late = late.await.unwrap();
    assert_eq!(late.error(), (504, "deadline_exceeded".into(), None));
    running.await.unwrap().ok();
}

#[tokio::test]
async fn an_answer_that_exceeds_its_deadline_ends_with_an_error_frame() {
    let tenants = TenantServer::new(&table("a", ALPHA, "total_seconds = 3")).await;
    let server = &tenants.server;
    server.gate.close();
    let start = Instant::now();
    let body = json!({"prompt": "Hello", "max_tokens": 300, "stream": true});
    let request = begin(server, "alpha", &body);
    server.gate.pass(2);
    server.gate.arrivals(3).await;
    wait_until(server, start + Duration::from_secs(3)).await;
    server.gate.open();
    let events = request.await.unwrap().events();
    let (last, pieces) = events.split_last().unwrap();
    assert_eq!(last["error"]["type"], "timeout_error");
    assert!(!streamed_text(pieces).is_empty());
}

#[tokio::test]
async fn guaranteed_pages_cannot_exceed_the_pages_of_the_server() {
    let tenants = TenantServer::new(&table("a", ALPHA, "guaranteed_pages = 1000")).await;
    let file = TempFile::new(&table("a", ALPHA, "guaranteed_pages = 1025"));
    let roster = file.roster();
    let rejected = tenants.server.engine.set_tenants(roster.policies()).await;
    assert!(
        matches!(rejected, Err(TenantsRefused::Impossible(_))),
        "{rejected:?}"
    );
    file.write(&table("a", ALPHA, "guaranteed_pages = 4000000000"));
    let message = program::start_error(&["--tenants", file.path()]);
    assert!(
        message.contains("`guaranteed_pages` of all tenants add up to 4000000000"),
        "{message}"
    );
}

#[tokio::test]
async fn every_response_to_a_tenant_with_rates_reports_them() {
    let rates =
        "requests_per_minute = 1\nrequest_burst = 7\ntokens_per_minute = 600\nmodels = [\"actor\"]";
    let tenants = TenantServer::new(&(table("a", ALPHA, rates) + &table("b", BETA, ""))).await;
    let server = &tenants.server;
    let key = ("x-api-key", "alpha");
    let left = |answer: &Answer| {
        assert_eq!(answer.header("x-ratelimit-limit-requests"), "7");
        assert_eq!(answer.header("x-ratelimit-limit-tokens"), "600");
        assert!(answer.headers.contains_key("x-ratelimit-remaining-tokens"));
        assert!(answer.headers.contains_key("x-ratelimit-reset-tokens"));
        let reset = answer.header("x-ratelimit-reset-requests");
        let remaining = answer.header("x-ratelimit-remaining-requests");
        assert_eq!(reset == "0s", remaining == "7", "{reset} {remaining}");
        remaining.to_owned()
    };
    let first = server.send(Method::GET, "/v1/models", &[key], "").await;
    assert_eq!(left(&first), "7");
    let answer = tenants.complete("alpha", &json!({"max_tokens": 2})).await;
    assert_eq!((answer.status.as_u16(), left(&answer)), (200, "6".into()));
    let large = format!("\"{}\"", "x".repeat(2 << 20));
    let invalid = "{\"prompt\": \"\", \"n\": 0}";
    for (method, path, kind, body, status, remaining) in [
        (Method::GET, "/v1/models", "", "", 200, "6"),
        (Method::GET, "/v1/models/other", "", "", 404, "6"),
        (Method::GET, "/v1/nothing", "", "", 404, "6"),
        (Method::GET, TEXT, "", "", 405, "6"),
        (Method::POST, TEXT, "text/plain", "{}", 415, "5"),
        (Method::POST, TEXT, JSON.1, "{", 400, "4"),
        (Method::POST, TEXT, JSON.1, invalid, 400, "3"),
        (Method::POST, TEXT, JSON.1, &large, 413, "2"),
        (
            Method::POST,
            TEXT,
            JSON.1,
            "{\"model\": \"other\"}",
            404,
            "1",
        ),
        (Method::GET, "/v1/models", "", "", 200, "1"),
    ] {
        let headers = [key, ("content-type", kind)];
        let answer = server.send(method, path, &headers, body.to_owned()).await;
        assert_eq!(answer.status, status, "{path} {}", answer.body);
        assert_eq!(left(&answer), remaining, "{path} {status}");
    }
    let none = |answer: &Answer| {
        let mut names = answer.headers.keys().map(|name| name.as_str());
        assert!(!names.any(|name| name.starts_with("x-ratelimit-")));
    };
    none(&server.get("/v1/models").await); // Without a key.
    none(&server.get("/health").await);
    none(&tenants.complete("beta", &json!({"n": 0})).await);
}

#[tokio::test]
async fn a_changed_rate_is_in_the_next_response() {
    let tenants = TenantServer::new(&table(
        "a",
        ALPHA,
        "requests_per_minute = 1\nrequest_burst = 2",
    ))
    .await;
    tenants
        .complete("alpha", &json!({"max_tokens": 2}))
        .await
        .ok();
    let file = TempFile::new(&table(
        "a",
        ALPHA,
        "requests_per_minute = 1\nrequest_burst = 9",
    ));
    let roster = file.roster();
    let engine = &tenants.server.engine;
    engine.set_tenants(roster.policies()).await.unwrap();
    tenants.app.set_tenants(roster.tenants());
    let key = [("x-api-key", "alpha")];
    let answer = tenants
        .server
        .send(Method::GET, "/v1/models", &key, "")
        .await;
    assert_eq!(answer.header("x-ratelimit-limit-requests"), "9");
    assert_eq!(answer.header("x-ratelimit-remaining-requests"), "8");
}

#[tokio::test]
async fn several_choices_count_as_one_request() {
    let limited = table("a", ALPHA, "requests_per_minute = 1\nrequest_burst = 1");
    let tenants = TenantServer::new(&limited).await;
    let body = json!({"max_tokens": 2, "n": 3});
    let answer = tenants.complete("alpha", &body).await;
    assert_eq!(answer.header("x-ratelimit-remaining-requests"), "0");
    assert_eq!(answer.ok()["choices"].as_array().unwrap().len(), 3);
    let rejected = tenants.complete("alpha", &json!({"max_tokens": 2})).await;
    assert_eq!(rejected.error(), (429, "rate_limit_exceeded".into(), None));
}

#[tokio::test]
async fn the_metric_of_a_tenants_pages_follows_its_cached_pages() {
    let tenants = TenantServer::new(&(table("a", ALPHA, "") + &table("b", BETA, ""))).await;
    let server = &tenants.server;
    let names = [(TenantId(1), "a".to_owned()), (TenantId(2), "b".to_owned())];
    server.metrics.set_tenants(&names, Vec::new());
    let pages = |server: &Server| {
        let labels = "{model_name=\"actor\",engine=\"0\",tenant=\"a\"}";
        server.metric(&format!("sterna_tenant_kv_pages{labels}"))
    };
    let long = json!({"prompt": vec![20; 400], "max_tokens": 2});
    tenants.complete("alpha", &long).await.ok();
    let cached = |server: &Server| pages(server) >= 25.0;
    server.until("the tenant's cached pages", cached).await;
    server.engine.reset_prefix_cache().await.unwrap();
    server
        .until("no page of the tenant", |server| pages(server) == 0.0)
        .await;
}

/// Returns in which order requests end that come one after another while one runs. Each is of a
/// client, or has another header.
async fn order_of_ends(trusted: bool, headers: [(&'static str, &'static str); 4]) -> Vec<u32> {
    let more = if trusted { "trusted = true" } else { "" };
    let tenants = TenantServer::queueing(&table("a", ALPHA, more), 1, 8).await;
    let server = &tenants.server;
    server.gate.close();
    let (ended, mut ends) = tokio::sync::mpsc::unbounded_channel();
    let mut steps = 0;
    for (number, header) in (0u32..).zip(headers) {
        let body = json!({"prompt": "Hello", "max_tokens": 40, "temperature": 0});
        let request = Request::post(TEXT)
            .header(JSON.0, JSON.1)
            .header("x-api-key", "alpha")
            .header(header.0, header.1)
            .body(Body::from(body.to_string()))
            .unwrap();
        let (router, ended) = (server.router.clone(), ended.clone());
        tokio::spawn(async move {
            Answer::read(router.oneshot(request).await.unwrap())
                .await
                .ok();
            ended.send(number).unwrap();
        });
        // The engine takes new requests between two steps.
        while server.engine.status().running + server.engine.status().queued <= number {
            if steps > 0 {
                server.gate.pass(1);
            }
            steps += 1;
            server.gate.arrivals(steps).await;
            tokio::task::yield_now().await;
        }
    }
    let mut order = Vec::new();
    let mut left = headers.len() as u32;
    while left > 1 {
        // An end is published during the next step.
        server.gate.pass(2);
        steps += 2;
        server.gate.arrivals(steps).await;
        let status = server.engine.status();
        if status.running + status.queued < left {
            left -= 1;
            order.push(ends.recv().await.unwrap());
        }
    }
    server.gate.open();
    order.push(ends.recv().await.unwrap());
    order
}

#[tokio::test]
async fn the_clients_of_a_trusted_tenant_take_turns() {
    let (ann, bob) = (
        ("x-llm-d-inference-fairness-id", "ann"),
        ("x-gateway-inference-fairness-id", "bob"),
    );
    assert_eq!(
        order_of_ends(true, [ann, ann, ann, bob]).await,
        [0, 3, 1, 2]
    );
    assert_eq!(
        order_of_ends(false, [ann, ann, ann, bob]).await,
        [0, 1, 2, 3]
    );
}

#[tokio::test]
async fn a_trusted_tenant_may_lower_the_priority_of_a_request() {
    let (bulk, batch) = (
        ("x-smg-priority", "bulk"),
        ("x-llm-d-inference-objective", "batch"),
    );
    // The tenant's own band is `standard`, so `interactive` raises nothing.
    let (usual, high) = (("x-request-id", "r"), ("x-smg-priority", "interactive"));
    assert_eq!(
        order_of_ends(true, [usual, bulk, usual, high]).await,
        [0, 2, 3, 1]
    );
    assert_eq!(
        order_of_ends(true, [usual, batch, usual, high]).await,
        [0, 2, 3, 1]
    );
    assert_eq!(
        order_of_ends(false, [usual, bulk, usual, high]).await,
        [0, 1, 2, 3]
    );
    let trusted = TenantServer::new(&table("a", ALPHA, "trusted = true")).await;
    let headers = [("x-api-key", "alpha"), ("x-smg-priority", "urgent")];
    let answer = trusted
        .ask(TEXT, &headers, &json!({"prompt": "Hello"}))
        .await;
    assert_eq!(
        answer.error(),
        (400, "invalid_value".into(), Some("x-smg-priority".into()))
    );
}
