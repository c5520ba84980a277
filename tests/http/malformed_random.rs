//! Thousands of distinct malformed requests. Each gets a 4xx with a JSON error, and none changes
//! the answer to the request after it.

use std::collections::HashSet;

use axum::http::Method;
use serde_json::json;
use sterna_random::Random;

use crate::harness::*;
use crate::{CHAT, TEXT};

/// The number of requests, unless the variable `REQUESTS` says another.
const DEFAULT_REQUESTS: usize = 2_000;
const REQUESTS: &str = "STERNA_MALFORMED_REQUESTS";

/// Fields of both endpoints, with the types of value that they accept: `b`oolean, `i`nteger,
/// `n`umber, `s`tring, `a`rray, `o`bject.
const FIELDS: &[(&str, &str)] = &[
    ("model", "s"),
    ("max_tokens", "i"),
    ("max_completion_tokens", "i"),
    ("min_tokens", "i"),
    ("temperature", "in"),
    ("top_p", "in"),
    ("top_k", "i"),
    ("min_p", "in"),
    ("seed", "i"),
    ("frequency_penalty", "in"),
    ("presence_penalty", "in"),
    ("repetition_penalty", "in"),
    ("logit_bias", "o"),
    ("stop", "sa"),
    ("stop_token_ids", "a"),
    ("ignore_eos", "b"),
    ("include_stop_str_in_output", "b"),
    ("skip_special_tokens", "b"),
    ("return_token_ids", "b"),
    ("return_tokens_as_token_ids", "b"),
    ("truncate_prompt_tokens", "i"),
    ("n", "i"),
    ("stream", "b"),
    ("stream_options", "o"),
];

/// Numeric fields with a value above their limits; larger ones are too large as well.
const TOO_LARGE: &[(&str, f64)] = &[
    ("temperature", 2.001),
    ("top_p", 1.001),
    ("min_p", 1.001),
    ("frequency_penalty", 2.001),
    ("presence_penalty", 2.001),
    ("repetition_penalty", 100.1),
    ("n", 9.0),
    ("max_tokens", 5000.0),
    ("top_k", 5e9),
];

/// Fields that are always refused if they hold a random text.
const REFUSED: &[&str] = &[
    "grammar",
    "ebnf",
    "json_schema",
    "guided_json",
    "guided_choice",
    "structured_outputs",
    "suffix",
    "tools",
    "functions",
    "response_format",
    "chat_template",
    "reasoning_effort",
    "samplers",
    "lora_path",
];

#[derive(Clone, PartialEq, Eq, Hash)]
struct Request {
    method: Method,
    path: String,
    content_type: &'static str,
    body: Vec<u8>,
}

fn text(random: &mut Random) -> String {
    let letters: Vec<char> = "aä你🦀 \"\\/{}[]:,01-+.e\u{1}".chars().collect();
    let length = random.between(1, 30);
    (0..length).map(|_| random.pick(&letters)).collect()
}

/// Returns a random value of a type, as in `FIELDS`, as JSON.
fn value(random: &mut Random, kind: char) -> String {
    match kind {
        'b' => random.percent(50).to_string(),
        'i' => (random.next_u64() as i64).to_string(),
        'n' => (random.below(1000) as f64 + 0.5).to_string(),
        's' => json!(text(random)).to_string(),
        'a' => {
            let kind = random.pick(&['b', 'n', 's', 'o']);
            format!("[{}]", value(random, kind))
        }
        _ => {
            let name = json!(text(random));
            let kind = random.pick(&['b', 'n', 's']);
            format!("{{{name}: {}}}", value(random, kind))
        }
    }
}

fn valid(path: &str) -> String {
    match path {
        CHAT => r#"{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}"#,
        _ => r#"{"prompt": "Hello", "max_tokens": 5}"#,
    }
    .to_owned()
}

/// Returns the valid body with one more field in front. If the body has the field already, it has
/// it twice then, which is malformed too.
fn with(path: &str, field: &str, value: &str) -> String {
    format!("{{{}: {value}, {}", json!(field), &valid(path)[1..])
}

fn body(random: &mut Random, path: &str) -> Vec<u8> {
    let valid = valid(path);
    match random.below(12) {
        0..=3 => {
            let (field, accepted) = random.pick(FIELDS);
            let kinds: Vec<char> = "binsao"
                .chars()
                .filter(|c| !accepted.contains(*c))
                .collect();
            let kind = random.pick(&kinds);
            with(path, field, &value(random, kind))
        }
        4 => {
            let (field, least) = random.pick(TOO_LARGE);
            let number = least * (1.0 + random.fraction() * 100.0);
            let number = if least.fract() == 0.0 {
                number.ceil()
            } else {
                number
            };
            with(path, field, &json!(number).to_string())
        }
        5 => {
            let field = random.pick(REFUSED);
            with(path, field, &json!(text(random)).to_string())
        }
        6 => valid[..random.index(valid.len())].to_owned(),
        7 => {
            let mut bytes = valid.into_bytes();
            let place = random.index(bytes.len());
            bytes.insert(place, random.pick(&[0xff, 0xc0, 0x00, 0x80, 0x1f]));
            return bytes;
        }
        8 => {
            let depth = random.between(128, 3000) as usize;
            let open = random.pick(&["[", "{\"a\":"]);
            with(path, &text(random), &open.repeat(depth))
        }
        9 => {
            let role = json!(format!("{}!", text(random)));
            format!(
                "{{\"messages\": [{{\"role\": {role}, \"content\": \"a\"}}], \"prompt\": [-1]}}"
            )
        }
        10 => format!("{valid}{}", text(random).replace(' ', "x")),
        _ => {
            let length = random.between(1, 60);
            return (0..length).map(|_| random.below(256) as u8).collect();
        }
    }
    .into_bytes()
}

fn malformed(random: &mut Random) -> Request {
    let path = random.pick(&[CHAT, TEXT]);
    let mut request = Request {
        method: Method::POST,
        path: path.to_owned(),
        content_type: "application/json",
        body: Vec::new(),
    };
    match random.below(20) {
        0 => {
            request.content_type = random.pick(&["", "text/plain", "application/x-json", "json"]);
            request.body = with(path, &text(random), "0").into_bytes();
        }
        1 => {
            request.method = [Method::GET, Method::PUT, Method::DELETE][random.index(3)].clone();
            request.body = with(path, &text(random), "0").into_bytes();
        }
        2 => {
            request.path = format!("{path}/{}", random.next_u64());
            request.body = valid(path).into_bytes();
        }
        _ => request.body = body(random, path),
    }
    request
}

#[tokio::test]
async fn thousands_of_malformed_requests_get_a_json_error_and_change_no_other_answer() {
    let requests = std::env::var(REQUESTS).map_or(DEFAULT_REQUESTS, |count| count.parse().unwrap());
    let server = Server::new();
    let canary = async || {
        let body = json!({"prompt": "canary", "max_tokens": 8, "seed": 7, "logprobs": 2});
        server.complete(body).await.ok()["choices"].clone()
    };
    let expected = canary().await;
    let mut random = Random::from_env();
    let mut sent = HashSet::new();
    while sent.len() < requests {
        let request = malformed(&mut random);
        if !sent.insert(request.clone()) {
            continue;
        }
        let shown = String::from_utf8_lossy(&request.body)
            .chars()
            .take(200)
            .collect::<String>();
        let kind = [("content-type", request.content_type)];
        let answer = server
            .send(request.method, &request.path, &kind, request.body)
            .await;
        let (status, ..) = answer.error();
        assert!(
            (400..500).contains(&status),
            "{} {shown}: {}",
            request.path,
            answer.body
        );
        assert_eq!(canary().await, expected, "after {} {shown}", request.path);
    }
}
