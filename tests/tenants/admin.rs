//! What only the operator may do: reset the prefix cache, end requests.

use axum::body::Body;
use axum::http::{Method, Request};
use futures_util::StreamExt;
use serde_json::{Value, json};
use sterna::api::App;
use sterna::tenants::{Deadlines, anyone_and_admin};
use tokio::time::timeout;
use tower::ServiceExt;

use crate::harness::{Answer, PATIENCE, Server, merged};
use crate::{ALPHA, BETA, CHAT, CONNECTIONS, JSON, TEXT, TempFile, TenantServer, begin, table};

/// The key of the operator is `beta`.
async fn start_server() -> TenantServer {
    let admin = format!("[admin]\nkey_sha256 = \"{BETA}\"\n");
    TenantServer::new(&(table("a", ALPHA, "") + &admin)).await
}

async fn send(server: &Server, method: Method, path: &str, key: &str) -> Answer {
    server
        .send(method, path, &[("x-api-key", key)], Body::empty())
        .await
}

#[tokio::test]
async fn only_the_admin_key_resets_the_cache_and_ends_requests() {
    let tenants = start_server().await;
    let server = &tenants.server;
    for (method, path) in [
        (Method::POST, "/reset_prefix_cache"),
        (Method::POST, "/flush_cache"),
        (Method::DELETE, "/v1/requests/1"),
        (Method::GET, "/v1/requests/1"),
    ] {
        let none = server.send(method.clone(), path, &[], Body::empty()).await;
        assert_eq!(
            none.error(),
            (401, "invalid_api_key".into(), None),
            "{path}"
        );
        let tenant = send(server, method.clone(), path, "alpha").await;
        assert_eq!(
            tenant.error(),
            (403, "admin_key_required".into(), None),
            "{path}"
        );
        let admin = send(server, method, path, "beta").await;
        assert!(
            ![401, 403].contains(&admin.status.as_u16()),
            "{path} {}",
            admin.body
        );
    }
    // A server without tenants has no admin key unless its operator makes one.
    let server = Server::new();
    let refused = send(&server, Method::POST, "/flush_cache", "beta").await;
    assert_eq!(refused.error(), (403, "admin_key_required".into(), None));
    assert!(
        refused.body.contains("--admin-key-file"),
        "{}",
        refused.body
    );
}

#[tokio::test]
async fn a_server_without_tenants_can_have_an_admin_key() {
    let file = TempFile::new(&format!("[admin]\nkey_sha256 = \"{BETA}\"\n"));
    let tenants = anyone_and_admin(Deadlines::default(), file.path().as_ref()).unwrap();
    let server = Server::start(App::for_tenants(tenants, false, CONNECTIONS), 8, 64);
    server.complete(json!({"max_tokens": 2})).await.ok();
    assert_eq!(server.get("/metrics").await.status, 200);
    for key in ["", "alpha"] {
        let refused = send(&server, Method::POST, "/flush_cache", key).await;
        assert_eq!(refused.error(), (403, "admin_key_required".into(), None));
    }
    send(&server, Method::POST, "/flush_cache", "beta")
        .await
        .ok();
    let refused = send(&server, Method::GET, "/v1/models", "beta").await;
    assert_eq!(refused.error(), (403, "tenant_key_required".into(), None));
}

#[tokio::test]
async fn a_reset_frees_the_cached_pages_and_the_next_prompt_is_computed() {
    let tenants = start_server().await;
    let server = &tenants.server;
    let body = json!({"prompt": vec![5; 50], "max_tokens": 2});
    let cached = async || -> Value {
        let answer = tenants.complete("alpha", &body).await.ok();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    assert_eq!(cached().await, 0);
    assert_ne!(cached().await, 0);
    let reset = send(server, Method::POST, "/reset_prefix_cache", "beta")
        .await
        .ok();
    assert!(reset["freed_pages"].as_u64() >= Some(3), "{reset}");
    assert_eq!(server.engine.load().used_tokens, 0);
    assert_eq!(cached().await, 0);
    send(server, Method::POST, "/flush_cache", "beta")
        .await
        .ok();
    let again = send(server, Method::POST, "/flush_cache", "beta")
        .await
        .ok();
    assert_eq!(again["freed_pages"], 0);
}

#[tokio::test]
async fn an_aborted_request_ends_with_one_error_and_its_neighbours_go_on() {
    let tenants = start_server().await;
    let server = &tenants.server;
    server.gate.close();
    let named = async |id: &str, body: Value| {
        let headers = [("x-api-key", "alpha"), ("x-request-id", id)];
        tenants.ask(TEXT, &headers, &body).await
    };
    let several = json!({"prompt": "One", "max_tokens": 40, "n": 2});
    let single = json!({"prompt": "Two", "max_tokens": 40});
    let other = begin(
        server,
        "alpha",
        &json!({"prompt": "Three", "max_tokens": 40}),
    );
    let aborting = async {
        let are_running = |server: &Server| server.engine.load().running == 4;
        server.step_until("all are running", are_running).await;
        let first = send(server, Method::DELETE, "/v1/requests/first%2Fone", "beta").await;
        let second = send(server, Method::DELETE, "/v1/requests/second", "beta").await;
        server.gate.open();
        (first, second)
    };
    let (several, single, (first, second)) = tokio::join!(
        named("first/one", several),
        named("second", single),
        aborting
    );
    assert_eq!(first.ok(), json!({"id": "first/one", "aborted": 1}));
    assert_eq!(second.ok(), json!({"id": "second", "aborted": 1}));
    for ended in [several, single] {
        assert_eq!(ended.error(), (403, "request_aborted".into(), None));
    }
    let other = other.await.unwrap().ok();
    assert_eq!(other["usage"]["completion_tokens"], 40);
    assert_eq!(server.engine.load().running, 0);
    for id in [
        "first%2Fone",
        "second",
        "%FF",
        other["id"].as_str().unwrap(),
    ] {
        let path = format!("/v1/requests/{id}");
        let gone = send(server, Method::DELETE, &path, "beta").await;
        assert_eq!(
            gone.error(),
            (404, "request_not_found".into(), None),
            "{id}"
        );
    }
}

#[tokio::test]
async fn a_request_is_aborted_by_the_id_of_its_answer_too() {
    let conversation = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40});
    for (endpoint, body, id) in [
        (CHAT, &conversation, "/id"),
        (TEXT, &json!({"prompt": "Hi", "max_tokens": 40}), "/id"),
        ("/generate", &json!({"text": "Hi"}), "/meta_info/id"),
        ("/v1/messages", &conversation, "/message/id"),
        ("/v1/responses", &json!({"input": "Hi"}), "/response/id"),
    ] {
        let tenants = start_server().await;
        let server = &tenants.server;
        server.gate.close();
        let body = merged(json!({"stream": true}), body.clone());
        let request = Request::post(endpoint)
            .header(JSON.0, JSON.1)
            .header("x-api-key", "alpha")
            .body(Body::from(body.to_string()))
            .unwrap();
        server.gate.pass(3);
        let response = server.router.clone().oneshot(request).await.unwrap();
        let mut frames = response.into_body().into_data_stream();
        let mut next = async || {
            let frame = timeout(PATIENCE, frames.next()).await.unwrap();
            frame.map(|frame| String::from_utf8(frame.unwrap().to_vec()).unwrap())
        };
        let first = next().await.unwrap();
        let data = first.split_once("data: ");
        let (_, json) = data.unwrap_or_else(|| panic!("{endpoint}: no event: {first}"));
        let first: Value = serde_json::from_str(json).unwrap();
        let name = first.pointer(id).and_then(Value::as_str);
        let name = name.unwrap_or_else(|| panic!("{endpoint}: no id: {first}"));
        let path = format!("/v1/requests/{name}");
        let aborted = send(server, Method::DELETE, &path, "beta").await.ok();
        assert_eq!(aborted["aborted"], 1, "{endpoint}");
        server.gate.open();
        let mut rest = String::new();
        while let Some(frame) = next().await {
            rest += &frame;
        }
        assert!(
            rest.contains("operator of this server has ended"),
            "{endpoint}: {rest}"
        );
    }
}
