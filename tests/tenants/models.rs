//! The models that a tenant may use.

use axum::body::Body;
use axum::http::Method;
use serde_json::{Value, json};

use crate::harness::Answer;
use crate::{ALPHA, BETA, CHAT, GAMMA, Guarded, TEXT, table};

/// `alpha` may use models of other servers only, `beta` this one by another of its names, `gamma` all there are.
async fn guarded() -> Guarded {
    let tables = [
        table("a", ALPHA, "models = [\"other\", \"elsewhere\"]"),
        table("b", BETA, "models = [\"other\", \"gpt-x\"]"),
        table("c", GAMMA, ""),
    ];
    Guarded::new(&tables.concat()).await
}

/// An answer that names `model`, or none.
async fn asked(guarded: &Guarded, key: &str, path: &str, model: Option<&str>) -> Answer {
    let body = json!({
        "model": model, "max_tokens": 2, "prompt": "Hello", "messages": [{"role": "user", "content": "Hello"}]
    });
    guarded.ask(path, &[("x-api-key", key)], &body).await
}

#[tokio::test]
async fn a_model_that_is_there_but_not_for_the_tenant_is_403() {
    let guarded = guarded().await;
    for path in [CHAT, TEXT] {
        for model in [None, Some("actor"), Some("gpt-x"), Some("default")] {
            let refused = asked(&guarded, "alpha", path, model).await;
            let error = (403, "model_not_allowed".into(), Some("model".into()));
            assert_eq!(refused.error(), error, "{path} {model:?}");
            assert!(refused.body.contains("\"permission_error\""));
            let named = refused.body.contains("'actor'");
            assert_eq!(named, model == Some("actor"), "it tells no other name");
            for key in ["beta", "gamma"] {
                asked(&guarded, key, path, model).await.ok();
            }
        }
        for key in ["alpha", "beta", "gamma"] {
            let refused = asked(&guarded, key, path, Some("other")).await;
            let error = (404, "model_not_found".into(), Some("model".into()));
            assert_eq!(refused.error(), error, "{path} {key}");
            assert_eq!(refused.body.contains("'actor'"), key != "alpha", "{key}");
        }
    }
}

#[tokio::test]
async fn models_are_listed_to_those_who_may_use_them() {
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
        let refused = get("alpha", &path).await;
        let error = (403, "model_not_allowed".into(), Some("model".into()));
        assert_eq!(refused.error(), error, "{name}");
        assert_eq!(get("beta", &path).await.ok()["id"], "actor");
    }
    assert_eq!(get("alpha", "/v1/models/other").await.status, 404);
}
