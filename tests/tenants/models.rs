//! The models that a tenant may use: 403, 404 and the list of models.

use axum::body::Body;
use axum::http::Method;
use serde_json::{Value, json};

use crate::harness::Answer;
use crate::{ALPHA, BETA, CHAT, GAMMA, TEXT, TenantServer, table};

/// `alpha` may use only models of other servers, `beta` this model by an alias, `gamma` all models.
async fn start_server() -> TenantServer {
    let tables = [
        table("a", ALPHA, "models = [\"other\", \"elsewhere\"]"),
        table("b", BETA, "models = [\"other\", \"gpt-x\"]"),
        table("c", GAMMA, ""),
    ];
    TenantServer::new(&tables.concat()).await
}

/// Sends a request that names `model`, or no model.
async fn send(tenants: &TenantServer, key: &str, path: &str, model: Option<&str>) -> Answer {
    let body = json!({
        "model": model, "max_tokens": 2, "prompt": "Hello",
        "messages": [{"role": "user", "content": "Hello"}],
    });
    tenants.ask(path, &[("x-api-key", key)], &body).await
}

#[tokio::test]
async fn a_model_that_the_tenant_may_not_use_is_403() {
    let tenants = start_server().await;
    for path in [CHAT, TEXT] {
        for model in [None, Some("actor"), Some("gpt-x"), Some("default")] {
            let rejected = send(&tenants, "alpha", path, model).await;
            let error = (403, "model_not_allowed".into(), Some("model".into()));
            assert_eq!(rejected.error(), error, "{path} {model:?}");
            assert!(rejected.body.contains("\"permission_error\""));
            let named = rejected.body.contains("'actor'");
            assert_eq!(
                named,
                model == Some("actor"),
                "the error repeats only the name of the request"
            );
            for key in ["beta", "gamma"] {
                send(&tenants, key, path, model).await.ok();
            }
        }
        for key in ["alpha", "beta", "gamma"] {
            let rejected = send(&tenants, key, path, Some("other")).await;
            let error = (404, "model_not_found".into(), Some("model".into()));
            assert_eq!(rejected.error(), error, "{path} {key}");
            assert_eq!(rejected.body.contains("'actor'"), key != "alpha", "{key}");
        }
    }
}

#[tokio::test]
async fn a_tenant_sees_only_the_models_that_it_may_use() {
    let tenants = start_server().await;
    let get = async |key: &str, path: &str| {
        let headers = [("x-api-key", key)];
        let server = &tenants.server;
        server
            .send(Method::GET, path, &headers, Body::empty())
            .await
    };
    let names = async |key: &str| {
        let list = get(key, "/v1/models").await.ok();
        let models = list["data"].as_array().unwrap().iter();
        models.map(|model| model["id"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(names("alpha").await, Vec::<Value>::new());
    assert_eq!(names("beta").await, ["actor", "gpt-x"]);
    assert_eq!(names("gamma").await, ["actor", "gpt-x"]);
    for name in ["actor", "gpt-x", "default"] {
        let path = format!("/v1/models/{name}");
        let rejected = get("alpha", &path).await;
        let error = (403, "model_not_allowed".into(), Some("model".into()));
        assert_eq!(rejected.error(), error, "{name}");
        assert_eq!(get("beta", &path).await.ok()["id"], "actor");
    }
    assert_eq!(get("alpha", "/v1/models/other").await.status, 404);
}
