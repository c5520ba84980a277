//! Requests of web pages: DNS rebinding, and pages of other origins.

use axum::body::Body;
use axum::http::Method;
use serde_json::json;
use sterna::api::{Access, AllowedHosts, AllowedOrigins, App};

use crate::harness::*;
use crate::{CHAT, TEXT};

const SITE: &str = "https://app.example";

/// Returns a server without keys on a loopback address, which allows pages of `origins`.
fn server(origins: AllowedOrigins) -> Server {
    let app = App::loading();
    let hosts = Some(AllowedHosts::default());
    app.set_access(Access { hosts, origins });
    Server::start(app, 8, 64)
}

/// Returns the request that a browser sends for a page of `origin` before one with JSON.
async fn preflight(server: &Server, host: &str, origin: &str) -> Answer {
    let headers = [
        ("host", host),
        ("origin", origin),
        ("access-control-request-method", "POST"),
        (
            "access-control-request-headers",
            "authorization,x-stainless-lang",
        ),
    ];
    server
        .send(Method::OPTIONS, CHAT, &headers, Body::empty())
        .await
}

#[tokio::test]
async fn a_page_whose_host_has_been_rebound_is_not_served() {
    for origins in [AllowedOrigins::default(), AllowedOrigins::Any] {
        let server = server(origins);
        let body = json!({"prompt": "Hello", "max_tokens": 2}).to_string();
        let ask = async |host: &str| {
            let headers = [
                ("host", host),
                ("origin", "http://evil.example:30000"),
                ("content-type", "application/json"),
            ];
            server
                .send(Method::POST, TEXT, &headers, body.clone())
                .await
        };
        for host in [
            "evil.example",
            "evil.example:30000",
            "192.0.2.1",
            "0.0.0.0",
            "",
        ] {
            let refused = ask(host).await;
            assert_eq!(
                refused.error(),
                (403, "host_not_allowed".into(), None),
                "{host:?}"
            );
            assert!(!refused.headers.contains_key("access-control-allow-origin"));
            for path in ["/", "/health", "/metrics", "/v1/models", "/nowhere"] {
                let headers = [("host", host)];
                let refused = server
                    .send(Method::GET, path, &headers, Body::empty())
                    .await;
                assert_eq!(refused.status, 403, "{host:?} {path}");
            }
        }
        for host in ["localhost:30000", "127.0.0.1", "[::1]:30000"] {
            ask(host).await.ok();
        }
        let absolute = "http://evil.example/v1/models";
        let headers = [("host", "localhost")];
        let refused = server
            .send(Method::GET, absolute, &headers, Body::empty())
            .await;
        assert_eq!(refused.status, 403, "the URI names the host");
    }
}

#[tokio::test]
async fn pages_of_other_origins_read_nothing_unless_they_are_allowed() {
    let closed = server(AllowedOrigins::default());
    let headers = [("host", "localhost"), ("origin", SITE)];
    let answer = closed
        .send(Method::GET, "/v1/models", &headers, Body::empty())
        .await;
    assert!(
        answer
            .headers
            .keys()
            .all(|name| !name.as_str().starts_with("access-control"))
    );
    assert_eq!(preflight(&closed, "localhost", SITE).await.status, 405);

    let listed = server(AllowedOrigins::Listed(vec![SITE.into()]));
    let answer = listed
        .send(Method::GET, "/v1/models", &headers, Body::empty())
        .await;
    assert_eq!(answer.header("access-control-allow-origin"), SITE);
    assert_eq!(answer.header("vary"), "origin");
    let allowed = preflight(&listed, "localhost", SITE).await;
    assert_eq!((allowed.status.as_u16(), allowed.body.as_str()), (204, ""));
    assert_eq!(allowed.header("access-control-allow-origin"), SITE);
    assert_eq!(allowed.header("access-control-allow-methods"), "GET, POST");
    let asked = "authorization,x-stainless-lang";
    assert_eq!(allowed.header("access-control-allow-headers"), asked);
    for origin in [
        "https://app.example.evil",
        "http://app.example",
        "null",
        "*",
    ] {
        let refused = preflight(&listed, "localhost", origin).await;
        assert_eq!(refused.status, 405, "{origin}");
        assert!(!refused.headers.contains_key("access-control-allow-origin"));
    }

    let any = server(AllowedOrigins::Any);
    assert_eq!(
        preflight(&any, "localhost", "null")
            .await
            .header("access-control-allow-origin"),
        "*"
    );
}
