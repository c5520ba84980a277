//! Real sockets: clients that disconnect, pipelined requests, shutdown, input that is not HTTP.

use std::io::{Read, Write};
use std::net::SocketAddr;

use axum::Router;
use serde_json::json;
use sterna::api::{self, App, ConnectionLimits};
use sterna::tenants::{Deadlines, Defaults, Roster};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::harness::*;
use crate::{CHAT, TEXT};

/// Returns the bytes of a POST request.
fn http_request(path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
}

/// The address of a server, the sender that stops it, and its task.
type Listening = (SocketAddr, oneshot::Sender<()>, JoinHandle<()>);

/// Serves a real socket until the returned sender is used or dropped.
async fn listen(router: &Router) -> Listening {
    listen_within(router, ConnectionLimits::default()).await
}

async fn listen_within(router: &Router, limits: ConnectionLimits) -> Listening {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let stopped = async move { drop(stopped.await) };
    let serving = tokio::spawn(api::serve(listener, router.clone(), limits, stopped));
    (address, stop, serving)
}

impl Server {
    async fn listen(&self) -> Listening {
        listen(&self.router).await
    }
}

/// Writes all of `request` before it reads, as many clients do. Returns the answer.
async fn write_then_read(address: SocketAddr, request: Vec<u8>) -> std::io::Result<String> {
    let exchange = move || {
        let mut client = std::net::TcpStream::connect(address)?;
        client.set_read_timeout(Some(PATIENCE))?;
        client.write_all(&request)?;
        let mut answer = String::new();
        client.read_to_string(&mut answer)?;
        Ok(answer)
    };
    tokio::task::spawn_blocking(exchange).await.unwrap()
}

/// Returns the state of a loading server that has one tenant.
fn loading_with_keys() -> App {
    let name = format!("sterna-one-tenant-{}.toml", std::process::id());
    let file = std::env::temp_dir().join(name);
    let hash = "8ed3f6ad685b959ead7022518e1af76cd816f8e8ec7ccdda1ed4018e8f2223f8";
    let table = format!("[[tenant]]\nid = \"a\"\nkey_sha256 = \"{hash}\"\n");
    std::fs::write(&file, table).unwrap();
    let defaults = Defaults {
        deadlines: Deadlines::default(),
        max_queued: 64,
        max_queued_time: PATIENCE,
    };
    let roster = Roster::open(&file, defaults).unwrap();
    std::fs::remove_file(&file).unwrap();
    App::for_tenants(roster.tenants(), false, 4096)
}

#[tokio::test]
async fn an_answer_before_the_end_of_the_body_reaches_a_client_that_writes_first() {
    let server = Server::new();
    let (serving, _stop, _task) = server.listen().await;
    let (keys, _stop, _task) = listen(&api::router(loading_with_keys())).await;
    let (loading, _stop, _task) = listen(&api::router(App::loading())).await;
    let post = |path: &str, kind: &str, bytes: usize| {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\n\
             content-length: {bytes}\r\n\r\n"
        );
        let mut request = head.into_bytes();
        request.resize(request.len() + bytes, b' ');
        request
    };
    for (address, path, kind, status) in [
        (keys, TEXT, "application/json", 401),
        (serving, "/nowhere", "application/json", 404),
        (serving, "/health", "application/json", 405),
        (serving, TEXT, "text/plain", 415),
        (loading, CHAT, "application/json", 503),
    ] {
        for bytes in [200_000, 2_000_000].repeat(20) {
            let answer = write_then_read(address, post(path, kind, bytes)).await;
            let answer = answer.unwrap_or_else(|error| panic!("{status}, {bytes}: {error}"));
            let expected = format!("HTTP/1.1 {status} ");
            assert!(answer.starts_with(&expected), "{status}: {answer}");
            assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
        }
    }
    let body = 12 << 20;
    let too_large = write_then_read(serving, post(TEXT, "application/json", body)).await;
    let too_large = too_large.unwrap();
    assert!(too_large.starts_with("HTTP/1.1 413 "), "{too_large}");
    assert!(
        too_large.contains("\r\nconnection: close\r\n"),
        "{too_large}"
    );
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request() {
    let next = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
    for (path, stream, behind) in [
        (CHAT, false, ""),
        (CHAT, true, ""),
        (TEXT, false, ""),
        (TEXT, true, ""),
        (CHAT, false, "\r\n"),
        (CHAT, true, "\r\n"),
        (CHAT, false, next),
        (TEXT, true, next),
    ] {
        let server = Server::new();
        server.gate.close();
        server.gate.pass(3);
        let (address, _stop, _serving) = server.listen().await;
        let body = json!({
            "messages": [{"role": "user", "content": "Hi"}],
            "prompt": "Hi",
            "max_tokens": 3000,
            "stream": stream,
        });
        let mut client = TcpStream::connect(address).await.unwrap();
        let sent = http_request(path, &body.to_string()) + behind;
        client.write_all(sent.as_bytes()).await.unwrap();
        server.gate.arrivals(4).await;
        drop(client);
        server
            .until("the server notices the disconnect", |server| {
                server.metric("sterna_client_disconnects_total") == 1.0
            })
            .await;
        server.gate.open();
        server
            .until("nothing runs", |server| {
                server.engine.status().running == 0
                    && server.metric("vllm:num_requests_running") == 0.0
            })
            .await;
        let drawn = server.metric("vllm:generation_tokens_total");
        assert!(
            drawn <= 5.0,
            "{path} stream {stream} behind {behind:?}: {drawn} tokens after the disconnect"
        );
    }
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let server = Server::new();
    let (address, _stop, _serving) = server.listen().await;
    let body = json!({"prompt": "Hi", "max_tokens": 5, "stream": true}).to_string();
    let one = http_request(TEXT, &body);
    let large = json!({"prompt": "x".repeat(3 << 20)}).to_string();
    let too_large = http_request(TEXT, &large);
    let last = "GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    server.gate.close();
    let mut client = TcpStream::connect(address).await.unwrap();
    client.write_all((one.repeat(2)).as_bytes()).await.unwrap();
    server.gate.arrivals(1).await;
    // The server reads a part of this one ahead, while it answers the first.
    client.write_all(one.as_bytes()).await.unwrap();
    server.gate.open();
    let mut answers = Vec::new();
    let text = |answers: &[u8]| String::from_utf8_lossy(answers).into_owned();
    let (mut reader, mut writer) = client.split();
    let mut part = [0; 4096];
    while text(&answers).matches("[DONE]").count() < 3 {
        let read = timeout(PATIENCE, reader.read(&mut part))
            .await
            .unwrap()
            .unwrap();
        assert!(read > 0, "{}", text(&answers));
        answers.extend_from_slice(&part[..read]);
    }
    writer.write_all(too_large.as_bytes()).await.unwrap();
    writer.write_all(last.as_bytes()).await.unwrap();
    timeout(PATIENCE, reader.read_to_end(&mut answers))
        .await
        .unwrap()
        .unwrap();
    let answers = text(&answers);
    assert_eq!(answers.matches("HTTP/1.1 200 OK").count(), 4, "{answers}");
    assert_eq!(answers.matches("HTTP/1.1 413 ").count(), 1, "{answers}");
}

#[tokio::test]
async fn shutdown_lets_running_responses_end() {
    let server = Server::new();
    server.gate.close();
    let (address, stop, serving) = server.listen().await;
    let body = json!({"prompt": "Hi", "max_tokens": 5}).to_string();
    let mut client = TcpStream::connect(address).await.unwrap();
    let request = http_request(TEXT, &body);
    client.write_all(request.as_bytes()).await.unwrap();
    server.gate.arrivals(1).await;
    stop.send(()).unwrap();
    server.gate.open();
    let mut answer = String::new();
    timeout(PATIENCE, client.read_to_string(&mut answer))
        .await
        .unwrap()
        .unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.contains("\"finish_reason\":\"length\""));
    timeout(PATIENCE, serving).await.unwrap().unwrap();
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn input_that_is_not_http_1_ends_the_connection() {
    let server = Server::new();
    let (address, _stop, _serving) = server.listen().await;
    for bytes in [
        &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..],
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"HELO\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ] {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(bytes).await.unwrap();
        let mut answer = Vec::new();
        // The connection may end with a reset or a close.
        drop(
            timeout(PATIENCE, client.read_to_end(&mut answer))
                .await
                .expect("the connection did not end"),
        );
        assert!(
            answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"),
            "{}",
            String::from_utf8_lossy(&answer)
        );
    }
    server.complete(json!({})).await.ok();
}

#[tokio::test]
async fn a_new_client_takes_the_place_of_a_connection_without_a_request() {
    let limits = ConnectionLimits {
        connections: 3,
        ..ConnectionLimits::default()
    };
    let server = Server::new();
    let (address, _stop, _task) = listen_within(&server.router, limits).await;
    server.gate.close();
    let stream = json!({"prompt": "Hi", "max_tokens": 5, "stream": true}).to_string();
    let mut running = TcpStream::connect(address).await.unwrap();
    let request = http_request(TEXT, &stream);
    running.write_all(request.as_bytes()).await.unwrap();
    server.gate.arrivals(1).await;
    let mut idle = Vec::new();
    for head in ["", "GET /health HTTP/1.1\r\nx-slow: "] {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(head.as_bytes()).await.unwrap();
        idle.push(client);
    }
    let health = "GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    for _ in 0..5 {
        let answer = write_then_read(address, health.into()).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
    let mut answer = Vec::new();
    // It may end with a reset.
    drop(
        timeout(PATIENCE, idle[0].read_to_end(&mut answer))
            .await
            .unwrap(),
    );
    assert!(answer.is_empty(), "it has lost its place");
    server.gate.open();
    let mut answer = String::new();
    while !answer.contains("[DONE]") {
        let mut part = [0; 4096];
        let count = timeout(PATIENCE, running.read(&mut part))
            .await
            .unwrap()
            .unwrap();
        assert!(count > 0, "{answer}");
        answer += &String::from_utf8_lossy(&part[..count]);
    }
}
