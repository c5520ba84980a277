//! The whole program: started from the command line, used over HTTP, stopped by a signal.
//!
//! The demo model answers its held-out questions here. None of them is in its training text.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

/// The fraction of the held-out questions that must be answered correctly.
const MIN_CORRECT: f64 = 0.85;

/// A timeout that only a hanging test reaches.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Deserialize)]
struct HeldOut {
    max_tokens: u32,
    singles: Vec<HeldOutTurn>,
    chats: Vec<HeldOutChat>,
}

#[derive(Deserialize)]
struct HeldOutChat {
    turns: Vec<HeldOutTurn>,
}

#[derive(Clone, Deserialize)]
struct HeldOutTurn {
    question: String,
    /// An answer is correct if it contains all strings of one of these lists, in any case.
    accept: Vec<Vec<String>>,
}

impl HeldOutTurn {
    fn accepts(&self, answer: &str) -> bool {
        let answer = answer.to_lowercase();
        self.accept
            .iter()
            .any(|all| all.iter().all(|part| answer.contains(part.as_str())))
    }
}

fn held_out() -> HeldOut {
    serde_json::from_str(include_str!("../src/demo/training/heldout.json")).unwrap()
}

/// A server process on a free port. It is killed if the test fails before it stops the server.
struct Server {
    process: Child,
    address: String,
    /// What the program says when it is ready, up to its example.
    greeting: String,
    client: reqwest::Client,
}

impl Server {
    async fn start(flags: &[&str]) -> Server {
        Server::with_environment(flags, &[]).await
    }

    async fn with_environment(flags: &[&str], environment: &[(&str, &str)]) -> Server {
        let mut process = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(["--port", "0"])
            .args(flags)
            .envs(environment.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut greeting = String::new();
        while !greeting.contains("curl") {
            let line = lines.next().expect("the server gives an example");
            greeting += &(line.unwrap() + "\n");
        }
        let address = greeting
            .split_whitespace()
            .find(|word| word.starts_with("http://"));
        let address = address.expect("the server names its address").to_owned();
        let client = reqwest::Client::new();
        Server {
            process,
            address,
            greeting,
            client,
        }
    }

    async fn chat(&self, messages: &[Value], max_tokens: u32) -> Value {
        let body = json!({"messages": messages, "max_tokens": max_tokens, "temperature": 0});
        let url = format!("{}/v1/chat/completions", self.address);
        let response = self.client.post(url).json(&body).send().await.unwrap();
        assert_eq!(response.status(), 200);
        response.json().await.unwrap()
    }

    /// Returns the answer to the last of `messages`, or nothing if `max_tokens` cut it off.
    async fn answer(&self, messages: &[Value], max_tokens: u32) -> String {
        let answer = self.chat(messages, max_tokens).await;
        let choice = &answer["choices"][0];
        match choice["finish_reason"].as_str() {
            Some("stop") => choice["message"]["content"].as_str().unwrap().to_owned(),
            _ => String::new(),
        }
    }

    fn signal(&self, signal: &str) {
        let process = self.process.id().to_string();
        let sent = Command::new("kill").args([signal, &process]).status();
        assert!(sent.unwrap().success());
    }

    fn terminate(mut self) -> ExitStatus {
        self.signal("-TERM");
        self.process.wait().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail after `terminate`.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// Returns a value of the process's status in MiB: `VmRSS` is its resident memory, `VmHWM` the
/// largest so far.
fn memory(server: &Server, name: &str) -> u64 {
    let path = format!("/proc/{}/status", server.process.id());
    let status = std::fs::read_to_string(path).unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib >> 10
}

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
            let request = server
                .client
                .post(format!("{}/v1/completions", server.address));
            let request = request.header("content-type", "application/json");
            tokio::spawn(request.body(body.clone()).send())
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

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn run(flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(flags)
        .output()
        .unwrap()
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

/// A directory with the demo model and recorded tokens, removed on drop.
struct GoldenCheckpoint(PathBuf);

impl GoldenCheckpoint {
    fn new(tokens: &[u32]) -> GoldenCheckpoint {
        let name = format!("sterna-golden-{}-{}", std::process::id(), tokens[0]);
        let directory = std::env::temp_dir().join(name);
        fs::create_dir(&directory).unwrap();
        let checkpoint = GoldenCheckpoint(directory);
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/demo");
        for file in [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            fs::copy(demo.join(file), checkpoint.0.join(file)).unwrap();
        }
        let prompt = [2040, 286, 257, 1186, 357, 298, 30, 2042, 284, 257];
        let case = json!({"prompt_tokens": prompt, "tokens": tokens});
        let golden = json!({"version": 1, "cases": [case]}).to_string();
        fs::write(checkpoint.0.join("sterna_golden.json"), golden).unwrap();
        checkpoint
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for GoldenCheckpoint {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0)); // The system cleans its temporary directory.
    }
}

#[tokio::test]
async fn recorded_tokens_are_checked_before_the_server_is_ready() {
    let right = GoldenCheckpoint::new(&[40, 371, 288, 530, 815, 454, 11]);
    let server = Server::start(&["--model", right.path(), "--threads", "1"]).await;
    let ready = server.client.get(format!("{}/ready", server.address));
    assert_eq!(ready.send().await.unwrap().status(), 200);
    assert!(server.terminate().success());

    let wrong = GoldenCheckpoint::new(&[41, 371]);
    let output = run(&["--port", "0", "--model", wrong.path(), "--threads", "1"]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    let expected = "sterna: sterna_golden.json: case 0, position 0 (both from 0): the model says \
                    token 40, but the file says 41.";
    assert!(
        error.lines().last().unwrap().starts_with(expected),
        "{error}"
    );
    assert!(
        output.stdout.is_empty(),
        "no greeting of a server that is ready"
    );
}

#[tokio::test]
async fn the_demo_model_answers_held_out_questions() {
    let held_out = held_out();
    assert!(held_out.singles.len() >= 200 && held_out.chats.len() >= 20);
    let server = Arc::new(Server::start(&["--max-queued", "1000"]).await);
    let answers: Vec<_> = held_out
        .singles
        .into_iter()
        .map(|turn| {
            let server = Arc::clone(&server);
            tokio::spawn(async move {
                let question = [message("user", &turn.question)];
                let answer = server.answer(&question, held_out.max_tokens).await;
                (turn.accepts(&answer), turn.question, answer)
            })
        })
        .collect();
    let total = answers.len();
    let mut correct = 0;
    for answer in answers {
        let (is_correct, question, answer) = answer.await.unwrap();
        correct += usize::from(is_correct);
        if !is_correct {
            println!("wrong: {question:?} -> {answer:?}");
        }
    }
    println!("{correct} of {total} held-out questions");
    assert!(
        correct as f64 >= MIN_CORRECT * total as f64,
        "only {correct} of {total}"
    );
}

#[tokio::test]
async fn the_demo_model_answers_held_out_chats() {
    let held_out = held_out();
    let server = Server::start(&[]).await;
    let (mut correct, mut total) = (0, 0);
    for chat in held_out.chats {
        assert_eq!(chat.turns.len(), 3);
        let mut messages = Vec::new();
        for turn in chat.turns {
            messages.push(message("user", &turn.question));
            let answer = server.answer(&messages, held_out.max_tokens).await;
            total += 1;
            correct += usize::from(turn.accepts(&answer));
            if !turn.accepts(&answer) {
                println!("wrong: {:?} -> {answer:?}", turn.question);
            }
            messages.push(message("assistant", &answer));
        }
    }
    println!("{correct} of {total} turns");
    assert!(
        correct as f64 >= MIN_CORRECT * f64::from(total),
        "only {correct} of {total}"
    );
}

#[tokio::test]
async fn eight_bit_keys_and_values_hold_more_tokens_and_answer_questions() {
    let questions = held_out().singles.into_iter().step_by(24);
    let questions: Vec<HeldOutTurn> = questions.collect();
    for (dtype, pages) in [
        ("f16", 682),
        ("int8", 1285),
        ("fp8_e4m3", 1285),
        ("bf16", 682),
    ] {
        let flags = [
            "--threads",
            "1",
            "--kv-memory",
            "16MiB",
            "--kv-dtype",
            dtype,
        ];
        let server = Server::start(&flags).await;
        let metrics = server.client.get(format!("{}/metrics", server.address));
        let metrics = metrics.send().await.unwrap().text().await.unwrap();
        // A page takes 12 heads · 16 tokens · 2 · 32 values, and 64 bytes of scales a head.
        assert!(
            metrics.contains(&format!("num_gpu_blocks=\"{pages}\"")),
            "{metrics}"
        );
        assert!(
            metrics.contains(&format!("cache_dtype=\"{dtype}\"")),
            "{metrics}"
        );
        let mut correct = 0;
        for turn in &questions {
            let question = [message("user", &turn.question)];
            correct += usize::from(turn.accepts(&server.answer(&question, 64).await));
        }
        let least = MIN_CORRECT * questions.len() as f64 - 1.0;
        assert!(
            correct as f64 >= least,
            "{dtype}: {correct} of {}",
            questions.len()
        );
        assert_eq!(server.terminate().code(), Some(0));
    }
    let refused = run(&["--kv-dtype", "int4"]);
    let error = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        error.contains("int4") && error.contains("fp8_e5m2"),
        "{error}"
    );
}

#[tokio::test]
async fn a_second_turn_finds_the_first_in_the_prefix_cache() {
    let server = Server::start(&[]).await;
    let mut messages = vec![message("user", "Tell me a story about a fox, please.")];
    let first = server.answer(&messages, 200).await;
    messages.push(message("assistant", &first));
    messages.push(message("user", "What is the capital of France?"));
    let usage = server.chat(&messages, 16).await["usage"].clone();
    let cached = usage["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap();
    assert!(cached >= 16, "{usage}");
}

#[tokio::test]
async fn sigterm_lets_answers_finish_and_exits_with_0() {
    let server = Server::start(&[]).await;
    let body = json!({
        "prompt": "Count from one to ten.", "max_tokens": 300, "ignore_eos": true, "stream": true,
        "stream_options": {"include_usage": true},
    });
    let url = format!("{}/v1/completions", server.address);
    let mut stream = server.client.post(url).json(&body).send().await.unwrap();
    let mut text = String::new();
    let first = stream.chunk().await.unwrap().unwrap();
    text.push_str(&String::from_utf8_lossy(&first));
    let ended = tokio::task::spawn_blocking(move || server.terminate());
    while let Some(piece) = stream.chunk().await.unwrap() {
        text.push_str(&String::from_utf8_lossy(&piece));
    }
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
    let url = format!("{}/v1/completions", server.address);
    let mut streams = Vec::new();
    for _ in 0..32 {
        streams.push(server.client.post(&url).json(&body).send().await.unwrap());
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
    let url = format!("{}/v1/completions", server.address);
    let mut streams = Vec::new();
    for _ in 0..32 {
        streams.push(server.client.post(&url).json(&body).send().await.unwrap());
    }
    let mut ready = server
        .client
        .get(format!("{}/ready", server.address))
        .send()
        .await;
    server.signal("-TERM");
    while ready.is_ok_and(|response| response.status() == 200) {
        ready = server
            .client
            .get(format!("{}/ready", server.address))
            .send()
            .await;
    }
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
        let request = server.client.get(url).header("host", host);
        assert_eq!(request.send().await.unwrap().status(), status, "{host}");
    }
    assert_eq!(server.terminate().code(), Some(0));
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// The embeddings are those of the reference, within what rounding allows.
#[tokio::test]
async fn a_checkpoint_without_a_head_serves_embeddings() {
    for name in ["embedding-qwen3", "embedding-gemma3"] {
        let folder = fixture(name);
        let expected = fs::read(folder.join("expected.json")).unwrap();
        let expected: Value = serde_json::from_slice(&expected).unwrap();
        let prompts = expected["prompts"].as_array().unwrap().iter();
        let prompts: Vec<&Value> = prompts.map(|prompt| &prompt["prompt"]).collect();
        let server = Server::start(&["--model", folder.to_str().unwrap(), "--threads", "1"]).await;
        let ask = async |path: &str, body: Value| {
            let url = format!("{}{path}", server.address);
            let response = server.client.post(url).json(&body).send().await.unwrap();
            (
                response.status().as_u16(),
                response.json::<Value>().await.unwrap(),
            )
        };
        let (status, all) = ask("/v1/embeddings", json!({"input": prompts})).await;
        assert_eq!(status, 200, "{all}");
        let tensors = fs::read(folder.join("expected.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&tensors).unwrap();
        for (index, prompt) in prompts.iter().enumerate() {
            let (_, alone) = ask("/v1/embeddings", json!({"input": prompt})).await;
            let got = &all["data"][index]["embedding"];
            assert_eq!(*got, alone["data"][0]["embedding"], "alone = together");
            let wanted = tensors
                .tensor(&format!("prompt.{index}.embedding"))
                .unwrap();
            let wanted = wanted.data().chunks_exact(4);
            let wanted = wanted.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
            let got = got
                .as_array()
                .unwrap()
                .iter()
                .map(|value| value.as_f64().unwrap());
            let cosine: f64 = got
                .zip(wanted)
                .map(|(got, wanted)| got * f64::from(wanted))
                .sum();
            assert!(cosine > 0.999, "{name} {index}: {cosine}");
        }
        assert!(server.greeting.contains("/v1/embeddings"));
        assert!(!server.greeting.contains("chat"), "{}", server.greeting);
        let (status, refused) = ask("/v1/completions", json!({"prompt": "a"})).await;
        assert_eq!(status, 400);
        assert_eq!(
            refused["error"]["code"], "unsupported_parameter",
            "{refused}"
        );
        assert!(server.terminate().success());
    }
}

#[test]
fn a_checkpoint_without_stop_tokens_starts_with_a_warning() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("server-without-stops");
    drop(fs::remove_dir_all(&folder)); // An earlier run that failed left it.
    fs::create_dir_all(&folder).unwrap();
    for entry in fs::read_dir(fixture("bitnet-packed")).unwrap() {
        let path = entry.unwrap().path();
        let mut content = fs::read(&path).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.ends_with("config.json") {
            let mut json: Value = serde_json::from_slice(&content).unwrap();
            let fields = json.as_object_mut().unwrap();
            fields.shift_remove("eos_token_id");
            fields.shift_remove("eos_token");
            content = json.to_string().into_bytes();
        }
        fs::write(folder.join(name), content).unwrap();
    }
    let mut program = Command::new(env!("CARGO_BIN_EXE_sterna"));
    let program = program.args(["--port", "0", "--model"]).arg(&folder);
    let mut process = program.stderr(Stdio::piped()).spawn().unwrap();
    let log = BufReader::new(process.stderr.take().unwrap()).lines();
    let mut log = log.map_while(Result::ok);
    let warning = log.find(|line| line.contains("names no stop token"));
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(warning.is_some_and(|line| line.contains("WARN")));
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
            vec!["--model", "some-owner/some-model"],
            "hf download some-owner/some-model --local-dir some-model",
        ),
        (vec!["some-owner/some-model"], "sterna some-model"),
        (vec!["./some-owner/some-model"], "No such file"),
        (vec!["--config", missing], missing),
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
        let request = server.client.get(format!("{}{path}", server.address));
        let request = request.header("origin", "https://example.com");
        request.send().await.unwrap()
    };
    let models = get("/v1/models").await;
    let allowed = models.headers()["access-control-allow-origin"].clone();
    assert_eq!(allowed, "https://example.com");
    let models: Value = models.json().await.unwrap();
    assert_eq!(models["data"][0]["id"], "first");
    assert_eq!(models["data"][0]["max_model_len"], 80);
    let metrics = get("/metrics").await.text().await.unwrap();
    let limit = metrics.lines().find(|line| line.contains("max_running"));
    assert!(limit.is_none_or(|line| line.ends_with(" 3")), "{limit:?}");
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

#[tokio::test]
async fn a_synthesized_checkpoint_is_served() {
    let directory = std::env::temp_dir().join(format!("sterna-synthetic-{}", std::process::id()));
    let path = directory.to_str().unwrap();
    let written = run(&["synthesize", "--shape", "tiny", path]);
    assert!(
        written.status.success(),
        "{}",
        String::from_utf8_lossy(&written.stderr)
    );
    let again = run(&["synthesize", "--shape", "tiny", path]);
    assert_eq!(
        again.status.code(),
        Some(2),
        "a directory that is not empty is never overwritten"
    );
    let server = Server::start(&["--model", path, "--threads", "1"]).await;
    let answer = server.chat(&[message("user", "Hello")], 8).await;
    assert!(
        answer["usage"]["completion_tokens"].as_u64().unwrap() >= 1,
        "{answer}"
    );
    assert_eq!(server.terminate().code(), Some(0));
    std::fs::remove_dir_all(directory).unwrap();
}
