//! The list of models, health and readiness.

use axum::Router;
use axum::body::Body;
use axum::http::Method;
use serde_json::{Value, json};
use sterna::api::{self, App};
use tokio::time::timeout;

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
