//! The list of models, health and readiness.

use std::io::Read;
use std::time::Instant;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Method, Request};
use flate2::read::GzDecoder;
use serde_json::{Value, json};
use sterna::api::{self, App};
use tokio::time::timeout;
use tower::ServiceExt;

use crate::harness::*;

#[tokio::test]
async fn the_model_is_found_by_all_its_names() {
    let server = Server::new();
    let models = server.get("/v1/models").await.ok();
    assert_eq!(models["object"], "list");
    let model = &models["data"][0];
    let listed = models["data"].as_array().unwrap();
    let ids: Vec<&Value> = listed.iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, ["actor", "gpt-x"], "every name except `default`");
    assert!(
        listed
            .iter()
            .all(|one| one["root"] == "actor" && one["owned_by"] == "vllm")
    );
    assert_eq!(
        (&model["id"], &model["object"], &model["max_model_len"]),
        (&json!("actor"), &json!("model"), &json!(MAX_MODEL_LEN))
    );
    for name in ["actor", "gpt-x", "default"] {
        assert_eq!(server.get(&format!("/v1/models/{name}")).await.ok(), *model);
    }
    assert_eq!(
        server.get("/v1/models/org/other").await.error(),
        (404, "model_not_found".into(), Some("model".into()))
    );
    assert_eq!(
        server.get("/v1/models/%FF").await.error(),
        (404, "model_not_found".into(), Some("model".into()))
    );
}

#[tokio::test]
async fn health_and_readiness_follow_the_servers_life() {
    let loading = api::router(App::loading());
    let get = async |router: &Router, path: &str| {
        send(router, Method::GET, path, &[], Body::empty()).await
    };
    assert_eq!(get(&loading, "/health").await.status, 200);
    let not_ready = get(&loading, "/ready").await;
    assert_eq!(not_ready.error(), (503, "loading".into(), None));
    assert!(not_ready.header("retry-after").parse::<u64>().unwrap() >= 1);
    assert_eq!(get(&loading, "/v1/models").await.error().1, "loading");

    let server = Server::new();
    assert_eq!(server.get("/health").await.ok(), json!({"status": "ok"}));
    assert_eq!(server.get("/ready").await.status, 200);
    assert!(
        server
            .get("/metrics")
            .await
            .body
            .contains("vllm:num_requests_running")
    );
    server.engine.drain();
    assert_eq!(server.get("/health").await.status, 200);
    // The idle engine ends at once; the server lives until the process exits.
    let ending = async { while server.engine.set_tenants(Vec::new()).await.is_ok() {} };
    timeout(PATIENCE, ending).await.expect("the engine ends");
    assert_eq!(server.get("/health").await.status, 200);
    for rejected in [server.get("/ready").await, server.chat(json!({})).await] {
        assert_eq!(rejected.error(), (503, "draining".into(), None));
        assert!(rejected.header("retry-after").parse::<u64>().unwrap() >= 1);
        assert_eq!(rejected.header("connection"), "close");
    }
}

#[tokio::test]
async fn the_metrics_count_every_response() {
    let server = Server::new();
    server.get("/v1/models").await.ok();
    server.get("/v1/models/nobody").await;
    server.get("/made-up-by-a-client").await;
    server.post("/v1/chat/completions", &json!({"n": 0})).await;
    let text = server.get("/metrics").await.body;
    for (route, status) in [
        ("/v1/models", 200),
        ("/v1/models/{*id}", 404),
        ("unknown", 404),
        ("/v1/chat/completions", 400),
    ] {
        let labels = format!("route=\"{route}\",status=\"{status}\"}} 1");
        assert!(text.contains(&labels), "{labels}\n{text}");
    }
    assert!(!text.contains("made-up"));
}

#[tokio::test]
async fn the_last_minutes_of_the_charted_metrics_are_kept() {
    let server = Server::new();
    let samples = async || server.get("/metrics/recent").await.ok()["samples"].clone();
    assert_eq!(samples().await, json!([]));
    let tokens = "vllm:generation_tokens_total";
    server.metrics.keep_sample(Instant::now());
    server.complete(json!({"max_tokens": 2})).await.ok();
    server.post("/v1/chat/completions", &json!({"n": 0})).await;
    server.metrics.keep_sample(Instant::now());
    let samples = samples().await;
    let value = |sample: usize, name: &str| {
        let text = samples[sample]["metrics"].as_str().unwrap();
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.rsplit(' ').next().unwrap().parse::<f64>().ok()
    };
    assert_eq!(value(0, tokens), Some(0.0));
    assert_eq!(value(1, tokens), Some(2.0));
    let ages = [0, 1].map(|sample: usize| samples[sample]["age_ms"].as_u64().unwrap());
    assert!(ages[0] >= ages[1], "{ages:?}");
    let text = samples[1]["metrics"].as_str().unwrap();
    assert!(text.contains("status=\"400\"} 1"), "{text}");
    assert!(!text.contains("status=\"200\"") && !text.contains("tenant"));
    assert!(text.contains("vllm:time_to_first_token_seconds_bucket"));
}

#[tokio::test]
async fn the_metrics_are_compressed_for_those_who_ask() {
    let server = Server::new();
    for (coding, is_compressed) in [
        ("gzip", true),
        ("deflate, GZIP;q=0.5", true),
        ("gzip;q=0, deflate", false),
        ("identity", false),
    ] {
        let request = Request::get("/metrics").header("accept-encoding", coding);
        let request = request.body(Body::empty()).unwrap();
        let response = server.router.clone().oneshot(request).await.unwrap();
        let encoding = response.headers().get("content-encoding").cloned();
        assert_eq!(encoding.is_some(), is_compressed, "{coding}");
        assert_eq!(response.headers()["vary"], "accept-encoding", "{coding}");
        let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        let mut text = String::new();
        match is_compressed {
            true => GzDecoder::new(&*body).read_to_string(&mut text),
            false => (&*body).read_to_string(&mut text),
        }
        .unwrap();
        assert!(text.contains("vllm:num_requests_running"), "{coding}");
    }
}
