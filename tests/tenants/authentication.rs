//! API keys: which requests need one, and where a client sends it.

use axum::body::Body;
use axum::http::Method;
use serde_json::{Value, json};
use sterna::api::App;

use crate::harness::{self, Server};
use crate::{ALPHA, BETA, CHAT, CONNECTIONS, JSON, TEXT, TempFile, TenantServer, table};

#[tokio::test]
async fn every_route_except_the_open_ones_needs_a_key() {
    let tenants = TenantServer::new(&table("a", ALPHA, "")).await;
    let without_valid_key: [&[(&str, &str)]; 9] = [
        &[],
        &[("authorization", "Bearer beta")],
        &[("authorization", "Bearer ")],
        &[("authorization", "Bearer")],
        &[("authorization", "Basic alpha")],
        &[("authorization", "alpha")],
        &[("x-api-key", "")],
        &[("x-api-key", ALPHA)],
        &[("authorization", "Bearer beta"), ("x-api-key", "alpha")],
    ];
    for (method, path) in [
        (Method::POST, CHAT),
        (Method::POST, TEXT),
        (Method::GET, CHAT),
        (Method::GET, "/v1/models"),
        (Method::GET, "/v1/models/actor"),
        (Method::GET, "/metrics"),
        (Method::GET, "/metrics/recent"),
        (Method::GET, "/metrics/"),
        (Method::GET, "//health"),
        (Method::GET, "/health/"),
        (Method::GET, "/nothing"),
        (Method::DELETE, "/v1/requests/1"),
    ] {
        for headers in without_valid_key {
            let rejected = tenants
                .server
                .send(method.clone(), path, headers, "{}")
                .await;
            let code = "invalid_api_key".to_owned();
            assert_eq!(rejected.error(), (401, code, None), "{path} {headers:?}");
            assert_eq!(rejected.header("www-authenticate"), "Bearer");
            assert!(rejected.body.contains("\"authentication_error\""));
            assert!(rejected.headers.contains_key("x-request-id"));
            assert!(!rejected.body.contains("alpha") && !rejected.body.contains("beta"));
        }
        let known = [("authorization", "Bearer alpha")];
        let answer = tenants.server.send(method, path, &known, "{}").await;
        assert_ne!(answer.status, 401, "{path}");
    }
    for path in ["/", "/page/app.js", "/health", "/ready"] {
        assert_eq!(tenants.server.get(path).await.status, 200, "{path}");
    }
}

/// Anthropic's clients read the kind of an error from `error.type`, and `type` says that it is one.
#[tokio::test]
async fn refusals_of_messages_have_anthropics_form() {
    let limited = table("a", ALPHA, "requests_per_minute = 1\nrequest_burst = 1");
    let tenants = TenantServer::new(&limited).await;
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2});
    let ask = async |key| {
        tenants
            .ask("/v1/messages", &[("x-api-key", key)], &body)
            .await
    };
    let accepted = ask("alpha").await;
    assert_eq!(accepted.status, 200, "{}", accepted.body);
    for (key, status, kind) in [
        ("beta", 401, "authentication_error"),
        ("alpha", 429, "rate_limit_error"),
    ] {
        let refused = ask(key).await;
        assert_eq!(refused.status, status, "{}", refused.body);
        let body: Value = serde_json::from_str(&refused.body).unwrap();
        assert_eq!(body["type"], "error");
        assert_eq!(body["error"]["type"], kind);
        assert_eq!(body["request_id"], refused.header("x-request-id"));
        assert_eq!(refused.headers.contains_key("retry-after"), status == 429);
    }
}

#[tokio::test]
async fn a_key_may_be_in_either_header() {
    let tenants = TenantServer::new(&table("a", ALPHA, "")).await;
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2});
    for header in [
        ("authorization", "Bearer alpha"),
        ("authorization", "bearer  alpha"),
        ("Authorization", "BEARER alpha"),
        ("x-api-key", "alpha"),
        ("X-Api-Key", " alpha "),
    ] {
        let answer = tenants.ask(CHAT, &[header], &body).await.ok();
        assert_eq!(answer["usage"]["completion_tokens"], 2, "{header:?}");
    }
}

#[tokio::test]
async fn without_tenants_a_request_needs_no_key() {
    let server = Server::new();
    server.complete(json!({"max_tokens": 2})).await.ok();
    server.chat(json!({"max_tokens": 2})).await.ok();
    let headers = [JSON, ("authorization", "Bearer none")];
    let body = json!({"prompt": "Hello", "max_tokens": 2, "temperature": 0}).to_string();
    server.send(Method::POST, TEXT, &headers, body).await.ok();
    assert_eq!(server.get("/metrics").await.status, 200);
}

#[tokio::test]
async fn only_the_admin_key_reads_the_metrics_and_it_does_nothing_else() {
    let admin = format!("[admin]\nkey_sha256 = \"{BETA}\"\n");
    let tenants = TenantServer::new(&(table("a", ALPHA, "") + &admin)).await;
    let get = async |key: &str, path: &str| {
        let headers = [("x-api-key", key)];
        let server = &tenants.server;
        server
            .send(Method::GET, path, &headers, Body::empty())
            .await
    };
    for path in ["/metrics", "/metrics/recent"] {
        let refused = get("alpha", path).await;
        assert_eq!(refused.error(), (403, "admin_key_required".into(), None));
        assert_eq!(get("beta", path).await.status, 200);
    }
    let metrics = get("beta", "/metrics").await;
    assert_eq!(metrics.status, 200);
    assert!(metrics.body.contains("sterna_tenant_"));
    for path in ["/v1/models", CHAT, "/nothing", "/metrics/"] {
        let refused = get("beta", path).await;
        assert_eq!(refused.error(), (403, "tenant_key_required".into(), None));
    }
    let body = json!({"max_tokens": 2});
    assert_eq!(tenants.complete("beta", &body).await.status, 403);
    assert_eq!(get("gamma", "/metrics").await.status, 401);
    assert_eq!(get("beta", "/health").await.status, 200);
}

#[tokio::test]
async fn metrics_need_no_key_if_the_operator_opens_them() {
    let roster = TempFile::new(&table("a", ALPHA, "")).roster();
    let server = Server::start(App::for_tenants(roster.tenants(), true, CONNECTIONS), 8, 64);
    for path in ["/metrics", "/metrics/recent"] {
        assert_eq!(server.get(path).await.status, 200);
    }
    assert_eq!(server.get("/v1/models").await.status, 401);
}

#[tokio::test]
async fn the_server_never_reads_a_body_without_a_valid_key() {
    let tenants = TenantServer::new(&table("a", ALPHA, "")).await;
    let body = Body::from_stream(futures_util::stream::pending::<Result<Vec<u8>, String>>());
    let rejected = tenants.server.send(Method::POST, TEXT, &[JSON], body).await;
    assert_eq!(rejected.status, 401);
}

#[tokio::test]
async fn keys_are_checked_while_the_model_loads() {
    let roster = TempFile::new(&table("a", ALPHA, "")).roster();
    let router = sterna::api::router(App::for_tenants(roster.tenants(), false, CONNECTIONS));
    let get = async |key: &str| {
        let headers = [("x-api-key", key)];
        harness::send(&router, Method::GET, "/v1/models", &headers, Body::empty()).await
    };
    assert_eq!(get("beta").await.status, 401);
    assert_eq!(get("alpha").await.error().1, "loading");
}
