//! A tenant that sends the worst grammars as fast as they are answered, each only once, beside a
//! stream of another tenant.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_random::mix;

use crate::quiet_tenant::{AttackRequest, attacked};
use crate::{Extent, Findings};

const CONNECTIONS: usize = 8;
/// The grammars of a tenant that stay compiled, each with its worker.
const MAX_WORKERS: usize = 16;
/// The memory of these workers, in KiB.
const MAX_MEMORY: u64 = 64 << 10;
/// How long the other workers may take to end.
const PATIENCE: Duration = Duration::from_secs(30);

/// Sends the worst grammars in turn, and then looks at the workers that are left.
pub(crate) async fn run(extent: Extent, model: Option<&str>, findings: &mut Findings) {
    let server = attacked(extent, model, findings, CONNECTIONS, request).await;
    let patience = Instant::now() + PATIENCE;
    while server.workers().len() > MAX_WORKERS && Instant::now() < patience {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let time = |workers: &[(u64, f64)]| workers.iter().map(|(_, time)| time).sum::<f64>();
    let before = server.workers();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let after = server.workers();
    let count = after.len();
    let figure = format!("{count} workers left (at most {MAX_WORKERS})");
    findings.check(&figure, count <= MAX_WORKERS);
    let busy = (time(&after) - time(&before)).max(0.0);
    findings.check(&format!("they work for {busy:.2} s of 1 s"), busy == 0.0);
    let memory: u64 = after.iter().map(|(memory, _)| memory).sum();
    let figure = format!(
        "they have {} MiB of their own (at most {})",
        memory >> 10,
        MAX_MEMORY >> 10
    );
    findings.check(&figure, memory <= MAX_MEMORY);
}

/// Returns a request whose grammar no other number has.
fn request(number: u64) -> AttackRequest {
    let lark = |grammar: String| json!({"guided_grammar": grammar});
    let schema = |schema: Value| json!({"guided_json": schema});
    let (name, mut body) = match number % 10 {
        0 => ("conjunction", lark(conjunction(number))),
        1 => ("patterns of a schema", schema(patterns(number))),
        2 => ("long text", {
            let letters = "a".repeat(65_000);
            let mut body = lark(format!("start: \"{number}{letters}\"\n"));
            body["n"] = json!(2);
            body
        }),
        3 => (
            "forced bytes",
            lark(format!("start: T0 T0\nT0: /a{{{}}}/+\n", 100 + number)),
        ),
        4 => (
            "forced bytes in a mask",
            lark(format!("start: /[bc]/ A A\nA: /a{{{}}}/+\n", 100 + number)),
        ),
        5 => (
            "ambiguous lexemes",
            lark(format!(
                "start: \"{number}\" (A | B)+\nA: /a+/\nB: /a+b?/\n"
            )),
        ),
        6 => (
            "lowest integer",
            schema(json!({"const": i64::MIN, "title": number})),
        ),
        7 => ("large enum", schema(json!({"enum": words(number)}))),
        8 => ("many properties", schema(properties(number))),
        _ => (
            "nested repetitions",
            json!({"guided_regex": format!("{number}{}", repetitions())}),
        ),
    };
    body["prompt"] = json!("Hi");
    body["max_tokens"] = json!(4);
    AttackRequest {
        name,
        path: "/v1/completions",
        body: body.to_string().into(),
    }
}

fn conjunction(number: u64) -> String {
    let count = [24, 100, 300, 1000][(number / 10) as usize % 4];
    let parts = (1..=count).map(|n| format!("/.*b{{{n}}}.*/"));
    let parts: Vec<String> = parts.collect();
    format!("start: \"{number}\" A\nA: {}\n", parts.join(" & "))
}

fn patterns(number: u64) -> Value {
    let count = [24, 100, 300][(number / 10) as usize % 3];
    let parts = (1..=count).map(|n| json!({"pattern": format!("^.*a.{{{n}}}b$")}));
    json!({"type": "string", "title": number, "allOf": parts.collect::<Vec<_>>()})
}

fn repetitions() -> String {
    (0..4).fold("a".to_owned(), |inner, _| format!("({inner}){{1,100}}"))
}

/// Returns random words, of 60,000 letters in all.
fn words(number: u64) -> Vec<String> {
    let word = |n| format!("{:016x}", mix(number << 32 | n));
    (0..3000).map(word).collect()
}

fn properties(number: u64) -> Value {
    let property = |n| {
        (
            format!("p{n}_{number}"),
            json!({"type": "string", "maxLength": 1000}),
        )
    };
    let properties: serde_json::Map<String, Value> = (0..900).map(property).collect();
    json!({"type": "object", "properties": properties})
}
