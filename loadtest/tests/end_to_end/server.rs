//! A tiny server that sends canned SSE.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use serde_json::Value;

/// Starts a server that rejects requests whose `seed` is a multiple of `reject_every`, and returns
/// its address. With 0, it rejects none.
pub(crate) fn server(reject_every: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    // The server's threads end with the test process.
    thread::spawn(move || {
        for socket in listener.incoming() {
            thread::spawn(move || serve(socket.unwrap(), reject_every));
        }
    });
    url
}

/// Answers the requests of one connection until the client closes it.
fn serve(socket: TcpStream, reject_every: u64) {
    let mut reader = BufReader::new(socket.try_clone().unwrap());
    let mut socket = socket;
    while let Some((path, body)) = request(&mut reader) {
        let (status, kind, answer) = match path.as_str() {
            "/v1/models" => (
                200,
                "application/json",
                r#"{"data":[{"id":"canned"}]}"#.to_owned(),
            ),
            "/version" => (200, "application/json", r#"{"version":"7.1"}"#.to_owned()),
            "/server_info" => (200, "application/json", r#"{"page_size":16}"#.to_owned()),
            "/metrics" => (200, "text/plain", metrics()),
            "/v1/chat/completions" => chat(&serde_json::from_slice(&body).unwrap(), reject_every),
            path => panic!("{path}"),
        };
        let length = answer.len();
        let head = format!(
            "HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n"
        );
        if socket
            .write_all(format!("{head}{answer}").as_bytes())
            .is_err()
        {
            return; // The client has disconnected on purpose.
        }
    }
}

fn request(reader: &mut BufReader<TcpStream>) -> Option<(String, Vec<u8>)> {
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if line == "\r\n" {
            break;
        }
        head.push(line);
    }
    let length = head
        .iter()
        .find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.trim().parse().unwrap())];
    reader.read_exact(&mut body).ok()?;
    Some((head[0].split(' ').nth(1)?.to_owned(), body))
}

/// Returns the metrics of a server whose steps take three times as long as at its start.
fn metrics() -> String {
    static SCRAPES: AtomicU32 = AtomicU32::new(0);
    let scrapes = SCRAPES.fetch_add(1, Ordering::Relaxed);
    let rows = (0..10).map(|knot| format!("rows_{}", 1 << knot));
    let others = ["kilo_decode_keys", "kilo_chunk_keys", "head", "logit"].map(str::to_owned);
    let mut text = String::new();
    for part in rows.chain(others) {
        text += &format!("sterna_step_cost_seconds{{part=\"{part}\"}} 0.001\n");
    }
    text += &format!("sterna_step_calibrated_seconds_sum{{}} {}\n", scrapes * 10);
    text + &format!("sterna_step_seconds_sum{{}} {}\n", scrapes * 30)
}

/// The tokens of the server's chat template.
pub(crate) const TEMPLATE_TOKENS: usize = 5;

/// Answers a chat request with exactly `max_tokens` tokens. Every prompt word is one token, except
/// "Does", which is two.
fn chat(body: &Value, reject_every: u64) -> (u16, &'static str, String) {
    assert_eq!(body["model"], "canned");
    let seed = body["seed"].as_u64().unwrap();
    if reject_every > 0 && seed > 0 && seed.is_multiple_of(reject_every) {
        return (
            503,
            "application/json",
            r#"{"error":{"message":"full","code":"engine_overloaded"}}"#.to_owned(),
        );
    }
    let messages = body["messages"].as_array().unwrap();
    let tokens = |word: &str| if word == "Does" { 2 } else { 1 };
    let words = |message: &Value| {
        let words = message["content"].as_str().unwrap().split(' ');
        words.map(tokens).sum::<usize>()
    };
    let prompt = messages.iter().map(words).sum::<usize>() + TEMPLATE_TOKENS;
    let tokens = body["max_tokens"].as_u64().unwrap();
    let mut answer = String::from(": keep-alive\n\n");
    for _ in 0..tokens {
        answer += "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a \"}}]}\n\n";
    }
    answer += "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"length\"}]}\n\n";
    let usage = format!("{{\"prompt_tokens\":{prompt},\"completion_tokens\":{tokens}}}");
    answer += &format!("data: {{\"choices\":[],\"usage\":{usage}}}\n\n");
    (200, "text/event-stream", answer + "data: [DONE]\n\n")
}
