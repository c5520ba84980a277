//! The whole program, with a model that is given by its name.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use super::server::{HubServer, Repository};
use super::{Cache, TOKEN};

/// A process that is killed at the end of a test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail if the process has ended.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Starts the program with nothing in its environment except the variables of the hub.
fn start(cache: &Cache, server: &HubServer, flags: &[&str]) -> Process {
    let process = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["--port", "0", "--threads", "1"])
        .args(flags)
        .env_clear()
        .env("HF_HOME", cache.0.parent().unwrap())
        .env("HF_HUB_CACHE", &cache.0)
        .env("HF_ENDPOINT", &server.url)
        .env("HF_TOKEN", TOKEN)
        .env("RUST_LOG", "trace,ureq_proto::util=trace")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    Process(process.unwrap())
}

/// Returns the first line that the ready server prints, and its log.
fn greeting(mut process: Process) -> (String, String) {
    let mut log = process.0.stderr.take().unwrap();
    let log = std::thread::spawn(move || {
        let mut text = String::new();
        log.read_to_string(&mut text).unwrap();
        text
    });
    let mut greeting = String::new();
    let stdout = process.0.stdout.take().unwrap();
    BufReader::new(stdout).read_line(&mut greeting).unwrap();
    drop(process);
    (greeting, log.join().unwrap())
}

fn demo() -> Repository {
    let read = |name: &str| fs::read(format!("src/demo/{name}")).unwrap();
    Repository::new(&[
        ("config.json", &read("config.json")),
        ("generation_config.json", &read("generation_config.json")),
        ("model.safetensors", &read("model.safetensors")),
        ("tokenizer.json", &read("tokenizer.json")),
        ("tokenizer_config.json", &read("tokenizer_config.json")),
    ])
}

#[test]
fn a_name_is_served_and_the_token_is_in_no_log() {
    let (cache, server) = (Cache::new(), HubServer::of(demo()));
    let (greeting_text, log) = greeting(start(&cache, &server, &["owner/model"]));
    assert!(
        greeting_text.contains("Sterna serves owner/model on"),
        "{greeting_text}{log}"
    );
    assert!(log.contains("downloading"), "{log}");
    assert!(!log.contains("secret"), "the log has the token");
    // The HTTP client logs bytes in rows, so the token would not stand in one line.
    for level in ["TRACE", "DEBUG"] {
        let lines = format!("{level} ureq");
        assert!(!log.contains(&lines), "the log has the bytes of requests");
    }
    assert!(log.contains("TRACE") || log.contains("DEBUG"), "{log}");
    let authorization = server.received()[0]
        .header("authorization")
        .map(str::to_owned);
    assert_eq!(authorization, Some(format!("Bearer {TOKEN}")));

    // The cache is enough for the next start.
    let requests = server.received().len();
    let flags = [
        "--model",
        "owner/model",
        "--offline",
        "--served-model-name",
        "mine",
    ];
    let (greeting_text, log) = greeting(start(&cache, &server, &flags));
    assert!(
        greeting_text.contains("Sterna serves mine on"),
        "{greeting_text}{log}"
    );
    assert_eq!(server.received().len(), requests);
}

#[test]
fn a_name_that_cannot_be_served_ends_the_program_with_2() {
    let (cache, server) = (Cache::new(), HubServer::of(demo()));
    let float = Repository::new(&[
        ("config.json", br#"{"architectures": ["LlamaForCausalLM"]}"#),
        ("model.safetensors", b"weights"),
    ]);
    check_end(
        &Cache::new(),
        &HubServer::of(float),
        &["owner/model"],
        "No weights were downloaded",
    );
    for (flags, expected) in [
        (
            &["owner/model", "--offline"][..],
            "it was not downloaded yet",
        ),
        (&["other/model"][..], "other/model: 127.0.0.1 answers 404"),
        (
            &["owner/model:Q2_0"][..],
            "no GGUF or .bin file \"Q2_0\". The repository has safetensors: give its name without",
        ),
        (
            &["https://huggingface.co/owner/model"][..],
            "given by its name alone, owner/model,",
        ),
    ] {
        check_end(&cache, &server, flags, expected);
    }
}

/// Checks that the program ends with an error that has the `expected` text.
fn check_end(cache: &Cache, server: &HubServer, flags: &[&str], expected: &str) {
    let mut process = start(cache, server, flags);
    let mut log = String::new();
    let mut stderr = process.0.stderr.take().unwrap();
    stderr.read_to_string(&mut log).unwrap();
    assert_eq!(process.0.wait().unwrap().code(), Some(2), "{log}");
    assert!(log.contains(expected) && !log.contains("secret"), "{log}");
}

#[test]
fn a_wrong_path_is_named_even_if_the_port_is_taken() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["--port", &port, "no-such-model"])
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(
        error.contains("no-such-model: there is no such file"),
        "{error}"
    );
}
