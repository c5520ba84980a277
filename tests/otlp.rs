//! Traces in a collector: the server program sends them, and a collector on loopback, built on the
//! types of the protocol, receives them. If `STERNA_ROTEL` names the program of the collector
//! Rotel, the server sends to Rotel, and Rotel sends on to the test (`.ci/nightly`).

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

#[path = "harness/client.rs"]
mod client;

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use client::{Client, Response};
use flate2::read::GzDecoder;
use hyper::Request;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use prost::Message;
use serde_json::{Value, json};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SENDER: &str = "00f067aa0ba902b7";
const SECRET: &str = "Zanzibar";
const CHAT: &str = "/v1/chat/completions";
/// A timeout that only a hanging test reaches.
const PATIENCE: Duration = Duration::from_secs(60);
/// How far the clocks of two processes that read them on a busy machine may differ.
const CLOCKS: Duration = Duration::from_millis(250);

/// A collector: what it has received, head and body of each request.
struct Collector {
    url: String,
    rotel: Option<Child>,
    received: mpsc::Receiver<(String, Vec<u8>)>,
}

impl Collector {
    fn start() -> Collector {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (sender, received) = mpsc::channel();
        thread::spawn(move || {
            for connection in listener.incoming() {
                let sender = sender.clone();
                thread::spawn(move || receive(connection.unwrap(), &sender));
            }
        });
        let mut collector = Collector {
            url,
            rotel: None,
            received,
        };
        if let Some(program) = env::var_os("STERNA_ROTEL") {
            collector.send_through(&program);
        }
        collector
    }

    /// Starts Rotel before this collector, and waits until it listens.
    fn send_through(&mut self, rotel: &OsStr) {
        let free = || {
            TcpListener::bind("127.0.0.1:0")
                .unwrap()
                .local_addr()
                .unwrap()
        };
        let (http, grpc) = (free().to_string(), free().to_string());
        let rotel = Command::new(rotel)
            .args([
                "start",
                "--otlp-http-endpoint",
                &http,
                "--otlp-grpc-endpoint",
                &grpc,
            ])
            .args(["--exporter", "otlp", "--otlp-exporter-protocol", "http"])
            .args(["--otlp-exporter-endpoint", &self.url])
            .spawn();
        self.rotel = Some(rotel.unwrap());
        let started = Instant::now();
        while TcpStream::connect(&http).is_err() {
            assert!(started.elapsed() < PATIENCE, "Rotel does not listen");
            thread::yield_now();
        }
        self.url = format!("http://{http}");
    }

    /// Returns all that a server sent that has ended, with its spans. The spans of a trace come in
    /// the order in which they begin.
    fn sent(&mut self) -> (Vec<(String, Vec<u8>)>, Vec<Span>) {
        if let Some(mut rotel) = self.rotel.take() {
            terminate(&rotel); // It sends on what it has.
            rotel.wait().unwrap();
        }
        let sent: Vec<_> = self.received.try_iter().collect();
        let decoded = sent
            .iter()
            .map(|(_, body)| ExportTraceServiceRequest::decode(&body[..]));
        let of_resources = decoded.flat_map(|batch| batch.unwrap().resource_spans);
        let of_scopes = of_resources.flat_map(|spans| spans.scope_spans);
        let mut spans: Vec<Span> = of_scopes.flat_map(|scope| scope.spans).collect();
        spans.sort_by_key(|span| span.start_time_unix_nano);
        (sent, spans)
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        if let Some(rotel) = &mut self.rotel {
            drop(rotel.kill());
            drop(rotel.wait());
        }
    }
}

fn terminate(process: &Child) {
    let process = process.id().to_string();
    let sent = Command::new("kill").args(["-TERM", &process]).status();
    assert!(sent.unwrap().success());
}

/// Receives the requests of a connection.
fn receive(stream: TcpStream, received: &mpsc::Sender<(String, Vec<u8>)>) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).unwrap_or(0) == 0 {
                return;
            }
        }
        let head = head.to_lowercase();
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.unwrap().trim().parse().unwrap()];
        reader.read_exact(&mut body).unwrap();
        if head.contains("content-encoding: gzip") {
            let packed = std::mem::take(&mut body);
            GzDecoder::new(&packed[..]).read_to_end(&mut body).unwrap();
        }
        // The test may have ended.
        drop(received.send((head, body)));
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
        drop(reader.get_mut().write_all(answer));
    }
}

/// A server process. It is killed if the test fails before it stops the server.
struct Server {
    process: Child,
    address: String,
    client: Client,
}

impl Server {
    fn start(flags: &[&str], environment: &[(&str, &str)]) -> Server {
        let mut process = command(flags, environment).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut words = lines.flat_map(|line| {
            let line = line.unwrap();
            line.split(' ').map(str::to_owned).collect::<Vec<_>>()
        });
        let address = words.find(|word| word.starts_with("http://")).unwrap();
        // The greeting must not fill the pipe.
        thread::spawn(move || words.count());
        Server {
            process,
            address,
            client: Client::new(),
        }
    }

    async fn post(&self, path: &str, body: &Value, parent: Option<&str>) -> Response {
        let mut request = Request::post(format!("{}{path}", self.address));
        if let Some(parent) = parent {
            request = request.header("traceparent", parent);
        }
        self.client.send(request, body.to_string()).await.unwrap()
    }

    /// Stops the server, which sends its last spans. Returns its log.
    fn terminate(mut self) -> (ExitStatus, String) {
        terminate(&self.process);
        let mut log = String::new();
        let mut stderr = self.process.stderr.take().unwrap();
        stderr.read_to_string(&mut log).unwrap();
        (self.process.wait().unwrap(), log)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail after `terminate`.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

fn command(flags: &[&str], environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command
        .args(["--port", "0"])
        .args(flags)
        .env("NO_PROXY", "127.0.0.1")
        .envs(environment.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn chat(more: &Value) -> Value {
    let content = format!("What is the weather in {SECRET}?");
    let mut body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 60});
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

fn attributes(list: &[KeyValue]) -> BTreeMap<&str, Value> {
    fn json_of(value: &AnyValue) -> Value {
        match value.value.as_ref().unwrap() {
            Any::StringValue(text) => json!(text),
            Any::BoolValue(value) => json!(value),
            Any::IntValue(value) => json!(value),
            Any::DoubleValue(value) => json!(value),
            Any::ArrayValue(list) => list.values.iter().map(json_of).collect(),
            other => panic!("an attribute is {other:?}"),
        }
    }
    let pairs = list
        .iter()
        .map(|pair| (pair.key.as_str(), json_of(pair.value.as_ref().unwrap())));
    pairs.collect()
}

fn named<'s>(spans: &'s [Span], name: &str) -> &'s Span {
    let mut named = spans.iter().filter(|span| span.name == name);
    let span = named
        .next()
        .unwrap_or_else(|| panic!("no {name} in {spans:#?}"));
    assert!(named.next().is_none(), "two {name} in {spans:#?}");
    span
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn nanos(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64
}

#[tokio::test]
async fn a_chat_with_tools_has_its_spans_in_order_and_at_their_times() {
    let mut collector = Collector::start();
    let server = Server::start(
        &["--otlp-endpoint", &collector.url],
        &[
            ("OTEL_SERVICE_NAME", "chats"),
            (
                "OTEL_RESOURCE_ATTRIBUTES",
                "service.name=no,deployment.environment.name=test",
            ),
            ("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=k1"),
        ],
    );
    let tool = json!({"name": "weather_of", "description": "Returns the weather.", "parameters": {
        "type": "object", "properties": {"city": {"enum": [SECRET]}}, "required": ["city"],
    }});
    let body = chat(&json!({
        "tools": [{"type": "function", "function": tool}], "tool_choice": "required",
        "stream": true, "temperature": 0.7, "top_p": 0.95,
    }));
    let sent = SystemTime::now();
    let parent = format!("00-{TRACE}-{SENDER}-01");
    let mut response = server.post(CHAT, &body, Some(&parent)).await;
    assert_eq!(response.status(), 200);
    let head = client::piece(&mut response).await.unwrap();
    let rest = client::text(response).await;
    let received = SystemTime::now();
    assert!(rest.contains(r#""finish_reason":"tool_calls""#), "{rest}");
    assert!(server.terminate().0.success());
    let stopped = SystemTime::now();

    let (batches, spans) = collector.sent();
    check_order(&spans);
    let [whole, .., decode] = &spans[..] else {
        unreachable!("there are five");
    };
    assert!(whole.start_time_unix_nano >= nanos(sent - CLOCKS));
    assert!(decode.end_time_unix_nano <= nanos(received + CLOCKS));
    assert!(whole.end_time_unix_nano <= nanos(stopped + CLOCKS));
    let head = String::from_utf8_lossy(&head).into_owned();
    let id = head.split("\"id\":\"").nth(1).unwrap().split('"').next();
    check_attributes(whole, id.unwrap());
    check_batches(&batches);
}

/// Checks the names, parents and times of the spans of a chat.
fn check_order(spans: &[Span]) {
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(
        names,
        ["chat sterna-demo", "grammar", "queue", "prefill", "decode"]
    );
    let [whole, grammar, queue, prefill, decode] = spans else {
        unreachable!("there are five");
    };
    assert!(spans.iter().all(|span| hex(&span.trace_id) == TRACE));
    assert_eq!(hex(&whole.parent_span_id), SENDER);
    assert_eq!(whole.kind(), SpanKind::Server);
    for child in &spans[1..] {
        assert_eq!(
            (&child.parent_span_id, child.kind()),
            (&whole.span_id, SpanKind::Internal)
        );
        assert!(child.attributes.is_empty() && child.status.clone().unwrap_or_default().code == 0);
    }

    let (start, end) = (
        |span: &Span| span.start_time_unix_nano,
        |span: &Span| span.end_time_unix_nano,
    );
    assert_eq!((end(queue), end(prefill)), (start(prefill), start(decode)));
    let of_trace = [
        start(whole),
        start(grammar),
        end(grammar),
        start(queue),
        start(prefill),
        start(decode),
        end(decode),
        end(whole),
    ];
    assert!(of_trace.is_sorted(), "{of_trace:?}");
    assert!(start(decode) < end(decode), "sixty tokens take some time");
}

/// Checks the attributes of the span of a chat whose answer has this id.
fn check_attributes(whole: &Span, id: &str) {
    let found = attributes(&whole.attributes);
    for (name, expected) in [
        ("gen_ai.operation.name", json!("chat")),
        ("gen_ai.provider.name", json!("sterna")),
        ("gen_ai.request.model", json!("sterna-demo")),
        ("gen_ai.request.max_tokens", json!(60)),
        ("gen_ai.request.temperature", json!(0.7)),
        ("gen_ai.request.top_p", json!(0.95)),
        ("gen_ai.request.stream", json!(true)),
        ("gen_ai.response.id", json!(id)),
        ("gen_ai.response.model", json!("sterna-demo")),
        ("gen_ai.response.finish_reasons", json!(["tool_calls"])),
        ("gen_ai.usage.cache_read.input_tokens", json!(0)),
        ("http.request.method", json!("POST")),
        ("http.route", json!(CHAT)),
        ("http.response.status_code", json!(200)),
        ("server.address", json!("127.0.0.1")),
        ("sterna.tenant", json!("default")),
    ] {
        assert_eq!(found.get(name), Some(&expected), "{name} of {found:#?}");
    }
    assert!(
        found["gen_ai.usage.input_tokens"].as_u64() > Some(10),
        "{found:#?}"
    );
    assert!(
        found["gen_ai.usage.output_tokens"].as_u64() > Some(1),
        "{found:#?}"
    );
    assert!(!found.contains_key("error.type"));
}

/// Checks what the batches of a chat say beside its spans, and what they do not say.
fn check_batches(batches: &[(String, Vec<u8>)]) {
    for (head, body) in batches {
        assert!(head.starts_with("post /v1/traces "), "{head}");
        let is_direct = env::var_os("STERNA_ROTEL").is_none();
        assert_eq!(head.contains("x-collector-key: k1"), is_direct, "{head}");
        let text = String::from_utf8_lossy(body);
        for hidden in [SECRET, "weather", "city"] {
            assert!(!text.contains(hidden), "{hidden} is in {text}");
        }
    }
    let batch = ExportTraceServiceRequest::decode(&batches[0].1[..]).unwrap();
    let resource = batch.resource_spans[0].resource.clone().unwrap();
    let resource = attributes(&resource.attributes);
    assert_eq!(resource["service.name"], "chats");
    assert_eq!(resource["service.version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(resource["deployment.environment.name"], "test");
}

#[tokio::test]
async fn a_client_that_leaves_and_a_wrong_request_end_their_spans_with_errors() {
    let mut collector = Collector::start();
    let server = Server::start(&[], &[("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url)]);
    let long = json!({"max_tokens": 900, "ignore_eos": true, "stream": true});
    let mut leaving = server.post(CHAT, &chat(&long), None).await;
    client::piece(&mut leaving).await.unwrap();
    drop(leaving);
    let wrong = server
        .post("/v1/messages", &chat(&json!({"model": "other"})), None)
        .await;
    assert_eq!(wrong.status(), 404);
    assert!(server.terminate().0.success());
    let (_, spans) = collector.sent();
    let of = |name| attributes(&named(&spans, name).attributes);
    assert_eq!(of("decode")["error.type"], "disconnected");
    assert!(!of("prefill").contains_key("error.type"));
    let wholes: Vec<&Span> = spans
        .iter()
        .filter(|span| span.name == "chat sterna-demo")
        .collect();
    let [left, wrong] = wholes[..] else {
        panic!("two requests: {spans:#?}");
    };
    assert_ne!(left.trace_id, wrong.trace_id);
    assert!(left.parent_span_id.is_empty() && wrong.parent_span_id.is_empty());
    assert_eq!(attributes(&left.attributes)["error.type"], "disconnected");
    assert_eq!(left.status.as_ref().unwrap().code(), StatusCode::Error);
    assert_eq!(
        left.end_time_unix_nano,
        named(&spans, "decode").end_time_unix_nano
    );
    let found = attributes(&wrong.attributes);
    assert_eq!(
        (&found["error.type"], &found["http.response.status_code"]),
        (&json!("model_not_found"), &json!(404))
    );
    assert_eq!(
        wrong.status.clone().unwrap_or_default().code(),
        StatusCode::Unset
    );
}

#[tokio::test]
async fn a_sample_of_none_still_follows_a_sender_that_samples() {
    let mut collector = Collector::start();
    let flags = ["--otlp-endpoint", &collector.url, "--otlp-sample", "0"];
    let server = Server::start(&flags, &[]);
    let unsampled = format!("00-{}-{SENDER}-00", TRACE.replace('4', "5"));
    let sampled = format!("00-{TRACE}-{SENDER}-01");
    for parent in [None, Some(unsampled.as_str()), Some(&sampled), None] {
        let answer = server
            .post(CHAT, &chat(&json!({"max_tokens": 2})), parent)
            .await;
        assert_eq!(answer.status(), 200);
        client::text(answer).await;
    }
    assert!(server.terminate().0.success());
    let (_, spans) = collector.sent();
    assert_eq!(spans.len(), 4, "{spans:#?}");
    assert!(spans.iter().all(|span| hex(&span.trace_id) == TRACE));
}

#[tokio::test]
async fn a_dead_or_silent_collector_costs_no_request() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let dead = TcpListener::bind("127.0.0.1:0").unwrap();
    let urls = [&silent, &dead].map(|it| format!("http://{}", it.local_addr().unwrap()));
    drop(dead);
    for url in urls {
        let fast = [("OTEL_BSP_SCHEDULE_DELAY", "10")];
        let server = Server::start(&["--otlp-endpoint", &url], &fast);
        for _ in 0..20 {
            let answer = server
                .post(CHAT, &chat(&json!({"max_tokens": 2})), None)
                .await;
            assert_eq!(answer.status(), 200);
            let answer: Value = serde_json::from_str(&client::text(answer).await).unwrap();
            assert_eq!(answer["usage"]["completion_tokens"], 2);
        }
        let (status, log) = server.terminate();
        assert!(status.success(), "{url}: {log}");
        assert!(log.contains("spans of traces are lost"), "{url}: {log}");
        assert!(log.matches("spans of traces").count() <= 2, "{log}");
    }
}

#[test]
fn a_wrong_setting_ends_the_start_with_an_error_that_names_it() {
    for (flags, environment, expected) in [
        (
            vec!["--otlp-endpoint", "collector:4317"],
            vec![],
            "--otlp-endpoint: 'collector:4317",
        ),
        (
            vec!["--otlp-sample", "0.5"],
            vec![],
            "--otlp-sample: there is no collector",
        ),
        (vec!["--otlp-sample", "2"], vec![], "from 0 to 1"),
        (
            vec![],
            vec![("OTEL_EXPORTER_OTLP_ENDPOINT", "ftp://a")],
            "OTEL_EXPORTER_OTLP_ENDPOINT: '",
        ),
    ] {
        let output = command(&flags, &environment).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(expected), "{error}");
    }
}
