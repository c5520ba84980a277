//! The models that a tenant may use: 403, 404 and the list of models.

use axum::body::Body;
use axum::http::Method;
use serde_json::{Value, json};

use crate::harness::Answer;
use crate::{ALPHA, BETA, CHAT, GAMMA, Guarded, TEXT, table};

/// `alpha` may use only models of other servers, `beta` this model by an alias, `gamma` all models.
async fn guarded() -> Guarded {
    let tables = [
        table("a", ALPHA, "models = [\"other\", \"elsewhere\"]"),
        table("b", BETA, "models = [\"other\", \"gpt-x\"]"),
        table("c", GAMMA, ""),
    ];
    Guarded::new(&tables.concat()).await
}

/// Sends a request that names `model`, or no model.
async fn send(guarded: &Guarded, key: &str, path: &str, model: Option<&str>) -> Answer {
    let body = json!({
        "model": model, "max_tokens": 2, "prompt": "Hello",
        "messages": [{"role": "user", "content": "Hello"}],
    });
    guarded.ask(path, &[("x-api-key", key)], &body).await
}

#[tokio::test]
async fn a_model_that_the_tenant_may_not_use_is_403() {
    let guarded = guarded().await;
    for path in [CHAT, TEXT] {
        for model in [None, Some("actor"), Some("gpt-x"), Some("default")] {
            let rejected = send(&guarded, "alpha", path, model).await;
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
                send(&guarded, key, path, model).await.ok();
            }
        }
        for key in ["alpha", "beta", "gamma"] {
            let rejected = send(&guarded, key, path, Some("other")).await;
            let error = (404, "model_not_found".into(), Some("model".into()));
            assert_eq!(rejected.error(), error, "{path} {key}");
            assert_eq!(rejected.body.contains("'actor'"), key != "alpha", "{key}");
        }
    }
}

#[tokio::test]
async fn a_tenant_sees_only_the_models_that_it_may_use() {
    let guarded = guarded().await;
    let get = async |key: &str, path: &str| {
        let headers = [("x-api-key", key)];
        let server = &guarded.server;
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
    assert_eq!(names("beta").await, ["actor"]);
    assert_eq!(names("gamma").await, ["actor"]);
    for name in ["actor", "gpt-x", "default"] {
        let path = format!("/v1/models/{name}");
        let rejected = get("alpha", &path).await;
        let error = (403, "model_not_allowed".into(), Some("model".into()));
        assert_eq!(rejected.error(), error, "{name}");
        assert_eq!(get("beta", &path).await.ok()["id"], "actor");
    }
    assert_eq!(get("alpha", "/v1/models/other").await.status, 404);
}
