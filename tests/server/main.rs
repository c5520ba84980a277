//! The whole program: started from the command line, used over HTTP, stopped by a signal.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

mod answers;
mod checkpoints;
#[path = "../harness/client.rs"]
mod client;
#[cfg(target_os = "linux")]
mod grammars;
mod operation;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use client::{Client, Response};
use hyper::Request;
use serde_json::{Value, json};

/// A timeout that only a hanging test reaches.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server process on a free port. It is killed if the test fails before it stops the server.
struct Server {
    process: Child,
    address: String,
    /// What the program says when it is ready, up to its example.
    greeting: String,
    client: Client,
}

impl Server {
    async fn start(flags: &[&str]) -> Server {
        Server::with_environment(flags, &[]).await
    }

    async fn with_environment(flags: &[&str], environment: &[(&str, &str)]) -> Server {
        Server::with_log(flags, environment, Stdio::null()).await
    }

    async fn with_log(flags: &[&str], environment: &[(&str, &str)], log: Stdio) -> Server {
        let mut process = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(["--port", "0"])
            .args(flags)
            .envs(environment.iter().copied())
            .stdout(Stdio::piped())
            .stderr(log)
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
        let client = Client::new();
        Server {
            process,
            address,
            greeting,
            client,
        }
    }

    async fn chat(&self, messages: &[Value], max_tokens: u32) -> Value {
        let body = json!({"messages": messages, "max_tokens": max_tokens, "temperature": 0});
        let response = self.post("/v1/chat/completions", &body).await;
        assert_eq!(response.status(), 200);
        json_of(response).await
    }

    async fn get(&self, path: &str) -> Response {
        let request = Request::get(format!("{}{path}", self.address));
        self.client.send(request, String::new()).await.unwrap()
    }

    async fn post(&self, path: &str, body: &Value) -> Response {
        let request = Request::post(format!("{}{path}", self.address));
        self.client.send(request, body.to_string()).await.unwrap()
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

/// Returns the rest of the body.
async fn json_of(response: Response) -> Value {
    serde_json::from_str(&client::text(response).await).unwrap()
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

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn run(flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(flags)
        .output()
        .unwrap()
}
