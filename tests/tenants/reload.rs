//! Reading the tenants file again while requests run and wait.

use axum::body::Body;
use axum::http::Method;
use serde_json::json;
use tokio::time::timeout;

use crate::harness::{PATIENCE, Server, streamed_text};
use crate::{ALPHA, BETA, GAMMA, TempFile, TenantServer, begin, table};

#[tokio::test]
async fn a_reload_changes_the_valid_keys_and_drops_no_request() {
    let tenants = TenantServer::new(&(table("a", ALPHA, "") + &table("b", BETA, ""))).await;
    let server = &tenants.server;
    server.gate.close();
    let body = json!({"prompt": "Hello", "temperature": 0, "max_tokens": 200, "stream": true,
                      "stream_options": {"include_usage": true}});
    let running = begin(server, "alpha", &body);
    server.gate.arrivals(1).await;
    let waiting = begin(server, "alpha", &body);

    let file = TempFile::new(&(table("b", BETA, "weight = 2") + &table("c", GAMMA, "")));
    let second = file.roster();
    let engine = server.engine.clone();
    let policies = second.policies();
    let set = tokio::spawn(async move { engine.set_tenants(policies).await });
    let applied = async {
        for step in 2.. {
            tokio::task::yield_now().await;
            if set.is_finished() {
                break;
            }
            server.gate.pass(1); // The engine takes policies between two steps.
            server.gate.arrivals(step).await;
        }
        set.await.unwrap()
    };
    timeout(PATIENCE, applied).await.unwrap().unwrap();
    tenants.app.set_tenants(second.tenants());
    assert!(!running.is_finished(), "a running request continues");
    let models = async |key| {
        let headers = [("x-api-key", key)];
        server
            .send(Method::GET, "/v1/models", &headers, Body::empty())
            .await
            .status
    };
    assert_eq!(models("alpha").await, 401);
    assert_eq!(models("beta").await, 200);
    assert_eq!(models("gamma").await, 200);
    server.gate.open();
    for request in [running, waiting] {
        let events = request.await.unwrap().events();
        let usage = &events.last().unwrap()["usage"];
        let prompt_tokens = usage["prompt_tokens"].as_u64().unwrap() as usize;
        assert_eq!(streamed_text(&events), server.script(prompt_tokens, 200));
    }
    tenants
        .complete("gamma", &json!({"max_tokens": 2}))
        .await
        .ok();
    let idle = |server: &Server| server.engine.status().running == 0;
    server.until("nothing runs", idle).await;
    assert_eq!(server.metric("vllm:num_requests_running"), 0.0);
}

#[tokio::test]
async fn a_file_with_a_fault_changes_nothing() {
    let file = TempFile::new(&table("a", ALPHA, ""));
    let roster = file.roster();
    file.write(&table("b", BETA, "weight = 0"));
    let error = roster.clone().reread().unwrap_err().to_string();
    assert!(error.contains(", line 4: "), "{error}");
    assert!(roster.tenants().find(Some(b"alpha")).is_some());
    assert!(roster.tenants().find(Some(b"beta")).is_none());
}
