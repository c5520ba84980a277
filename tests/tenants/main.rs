//! Tests of tenants over HTTP: API keys, quotas and rates, and what a tenants file may contain.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot unwrap a value has failed"
)]

mod admin;
mod authentication;
mod bodies;
#[path = "../harness/client.rs"]
mod client;
#[path = "../harness/mod.rs"]
mod harness;
mod limits;
mod models;
mod program;
mod reload;

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use axum::body::Body;
use axum::http::{Method, Request};
use harness::{Answer, PATIENCE, Server};
use serde_json::{Value, json};
use sterna::api::App;
use sterna::engine::Limits;
use sterna::tenants::{Deadlines, Defaults, Roster};
use tower::ServiceExt;

const CHAT: &str = "/v1/chat/completions";

const TEXT: &str = "/v1/completions";

const JSON: (&str, &str) = ("content-type", "application/json");

/// The SHA-256 of the key `alpha`.
const ALPHA: &str = "8ed3f6ad685b959ead7022518e1af76cd816f8e8ec7ccdda1ed4018e8f2223f8";

/// The SHA-256 of the key `beta`.
const BETA: &str = "f44e64e75f3948e9f73f8dfa94721c4ce8cbb4f265c4790c702b2d41cfbf2753";

/// The SHA-256 of the key `gamma`.
const GAMMA: &str = "be9d587defa1f0c09ef49eb17e206983a5f8f8289e4281860bd0ee5a19592c67";

/// The SHA-256 of the key `delta`.
const DELTA: &str = "4f4a9410ffcdf895c4adb880659e9b5c0dd1f23a30790684340b3eaacb045398";

/// The SHA-256 of the key `epsilon`.
const EPSILON: &str = "6ebf3c8d63ef6b217bcee69e31f77f3634bbbef1346de27e229c17122974e27b";

/// The connection limit of a server in process. A tenant may receive bodies on a quarter of it.
const CONNECTIONS: usize = 400;

fn table(id: &str, hash: &str, more: &str) -> String {
    format!("[[tenant]]\nid = \"{id}\"\nkey_sha256 = \"{hash}\"\n{more}\n")
}

/// A temporary file, usually a tenants file, that is deleted when the test ends.
struct TempFile(PathBuf);

impl TempFile {
    fn new(text: &str) -> TempFile {
        static FILES: AtomicU32 = AtomicU32::new(0);
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        let name = format!("sterna-edge-{}-{number}.toml", std::process::id());
        let file = TempFile(std::env::temp_dir().join(name));
        file.write(text);
        file
    }

    /// Replaces the file in one step: a reader sees either the old text or the new text.
    fn write(&self, text: &str) {
        let next = self.0.with_extension("next");
        fs::write(&next, text).unwrap();
        fs::rename(next, &self.0).unwrap();
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }

    fn roster(&self) -> Roster {
        let defaults = Defaults {
            deadlines: Deadlines::default(),
            max_queued: 64,
            max_queued_time: PATIENCE,
        };
        Roster::open(&self.0, defaults).unwrap()
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        fs::remove_file(&self.0).unwrap();
    }
}

/// A server in process with the tenants of a file.
struct TenantServer {
    server: Server,
    app: App,
}

impl TenantServer {
    async fn new(tables: &str) -> TenantServer {
        TenantServer::queueing(tables, 8, 64).await
    }

    /// Starts a server whose queue has `max_queued` places.
    async fn queueing(tables: &str, max_running: u32, max_queued: u32) -> TenantServer {
        let roster = TempFile::new(tables).roster();
        let app = App::for_tenants(roster.tenants(), false, CONNECTIONS);
        let limits = Limits {
            max_queued,
            ..Server::limits(max_running)
        };
        let server = Server::with_limits(app.clone(), limits, max_queued as usize, 0);
        server.engine.set_tenants(roster.policies()).await.unwrap();
        TenantServer { server, app }
    }

    async fn ask(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
        let headers = [&[JSON], headers].concat();
        let body = greedy(body);
        let method = Method::POST;
        self.server
            .send(method, path, &headers, body.to_string())
            .await
    }

    async fn complete(&self, key: &str, body: &Value) -> Answer {
        let base = json!({"prompt": "Hello"});
        let body = harness::merged(base, body.clone());
        self.ask(TEXT, &[("x-api-key", key)], &body).await
    }
}

/// Starts a request that runs while the test continues.
fn begin(server: &Server, key: &str, body: &Value) -> tokio::task::JoinHandle<Answer> {
    let request = Request::post(TEXT)
        .header(JSON.0, JSON.1)
        .header("x-api-key", key)
        .body(Body::from(greedy(body).to_string()))
        .unwrap();
    let router = server.router.clone();
    tokio::spawn(async move { Answer::read(router.oneshot(request).await.unwrap()).await })
}

/// Returns `body` with greedy sampling. A long answer with drawn tokens would sometimes contain the
/// stop token, or the token that makes a step fail.
fn greedy(body: &Value) -> Value {
    harness::merged(json!({"temperature": 0}), body.clone())
}
