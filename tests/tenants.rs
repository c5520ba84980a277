//! Tenants at the edge: who gets in with which key, and what a file may say, at the start and later.

#![expect(
    clippy::unwrap_used,
    reason = "a test that finds nothing to unwrap has failed"
)]

mod harness;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Method, Request};
use harness::{Answer, PATIENCE, Server, streamed_text};
use serde_json::{Value, json};
use sterna::api::App;
use sterna::engine::TenantsRefused;
use sterna::tenants::{Deadlines, Defaults, Roster};
use tokio::time::timeout;
use tower::ServiceExt;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const JSON: (&str, &str) = ("content-type", "application/json");

/// The SHA-256 of `alpha`, `beta` and `gamma`.
const ALPHA: &str = "8ed3f6ad685b959ead7022518e1af76cd816f8e8ec7ccdda1ed4018e8f2223f8";
const BETA: &str = "f44e64e75f3948e9f73f8dfa94721c4ce8cbb4f265c4790c702b2d41cfbf2753";
const GAMMA: &str = "be9d587defa1f0c09ef49eb17e206983a5f8f8289e4281860bd0ee5a19592c67";

fn table(id: &str, hash: &str, more: &str) -> String {
    format!("[[tenant]]\nid = \"{id}\"\nkey_sha256 = \"{hash}\"\n{more}\n")
}

/// A tenants file, gone when the test ends.
struct File(PathBuf);

impl File {
    fn new(text: &str) -> File {
        static FILES: AtomicU32 = AtomicU32::new(0);
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        let name = format!("sterna-edge-{}-{number}.toml", std::process::id());
        let file = File(std::env::temp_dir().join(name));
        file.write(text);
        file
    }

    /// In one go: who reads it sees the old text or the new.
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

impl Drop for File {
    fn drop(&mut self) {
        fs::remove_file(&self.0).unwrap();
    }
}

/// A server in process, for the tenants of a file.
struct Guarded {
    server: Server,
    app: App,
}

impl Guarded {
    async fn new(tables: &str) -> Guarded {
        let roster = File::new(tables).roster();
        let app = App::for_tenants(roster.tenants(), false);
        let server = Server::start(app.clone(), 8, 64);
        server.engine.set_tenants(roster.policies()).await.unwrap();
        Guarded { server, app }
    }

    async fn ask(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
        let headers = [&[JSON], headers].concat();
        let method = Method::POST;
        self.server
            .send(method, path, &headers, body.to_string())
            .await
    }

    async fn complete(&self, key: &str, body: &Value) -> Answer {
        let base = json!({"prompt": "Hello", "temperature": 0});
        let body = harness::merged(base, body.clone());
        self.ask(TEXT, &[("x-api-key", key)], &body).await
    }
}

/// A request that is under way beside the test.
fn begin(server: &Server, key: &str, body: &Value) -> tokio::task::JoinHandle<Answer> {
    let request = Request::post(TEXT)
        .header(JSON.0, JSON.1)
        .header("x-api-key", key)
        .body(Body::from(body.to_string()))
        .unwrap();
    let router = server.router.clone();
    tokio::spawn(async move { Answer::read(router.oneshot(request).await.unwrap()).await })
}

// ----------------------------------------------------------------------------------------------------------- the door

#[tokio::test]
async fn every_route_but_the_open_ones_needs_a_key() {
    let guarded = Guarded::new(&table("a", ALPHA, "")).await;
    let strangers: [&[(&str, &str)]; 9] = [
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
        (Method::GET, "/metrics/"),
        (Method::GET, "//health"),
        (Method::GET, "/health/"),
        (Method::GET, "/nothing"),
        (Method::DELETE, "/v1/requests/1"),
    ] {
        for headers in strangers {
            let refused = guarded
                .server
                .send(method.clone(), path, headers, "{}")
                .await;
            let code = "invalid_api_key".to_owned();
            assert_eq!(refused.error(), (401, code, None), "{path} {headers:?}");
            assert_eq!(refused.header("www-authenticate"), "Bearer");
            assert!(refused.body.contains("\"authentication_error\""));
            assert!(refused.headers.contains_key("x-request-id"));
            assert!(!refused.body.contains("alpha") && !refused.body.contains("beta"));
        }
        let known = [("authorization", "Bearer alpha")];
        let answer = guarded.server.send(method, path, &known, "{}").await;
        assert_ne!(answer.status, 401, "{path}");
    }
    for path in ["/", "/health", "/ready"] {
        assert_eq!(guarded.server.get(path).await.status, 200, "{path}");
    }
}

#[tokio::test]
async fn a_key_is_taken_from_either_header() {
    let guarded = Guarded::new(&table("a", ALPHA, "")).await;
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2});
    for header in [
        ("authorization", "Bearer alpha"),
        ("authorization", "bearer  alpha"),
        ("Authorization", "BEARER alpha"),
        ("x-api-key", "alpha"),
        ("X-Api-Key", " alpha "),
    ] {
        let answer = guarded.ask(CHAT, &[header], &body).await.ok();
        assert_eq!(answer["usage"]["completion_tokens"], 2, "{header:?}");
    }
}

#[tokio::test]
async fn without_tenants_any_key_and_none_are_fine() {
    let server = Server::new();
    server.complete(json!({"max_tokens": 2})).await.ok();
    server.chat(json!({"max_tokens": 2})).await.ok();
    let headers = [JSON, ("authorization", "Bearer none")];
    let body = json!({"prompt": "Hello", "max_tokens": 2}).to_string();
    server.send(Method::POST, TEXT, &headers, body).await.ok();
    assert_eq!(server.get("/metrics").await.status, 200);
}

#[tokio::test]
async fn metrics_are_open_if_the_operator_says_so() {
    let roster = File::new(&table("a", ALPHA, "")).roster();
    let server = Server::start(App::for_tenants(roster.tenants(), true), 8, 64);
    assert_eq!(server.get("/metrics").await.status, 200);
    assert_eq!(server.get("/v1/models").await.status, 401);
}

#[tokio::test]
async fn the_body_of_a_stranger_is_never_read() {
    let guarded = Guarded::new(&table("a", ALPHA, "")).await;
    let body = Body::from_stream(futures_util::stream::pending::<Result<Vec<u8>, String>>());
    let refused = guarded.server.send(Method::POST, TEXT, &[JSON], body).await;
    assert_eq!(refused.status, 401);
}

#[tokio::test]
async fn the_door_is_shut_while_the_model_loads() {
    let roster = File::new(&table("a", ALPHA, "")).roster();
    let router = sterna::api::router(App::for_tenants(roster.tenants(), false));
    let get = async |key: &str| {
        let headers = [("x-api-key", key)];
        harness::send(&router, Method::GET, "/v1/models", &headers, Body::empty()).await
    };
    assert_eq!(get("beta").await.status, 401);
    assert_eq!(get("alpha").await.error().1, "loading");
}

// --------------------------------------------------------------------------------------------------------- the reload

#[tokio::test]
async fn a_reload_changes_who_comes_in_and_drops_nobody() {
    let guarded = Guarded::new(&(table("a", ALPHA, "") + &table("b", BETA, ""))).await;
    let server = &guarded.server;
    server.gate.close();
    let body = json!({"prompt": "Hello", "temperature": 0, "max_tokens": 200, "stream": true,
                      "stream_options": {"include_usage": true}});
    let running = begin(server, "alpha", &body);
    server.gate.arrivals(1).await;
    let waiting = begin(server, "alpha", &body);

    let file = File::new(&(table("b", BETA, "weight = 2") + &table("c", GAMMA, "")));
    let second = file.roster();
    let engine = server.engine.clone();
    let policies = second.policies();
    let set = tokio::spawn(async move { engine.set_tenants(policies).await });
    let told = async {
        while !set.is_finished() {
            server.gate.pass(1); // Policies are taken between two steps.
            tokio::task::yield_now().await;
        }
        set.await.unwrap()
    };
    timeout(PATIENCE, told).await.unwrap().unwrap();
    guarded.app.set_tenants(second.tenants());
    assert!(!running.is_finished(), "it ran before and runs on");
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
    for asked in [running, waiting] {
        let events = asked.await.unwrap().events();
        let usage = &events.last().unwrap()["usage"];
        let prompt_tokens = usage["prompt_tokens"].as_u64().unwrap() as usize;
        assert_eq!(streamed_text(&events), server.script(prompt_tokens, 200));
    }
    guarded
        .complete("gamma", &json!({"max_tokens": 2}))
        .await
        .ok();
    let idle = |server: &Server| server.engine.status().running == 0;
    server.until("nothing runs", idle).await;
    assert_eq!(server.metric("vllm:num_requests_running"), 0.0);
}

#[tokio::test]
async fn a_file_with_a_fault_changes_nothing() {
    let file = File::new(&table("a", ALPHA, ""));
    let roster = file.roster();
    file.write(&table("b", BETA, "weight = 0"));
    let error = roster.reread().unwrap_err().to_string();
    assert!(error.contains(", line 4: "), "{error}");
    assert!(roster.tenants().find(Some(b"alpha")).is_some());
    assert!(roster.tenants().find(Some(b"beta")).is_none());
}

// -------------------------------------------------------------------------------------------------------- the program

/// The server as a process of its own, killed at the end.
struct Program {
    process: Child,
    address: String,
    log: File,
    client: reqwest::Client,
}

impl Program {
    fn start(flags: &[&str]) -> Program {
        let log = File::new("");
        let mut process = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(["--port", "0", "--threads", "1"])
            .args(flags)
            .env("RUST_LOG", "trace")
            .stdout(Stdio::piped())
            .stderr(fs::File::create(&log.0).unwrap())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let address = lines.map_while(Result::ok).find_map(|line| {
            let rest = &line[line.find("http://")?..];
            rest.split_whitespace().next().map(str::to_owned)
        });
        Program {
            process,
            address: address.expect("the server names its address"),
            log,
            client: reqwest::Client::new(),
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log.0).unwrap()
    }

    fn signal(&self, signal: &str) {
        let process = self.process.id().to_string();
        let sent = Command::new("kill").args([signal, &process]).status();
        assert!(sent.unwrap().success());
    }

    async fn models(&self, key: &str) -> u16 {
        let request = self.client.get(format!("{}/v1/models", self.address));
        let answer = request.bearer_auth(key).send().await.unwrap();
        answer.status().as_u16()
    }

    async fn until<T: Future<Output = bool>>(&self, what: &str, holds: impl Fn() -> T) {
        let waiting = async { while !holds().await {} };
        timeout(PATIENCE, waiting)
            .await
            .unwrap_or_else(|_| panic!("in vain waited for: {what}\n{}", self.log()));
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended by itself.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// To its end, which must come by itself.
fn run(flags: &[&str]) -> Output {
    Command::new("timeout")
        .args([
            &PATIENCE.as_secs().to_string(),
            env!("CARGO_BIN_EXE_sterna"),
        ])
        .args(flags)
        .output()
        .unwrap()
}

fn refused(flags: &[&str]) -> String {
    let output = run(&[&["--port", "0"], flags].concat());
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{flags:?}: {message}");
    message
}

#[test]
fn a_bad_file_is_refused_at_the_start_with_its_line() {
    let good = table("a", ALPHA, "");
    let file = File::new("");
    for (text, line) in [
        (String::new() + &good + &table("a", BETA, ""), 6),
        (String::new() + &good + &table("b", ALPHA, ""), 7),
        (table("a", ALPHA, "colour = 1"), 4),
        (table("a", "abc", ""), 3),
        (table("a", ALPHA, "weight = 0"), 4),
        (table("a", ALPHA, "public = [\"x\"]"), 4),
        ("[[tenant]\n".to_owned(), 1),
    ] {
        file.write(&text);
        let message = refused(&["--tenants", file.path()]);
        let place = format!("{}, line {line}: ", file.path());
        assert!(message.contains(&place), "{message}\n---\n{text}");
    }
    let message = refused(&["--tenants", "/nowhere/tenants.toml"]);
    assert!(message.contains("/nowhere/tenants.toml"), "{message}");
}

#[test]
fn public_prefixes_that_cannot_be_had_are_refused_at_the_start() {
    let prefix = |words: &str| {
        let text = format!("[[public_prefix]]\nname = \"x\"\nsystem = \"{words}\"\n");
        File::new(&(table("a", ALPHA, "public = [\"x\"]") + &text))
    };
    let long = prefix(&"All is well. ".repeat(60));
    let message = refused(&["--tenants", long.path(), "--kv-memory", "256KiB"]);
    assert!(message.contains("public prefixes would take"), "{message}");
    let short = prefix("");
    let message = refused(&["--tenants", short.path()]);
    assert!(message.contains("less than a page"), "{message}");
}

#[tokio::test]
async fn a_public_address_needs_keys_or_the_word_insecure() {
    for host in ["0.0.0.0", "::"] {
        let message = refused(&["--host", host]);
        assert!(message.contains("--tenants"), "{message}");
        assert!(message.contains("--insecure"), "{message}");
    }
    let file = File::new(&table("a", ALPHA, ""));
    for flags in [
        ["--host=0.0.0.0", "--insecure"],
        ["--host=0.0.0.0", &format!("--tenants={}", file.path())],
    ] {
        assert!(Program::start(&flags).address.contains("0.0.0.0"));
    }
}

#[tokio::test]
async fn a_key_of_keygen_opens_the_door() {
    let made = run(&["keygen", "acme"]);
    assert!(made.status.success());
    let told = String::from_utf8(made.stderr).unwrap();
    let key = told.lines().last().unwrap();
    let lines = String::from_utf8(made.stdout).unwrap();
    let file = File::new(&lines);
    let program = Program::start(&["--tenants", file.path()]);
    assert_eq!(program.models(key).await, 200);
    assert_eq!(program.models("sk-none").await, 401);
    assert_eq!(run(&["keygen", "a b"]).status.code(), Some(2));
    let hash = lines.split('"').nth(3).unwrap();
    for secret in [key, hash, "sk-none"] {
        assert!(!program.log().contains(secret));
    }
}

#[tokio::test]
async fn sighup_reads_the_file_again_and_cuts_nobody_off() {
    let file = File::new(&table("a", ALPHA, ""));
    let program = Program::start(&["--tenants", file.path()]);
    let body = json!({
        "prompt": "Count.", "max_tokens": 900, "ignore_eos": true, "stream": true,
        "stream_options": {"include_usage": true},
    });
    let request = program.client.post(format!("{}{TEXT}", program.address));
    let request = request.bearer_auth("alpha").json(&body);
    let mut stream = request.send().await.unwrap();
    let mut text = Vec::from(stream.chunk().await.unwrap().unwrap());

    file.write(&table("b", BETA, "weight = 0"));
    program.signal("-HUP");
    let complained = async || program.log().contains(", line 4: ");
    program.until("a complaint in the log", complained).await;
    assert_eq!(
        (program.models("alpha").await, program.models("beta").await),
        (200, 401)
    );

    file.write(&table("b", BETA, ""));
    program.signal("-HUP");
    let changed = async || program.models("beta").await == 200;
    program.until("the new key", changed).await;
    assert_eq!(program.models("alpha").await, 401);

    while let Some(piece) = stream.chunk().await.unwrap() {
        text.extend_from_slice(&piece);
    }
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("\"completion_tokens\":900"), "{text}");
    assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
    for secret in [ALPHA, BETA, "Bearer alpha", "Bearer beta"] {
        assert!(!program.log().contains(secret), "{secret} is in the log");
    }
}

// --------------------------------------------------------------------------------------------------------- the limits

/// Holds a server's steps while the clock passes `moment`.
async fn pass_by(server: &Server, moment: Instant) {
    server.until("the clock", |_| Instant::now() > moment).await;
}

#[tokio::test]
async fn used_up_requests_are_429_and_the_headers_count_down() {
    let limited = table("a", ALPHA, "requests_per_minute = 2\nrequest_burst = 2");
    let guarded = Guarded::new(&(limited + &table("b", BETA, ""))).await;
    let short = json!({"max_tokens": 2});
    for remaining in ["1", "0"] {
        for_free(&guarded).await;
        let answer = guarded.complete("alpha", &short).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.header("x-ratelimit-limit-requests"), "2");
        assert_eq!(answer.header("x-ratelimit-remaining-requests"), remaining);
        assert!(answer.header("x-ratelimit-reset-requests").ends_with('s'));
        assert!(!answer.headers.contains_key("x-ratelimit-limit-tokens"));
    }
    for stream in [false, true] {
        let body = json!({"max_tokens": 2, "stream": stream});
        let refused = guarded.complete("alpha", &body).await;
        assert_eq!(refused.error(), (429, "rate_limit_exceeded".into(), None));
        let seconds: u64 = refused.header("retry-after").parse().unwrap();
        let millis: u64 = refused.header("retry-after-ms").parse().unwrap();
        assert!((1..=30).contains(&seconds), "{seconds}");
        assert_eq!(millis.div_ceil(1000), seconds);
        assert_eq!(refused.header("x-ratelimit-remaining-requests"), "0");
    }
    for_free(&guarded).await;
}

/// The other tenant is not concerned.
async fn for_free(guarded: &Guarded) {
    let answer = guarded.complete("beta", &json!({"max_tokens": 2})).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert!(!answer.headers.contains_key("x-ratelimit-limit-requests"));
}

#[tokio::test]
async fn tokens_may_run_into_debt_once() {
    let limited = table("a", ALPHA, "tokens_per_minute = 60\ntoken_burst = 10");
    let guarded = Guarded::new(&limited).await;
    let long = json!({"max_tokens": 60});
    let answer = guarded.complete("alpha", &long).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(answer.header("x-ratelimit-limit-tokens"), "10");
    let refused = guarded.complete("alpha", &long).await;
    assert_eq!(refused.error(), (429, "rate_limit_exceeded".into(), None));
    assert_eq!(refused.header("x-ratelimit-remaining-tokens"), "0");
    assert!(
        refused.body.contains("tokens per minute"),
        "{}",
        refused.body
    );
}

#[tokio::test]
async fn a_full_queue_of_its_own_is_429_and_no_other_tenants() {
    let limited = table("a", ALPHA, "max_running = 1\nmax_queued = 1");
    let guarded = Guarded::new(&(limited + &table("b", BETA, ""))).await;
    let server = &guarded.server;
    server.gate.close();
    let body = json!({"prompt": "Hello", "max_tokens": 300});
    let running = begin(server, "alpha", &body);
    server.gate.arrivals(1).await;
    // All lie in the lane while the engine's thread waits at the gate, and are taken together after this step.
    let mut waiting = [begin(server, "alpha", &body), begin(server, "alpha", &body)];
    let other = begin(server, "beta", &body);
    let mut steps = 1;
    while waiting.iter().all(|asked| !asked.is_finished()) {
        server.gate.pass(1);
        steps += 1;
        server.gate.arrivals(steps).await;
        tokio::task::yield_now().await;
    }
    let refused = waiting
        .iter_mut()
        .find(|asked| asked.is_finished())
        .unwrap();
    let refused = refused.await.unwrap();
    assert_eq!(refused.error(), (429, "concurrency_limit".into(), None));
    assert!(refused.headers.contains_key("retry-after"));
    server.gate.open();
    other.await.unwrap().ok();
    running.await.unwrap().ok();
}

#[tokio::test]
async fn a_first_token_that_comes_too_late_is_504() {
    let hurried = table("a", ALPHA, "first_token_seconds = 2");
    let roster = File::new(&(hurried + &table("b", BETA, ""))).roster();
    let server = Server::start(App::for_tenants(roster.tenants(), false), 1, 64);
    server.engine.set_tenants(roster.policies()).await.unwrap();
    server.gate.close();
    let running = begin(
        &server,
        "beta",
        &json!({"prompt": "Hello", "max_tokens": 3000}),
    );
    server.gate.arrivals(1).await;
    let late = begin(&server, "alpha", &json!({"prompt": "Hello"}));
    let mut steps = 1;
    while server.engine.status().queued == 0 {
        server.gate.pass(1);
        steps += 1;
        server.gate.arrivals(steps).await;
        tokio::task::yield_now().await;
    }
    pass_by(&server, Instant::now() + Duration::from_secs(2)).await;
    server.gate.open();
    let late = late.await.unwrap();
    assert_eq!(late.error(), (504, "deadline_exceeded".into(), None));
    running.await.unwrap().ok();
}

#[tokio::test]
async fn an_answer_that_takes_too_long_ends_with_an_error_event() {
    let guarded = Guarded::new(&table("a", ALPHA, "total_seconds = 3")).await;
    let server = &guarded.server;
    server.gate.close();
    let began = Instant::now();
    let body = json!({"prompt": "Hello", "max_tokens": 300, "stream": true});
    let asked = begin(server, "alpha", &body);
    server.gate.pass(2);
    server.gate.arrivals(3).await;
    pass_by(server, began + Duration::from_secs(3)).await;
    server.gate.open();
    let events = asked.await.unwrap().events();
    let (last, pieces) = events.split_last().unwrap();
    assert_eq!(last["error"]["type"], "timeout_error");
    assert!(!streamed_text(pieces).is_empty());
}

#[tokio::test]
async fn more_pages_than_there_are_cannot_be_guaranteed() {
    let guarded = Guarded::new(&table("a", ALPHA, "guaranteed_pages = 1000")).await;
    let file = File::new(&table("a", ALPHA, "guaranteed_pages = 1025"));
    let roster = file.roster();
    let refused = guarded.server.engine.set_tenants(roster.policies()).await;
    assert!(
        matches!(refused, Err(TenantsRefused::Impossible(_))),
        "{refused:?}"
    );
    file.write(&table("a", ALPHA, "guaranteed_pages = 4000000000"));
    let message = self::refused(&["--tenants", file.path()]);
    assert!(
        message.contains("`guaranteed_pages` together are 4000000000"),
        "{message}"
    );
}

#[tokio::test]
async fn a_public_prefix_is_computed_once_for_those_who_may_share_it() {
    let system = "You answer for a shop that sells paper, and you are brief, friendly and right about paper.";
    let prefix = format!("[[public_prefix]]\nname = \"shop\"\nsystem = \"{system}\"\n");
    let sharing = "public = [\"shop\"]";
    let tables = [
        prefix,
        table("a", ALPHA, sharing),
        table("b", BETA, sharing),
        table("c", GAMMA, ""),
    ];
    let file = File::new(&tables.concat());
    let program = Program::start(&["--tenants", file.path()]);
    let cached = async |key: &str, question: &str| {
        let body = json!({"max_tokens": 2, "messages": [
            {"role": "system", "content": system}, {"role": "user", "content": question}
        ]});
        let request = program.client.post(format!("{}{CHAT}", program.address));
        let answer = request.bearer_auth(key).json(&body).send().await.unwrap();
        let answer: Value = answer.json().await.unwrap();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    cached("alpha", "Is it white?").await;
    assert!(cached("beta", "Who are you?").await >= 16);
    assert_eq!(cached("gamma", "Who are you?").await, 0);
}
