//! How the program is configured, watched and stopped, and the memory that it takes.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::sync::Arc;

use hyper::Request;
use serde_json::json;
use tokio::time::timeout;

use crate::{PATIENCE, Server, client, json_of, memory, message, run};

#[tokio::test]
async fn large_bodies_take_little_memory_and_leave_it() {
    const BODY_BYTES: usize = 2_000_000;
    const BODIES: usize = 12;
    let flags = ["--threads", "1", "--kv-memory", "16MiB"];
    let server = Arc::new(Server::start(&flags).await);
    let question = [message("user", "Who are you?")];
    let answer = server.chat(&question, 8).await["choices"].clone();
    let before = memory(&server, "VmRSS");
    for item in [r#"{"a":1}"#, "1", r#""ab""#, "[]"] {
        let items = vec![item; BODY_BYTES / (item.len() + 1)].join(",");
        let body = format!("{{\"prompt\": \"a\", \"max_tokens\": 1, \"unknown\": [{items}]}}");
        let requests = (0..BODIES).map(|_| {
            let request = Request::post(format!("{}/v1/completions", server.address));
            let (server, body) = (Arc::clone(&server), body.clone());
            tokio::spawn(async move { server.client.send(request, body).await })
        });
        for request in requests.collect::<Vec<_>>() {
            let status = request.await.unwrap().unwrap().status();
            assert_eq!(status, if item == "1" { 200 } else { 413 }, "{item}");
        }
    }
    assert_eq!(server.chat(&question, 8).await["choices"], answer);
    // The bodies themselves, and room for those that grow while they arrive.
    let (peak, after) = (memory(&server, "VmHWM"), memory(&server, "VmRSS"));
    assert!(peak < before + 100, "from {before} MiB to {peak} MiB");
    assert!(after < before + 16, "from {before} MiB to {after} MiB");
}

/// Keys and values need more memory than the system gives: the program says so and ends.
#[test]
#[cfg(target_os = "linux")]
fn too_little_memory_for_keys_and_values_is_an_error_at_the_start() {
    let sterna = env!("CARGO_BIN_EXE_sterna");
    let limited = format!("ulimit -v 1500000; exec {sterna} --port 0 --kv-memory 1400MiB");
    let output = Command::new("sh").args(["-c", &limited]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    let last = error.lines().last().unwrap();
    assert!(last.contains("Cannot allocate memory"), "{error}");
    assert!(last.contains("give a smaller --kv-memory"), "{error}");
}

#[tokio::test]
async fn sigterm_lets_answers_finish_and_exits_with_0() {
    let server = Server::start(&[]).await;
    let body = json!({
        "prompt": "Count from one to ten.", "max_tokens": 300, "ignore_eos": true, "stream": true,
        "stream_options": {"include_usage": true},
    });
    let mut stream = server.post("/v1/completions", &body).await;
    let mut text = String::new();
    let first = client::piece(&mut stream).await.unwrap();
    text.push_str(&String::from_utf8_lossy(&first));
    let ended = tokio::task::spawn_blocking(move || server.terminate());
    text += &client::text(stream).await;
    assert!(text.contains("\"completion_tokens\":300"), "{text}");
    assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
    assert_eq!(ended.await.unwrap().code(), Some(0));
}

/// Returns the exit code of `sterna healthcheck` and its message.
fn healthcheck(url: &str) -> (Option<i32>, String) {
    let output = run(&["healthcheck", "--url", url]);
    let message = String::from_utf8(output.stderr).unwrap();
    (output.status.code(), message)
}

#[tokio::test]
async fn the_healthcheck_tells_a_ready_server_from_others() {
    let server = Server::start(&["--drain-seconds", "3600"]).await;
    let ready = format!("{}/ready", server.address);
    assert_eq!(healthcheck(&ready), (Some(0), String::new()));
    // A container gives the server and its health check the same environment.
    let port = server.address.rsplit(':').next().unwrap();
    let mut container = Command::new(env!("CARGO_BIN_EXE_sterna"));
    container.args(["healthcheck"]);
    container.envs([("STERNA_HOST", "0.0.0.0"), ("STERNA_PORT", port)]);
    let output = container.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let (code, message) = healthcheck(&format!("{}/nowhere", server.address));
    assert_eq!(code, Some(1));
    assert!(message.contains("404"), "{message}");
    for wrong in ["127.0.0.1", "https://127.0.0.1/ready", "/ready"] {
        let (code, message) = healthcheck(wrong);
        assert_eq!(code, Some(1));
        assert!(message.contains("no URL"), "{message}");
    }
    // While it drains.
    let body = json!({"prompt": "Count.", "max_tokens": 900, "ignore_eos": true, "stream": true});
    let mut streams = Vec::new();
    for _ in 0..32 {
        streams.push(server.post("/v1/completions", &body).await);
    }
    server.signal("-TERM");
    let message = loop {
        match healthcheck(&ready) {
            (Some(0), _) => continue, // The signal has not arrived.
            (code, message) => {
                assert_eq!(code, Some(1));
                break message;
            }
        }
    };
    assert!(message.contains("answers 503"), "{message}");
    // After its end nothing listens.
    drop(streams);
    server.terminate();
    let (code, message) = healthcheck(&ready);
    assert_eq!(code, Some(1));
    assert!(message.contains("refused"), "{message}");
}

#[tokio::test]
async fn a_second_signal_exits_at_once_with_2() {
    let mut server = Server::start(&["--drain-seconds", "3600"]).await;
    let body = json!({"prompt": "Count.", "max_tokens": 900, "ignore_eos": true, "stream": true});
    let mut streams = Vec::new();
    for _ in 0..32 {
        streams.push(server.post("/v1/completions", &body).await);
    }
    let ready = async || {
        let request = Request::get(format!("{}/ready", server.address));
        let answered = server.client.send(request, String::new()).await;
        answered.is_ok_and(|response| response.status() == 200)
    };
    assert!(ready().await);
    server.signal("-TERM");
    while ready().await {}
    server.signal("-INT");
    assert_eq!(server.process.wait().unwrap().code(), Some(2));
}

#[tokio::test]
async fn systemd_hears_when_the_server_is_ready_alive_and_stopping() {
    let name = format!("sterna-notify-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let receive = || {
        let mut message = [0; 64];
        let length = socket.recv(&mut message).unwrap();
        String::from_utf8(message[..length].to_vec()).unwrap()
    };
    let environment = [
        ("NOTIFY_SOCKET", path.to_str().unwrap()),
        ("WATCHDOG_USEC", "200000"),
    ];
    let mut server = Server::with_environment(&[], &environment).await;
    assert_eq!(receive().trim_end(), "READY=1");
    for _ in 0..3 {
        assert_eq!(receive().trim_end(), "WATCHDOG=1");
    }
    server.signal("-TERM");
    let mut last = receive();
    while last.trim_end() == "WATCHDOG=1" {
        last = receive();
    }
    assert_eq!(last.trim_end(), "STOPPING=1");
    fs::remove_file(&path).unwrap();
    assert_eq!(server.process.wait().unwrap().code(), Some(0));
}

#[tokio::test]
async fn a_server_on_localhost_answers_to_its_names_only() {
    let server = Server::start(&["--host", "localhost", "--threads", "1"]).await;
    let port = server.address.rsplit(':').next().unwrap();
    for (host, status) in [
        ("localhost", 200),
        ("127.0.0.1:1", 200),
        ("evil.example", 403),
    ] {
        let url = format!("http://localhost:{port}/v1/models");
        let request = Request::get(url).header("host", host);
        let response = server.client.send(request, String::new()).await.unwrap();
        assert_eq!(response.status(), status, "{host}");
    }
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn unusable_flags_are_named_and_exit_with_2() {
    let directory = std::env::temp_dir().join(format!("sterna-nothing-{}", std::process::id()));
    let missing = directory.to_str().unwrap();
    for (flags, named) in [
        (vec!["--model", missing], missing),
        (
            vec!["--max-model-len", "1000000"],
            "--max-model-len 1000000",
        ),
        (vec!["--kv-memory", "1KiB"], "--kv-memory"),
        (vec!["--kv-memory", "1000TiB"], "--kv-memory"),
        (vec!["--host", "192.0.2.1"], "192.0.2.1"),
        (vec!["--threads", "0"], "--threads"),
        (vec!["--threads", "1000"], "this process may use"),
        (vec!["--model-name", ""], "must not be empty"),
        (
            vec!["--host", "no.such.name.invalid"],
            "no.such.name.invalid",
        ),
        (vec!["--allowed-origin", "example.com"], "`example.com`"),
        (vec!["--isa", "neon"], "--isa"),
        (
            vec!["--offline", "--model", "some-owner/some-model"],
            "some-owner/some-model: it was not downloaded yet",
        ),
        (vec!["./some-owner/some-model"], "no such file"),
        (vec!["serv"], "Did you mean sterna serve?"),
        (vec!["convrt"], "Did you mean sterna convert?"),
        (
            vec!["nothing"],
            "or one of the commands that sterna --help lists",
        ),
        (vec!["--config", missing], missing),
        (vec!["--kv-events", "127.0.0.1:0"], "--kv-events-of all"),
        (
            vec![
                "--kv-events=127.0.0.1:0",
                "--kv-events-of=all",
                "--served-model-name=a@b",
            ],
            "--kv-events-topic",
        ),
        (
            vec!["--kv-events=192.0.2.1:5557", "--kv-events-of=all"],
            "--kv-events 192.0.2.1:5557",
        ),
    ] {
        let output = run(&[&["--port", "0"], flags.as_slice()].concat());
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {message}");
        assert!(message.contains(named), "{flags:?}: {message}");
    }
}

/// The order is: command line, environment, file, default.
#[tokio::test]
async fn settings_come_from_the_environment_and_from_a_file() {
    let file = std::env::temp_dir().join(format!("sterna-settings-{}.toml", std::process::id()));
    let settings = "served-model-name = \"from-the-file\"\nmax-model-len = 64\nmax-running = 3\n\
                    cors-origin = [\"https://example.com\"]\n";
    fs::write(&file, settings).unwrap();
    let environment = [
        ("STERNA_CONFIG", file.to_str().unwrap()),
        ("STERNA_SERVED_MODEL_NAME", "first,second"),
        ("STERNA_MAX_MODEL_LEN", "96"),
        ("STERNA_METRICS_OPEN", "yes"),
    ];
    let server = Server::with_environment(&["--max-model-len", "80"], &environment).await;
    let get = async |path: &str| {
        let request = Request::get(format!("{}{path}", server.address));
        let request = request.header("origin", "https://example.com");
        server.client.send(request, String::new()).await.unwrap()
    };
    let models = get("/v1/models").await;
    let allowed = models.headers()["access-control-allow-origin"].clone();
    assert_eq!(allowed, "https://example.com");
    let models = json_of(models).await;
    assert_eq!(models["data"][0]["id"], "first");
    assert_eq!(models["data"][0]["max_model_len"], 80);
    let metrics = client::text(get("/metrics").await).await;
    let mut lines = metrics.lines();
    let limit = lines.find(|line| line.starts_with("sterna_max_running_sequences{"));
    assert!(limit.unwrap().ends_with(" 3"), "{limit:?}");
    assert!(server.terminate().success());
    fs::remove_file(&file).unwrap();

    let wrong = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .env("STERNA_PORT", "x")
        .output();
    let wrong = wrong.unwrap();
    assert_eq!(wrong.status.code(), Some(2));
    let message = String::from_utf8_lossy(&wrong.stderr);
    assert!(
        message.contains("--port") && message.contains("'x'"),
        "{message}"
    );
}

/// Each request has a line in the log. A log that nobody reads delayed the requests after it.
#[tokio::test]
async fn a_log_that_nobody_reads_delays_no_request() {
    let server = Server::with_log(&["--threads", "1"], &[], Stdio::piped()).await;
    // The pipe holds 64 KiB, fewer than 1,000 lines.
    let asking = async {
        for _ in 0..1000 {
            let answer = server.get("/v1/models").await;
            assert_eq!(answer.status(), 200);
        }
    };
    timeout(PATIENCE, asking).await.expect("each answer comes");
    assert!(server.terminate().success());
}
