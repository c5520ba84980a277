//! The program with a tenants file: errors at the start, SIGHUP, keygen and public prefixes.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use axum::http::Request;
use axum::http::request::Builder;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::client::{self, Client, Response};
use crate::harness::PATIENCE;
use crate::{ALPHA, BETA, CHAT, GAMMA, TEXT, TempFile, table};

/// A server process. It is killed at the end of the test.
struct Program {
    process: Child,
    address: String,
    log: TempFile,
    client: Client,
}

impl Program {
    fn start(flags: &[&str]) -> Program {
        let log = TempFile::new("");
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
            client: Client::new(),
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log.0).unwrap()
    }

    /// Stops the server and returns its whole log. A thread writes it, and is done at the end.
    fn stop(mut self) -> String {
        self.signal("-TERM");
        assert!(self.process.wait().unwrap().success());
        let log = self.log();
        assert!(log.contains("draining"), "the end is in the log");
        log
    }

    fn signal(&self, signal: &str) {
        let process = self.process.id().to_string();
        let sent = Command::new("kill").args([signal, &process]).status();
        assert!(sent.unwrap().success());
    }

    async fn get_models(&self, key: &str) -> Response {
        let request = Request::get(format!("{}/v1/models", self.address));
        self.send(request, key, String::new()).await
    }

    async fn post(&self, path: &str, key: &str, body: &Value) -> Response {
        let request = Request::post(format!("{}{path}", self.address));
        self.send(request, key, body.to_string()).await
    }

    async fn send(&self, request: Builder, key: &str, body: String) -> Response {
        let request = request.header("authorization", format!("Bearer {key}"));
        self.client.send(request, body).await.unwrap()
    }

    /// Requests the list of models and returns the status.
    async fn models(&self, key: &str) -> u16 {
        self.get_models(key).await.status().as_u16()
    }

    /// Requests the list of models and returns it.
    async fn list(&self, key: &str) -> Value {
        json_of(self.get_models(key).await).await
    }

    /// Waits until `holds` returns true.
    async fn until<T: Future<Output = bool>>(&self, what: &str, holds: impl Fn() -> T) {
        let waiting = async { while !holds().await {} };
        timeout(PATIENCE, waiting)
            .await
            .unwrap_or_else(|_| panic!("waited in vain for {what}\n{}", self.log()));
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Both fail if the process has ended already.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// Returns the body of an answer.
async fn json_of(response: Response) -> Value {
    serde_json::from_str(&client::text(response).await).unwrap()
}

/// Runs the program, which must end by itself.
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

/// Starts a server with flags that must make it fail. Returns its error message.
pub(crate) fn start_error(flags: &[&str]) -> String {
    let output = run(&[&["--port", "0"], flags].concat());
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{flags:?}: {message}");
    message
}

#[test]
fn a_fault_in_the_file_ends_the_start_with_its_line() {
    let good = table("a", ALPHA, "");
    let file = TempFile::new("");
    for (text, line) in [
        (String::new() + &good + &table("a", BETA, ""), 6),
        (String::new() + &good + &table("b", ALPHA, ""), 7),
        (table("a", ALPHA, "colour = 1"), 4),
        (table("a", "abc", ""), 3),
        (table("a", ALPHA, "weight = 0"), 4),
        (table("a", ALPHA, "public = [\"x\"]"), 4),
        (table("a", ALPHA, "models = []"), 4),
        (table("a", ALPHA, "models = [\"x\",\n\"x\"]"), 5),
        ("[[tenant]\n".to_owned(), 1),
    ] {
        file.write(&text);
        let message = start_error(&["--tenants", file.path()]);
        let place = format!("{}, line {line}: ", file.path());
        assert!(message.contains(&place), "{message}\n---\n{text}");
    }
    let message = start_error(&["--tenants", "/nowhere/tenants.toml"]);
    assert!(message.contains("/nowhere/tenants.toml"), "{message}");
}

#[test]
fn public_prefixes_that_are_too_short_or_too_large_end_the_start() {
    let prefix = |words: &str| {
        let text = format!("[[public_prefix]]\nname = \"x\"\nsystem = \"{words}\"\n");
        TempFile::new(&(table("a", ALPHA, "public = [\"x\"]") + &text))
    };
    let long = prefix(&"All is well. ".repeat(60));
    let message = start_error(&["--tenants", long.path(), "--kv-memory", "256KiB"]);
    assert!(message.contains("the public prefixes need"), "{message}");
    let short = prefix("");
    let message = start_error(&["--tenants", short.path()]);
    assert!(message.contains("at least a page"), "{message}");
}

#[tokio::test]
async fn a_public_address_needs_keys_or_insecure() {
    for host in ["0.0.0.0", "::"] {
        let message = start_error(&["--host", host]);
        assert!(message.contains("--tenants"), "{message}");
        assert!(message.contains("--insecure"), "{message}");
    }
    let file = TempFile::new(&table("a", ALPHA, ""));
    for flags in [
        ["--host=0.0.0.0", "--insecure"],
        ["--host=0.0.0.0", &format!("--tenants={}", file.path())],
    ] {
        assert!(Program::start(&flags).address.contains("0.0.0.0"));
    }
}

#[tokio::test]
async fn a_key_of_keygen_is_accepted_and_never_logged() {
    let made = run(&["keygen", "acme"]);
    assert!(made.status.success());
    let terminal = String::from_utf8(made.stderr).unwrap();
    let key = terminal.lines().last().unwrap();
    let table = String::from_utf8(made.stdout).unwrap();
    let file = TempFile::new(&table);
    let program = Program::start(&["--tenants", file.path()]);
    assert_eq!(program.models(key).await, 200);
    assert_eq!(program.models("sk-none").await, 401);
    assert_eq!(run(&["keygen", "a b"]).status.code(), Some(2));
    let hash = table.split('"').nth(3).unwrap();
    let log = program.stop();
    for secret in [key, hash, "sk-none"] {
        assert!(!log.contains(secret));
    }
}

#[tokio::test]
async fn sighup_reads_the_file_again_and_aborts_no_request() {
    let file = TempFile::new(&table("a", ALPHA, ""));
    let program = Program::start(&["--tenants", file.path()]);
    let body = json!({
        "prompt": "Count.", "max_tokens": 900, "ignore_eos": true, "stream": true,
        "stream_options": {"include_usage": true},
    });
    let mut stream = program.post(TEXT, "alpha", &body).await;
    let first = client::piece(&mut stream).await.unwrap();
    let mut text = String::from_utf8(first.to_vec()).unwrap();

    file.write(&table("b", BETA, "weight = 0"));
    program.signal("-HUP");
    let logged = async || program.log().contains(", line 4: ");
    program.until("an error in the log", logged).await;
    assert_eq!(
        (program.models("alpha").await, program.models("beta").await),
        (200, 401)
    );

    file.write(&table("b", BETA, ""));
    program.signal("-HUP");
    let changed = async || program.models("beta").await == 200;
    program.until("the new key", changed).await;
    assert_eq!(program.models("alpha").await, 401);

    text += &client::text(stream).await;
    assert!(text.contains("\"completion_tokens\":900"), "{text}");
    assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
    let log = program.stop();
    for secret in [ALPHA, BETA, "Bearer alpha", "Bearer beta"] {
        assert!(!log.contains(secret), "{secret} is in the log");
    }
}

#[tokio::test]
async fn sighup_changes_the_models_that_a_tenant_may_use() {
    let with = |models: &str| table("a", ALPHA, models) + &table("b", BETA, "");
    let file = TempFile::new(&with("models = [\"elsewhere\"]"));
    let program = Program::start(&["--tenants", file.path()]);
    let warned = async || program.log().contains("some tenants may not use");
    program.until("a warning in the log", warned).await;
    let list = async |key: &str| program.list(key).await["data"].clone();
    assert_eq!(list("alpha").await, json!([]));
    assert_eq!(list("beta").await[0]["id"], "sterna-demo");

    file.write(&with("models = [\"sterna-demo\"]"));
    program.signal("-HUP");
    let given = async || list("alpha").await != json!([]);
    program.until("the model", given).await;

    let only = table("a", ALPHA, "models = [\"elsewhere\"]");
    for (text, error) in [
        (with("models = [5]"), ", line 4: "),
        (
            with("guaranteed_pages = 4000000000"),
            "add up to 4000000000",
        ),
        (only, "no tenant may use `sterna-demo`"),
    ] {
        file.write(&text);
        program.signal("-HUP");
        let logged = async || program.log().contains(error);
        program.until("an error in the log", logged).await;
        assert_ne!(
            list("alpha").await,
            json!([]),
            "the old tenants stay in use"
        );
    }
}

#[test]
fn a_file_in_which_no_tenant_may_use_the_model_ends_the_start() {
    let file = TempFile::new(&table("a", ALPHA, "models = [\"sterna-dmeo\"]"));
    let message = start_error(&["--tenants", file.path()]);
    assert!(
        message.contains("no tenant may use `sterna-demo`"),
        "{message}"
    );
    let named = ["--tenants", file.path(), "--model-name", "sterna-dmeo"];
    drop(Program::start(&named));
}

#[tokio::test]
async fn a_public_prefix_is_computed_once_for_the_tenants_that_share_it() {
    let system = "You answer for a shop that sells paper, and you are brief, friendly and right \
                  about paper.";
    let prefix = format!("[[public_prefix]]\nname = \"shop\"\nsystem = \"{system}\"\n");
    let sharing = "public = [\"shop\"]";
    let tables = [
        prefix,
        table("a", ALPHA, sharing),
        table("b", BETA, sharing),
        table("c", GAMMA, ""),
    ];
    let file = TempFile::new(&tables.concat());
    let program = Program::start(&["--tenants", file.path()]);
    let cached = async |key: &str, question: &str| {
        let body = json!({"max_tokens": 2, "messages": [
            {"role": "system", "content": system}, {"role": "user", "content": question}
        ]});
        let answer = json_of(program.post(CHAT, key, &body).await).await;
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    cached("alpha", "Is it white?").await;
    assert!(cached("beta", "Who are you?").await >= 16);
    assert_eq!(cached("gamma", "Who are you?").await, 0);
}
