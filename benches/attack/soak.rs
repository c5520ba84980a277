//! Soak: many clients for a long time. Some leave early, some send requests that are malformed.
//!
//! The server must answer each properly, and must hold no more at the end than at the start.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::json;
use sterna_random::Random;
use tokio::task::JoinSet;

use crate::client::Connection;
use crate::outcome::{Outcome, Tally, serve};
use crate::process::Process;
use crate::{Extent, Findings};

const CLIENTS: u64 = 32;
const LEAVING_PERCENT: u64 = 30;
const MALFORMED_PERCENT: u64 = 5;
/// The growth of resident memory that is allowed in the second half of a long run.
const MAX_GROWTH: f64 = 0.01;
/// The growth in a short run, in KiB. The allocator has not settled by then: it may keep free pages
/// per thread. A leak of 1 KiB a request exceeds this limit.
const MAX_SHORT_GROWTH_KIB: u64 = 16 * 1024;

/// The threads that the server may have beyond those at the start. `tokio` starts threads for work
/// that blocks when such work arrives, and ends each when it was idle for ten seconds: one keeps
/// the samples of the charts, two parse bodies. A leak of one thread in 5,000 requests exceeds this
/// limit.
const MAX_MORE_THREADS: u64 = 3;

/// Bodies that deserve a 4xx.
const MALFORMED: [&str; 8] = [
    "",
    "{",
    "[]",
    "{\"messages\": \"Hello\"}",
    "{\"messages\": []}",
    "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"max_tokens\": -1}",
    "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"temperature\": \"hot\"}",
    "{\"messages\": [{\"role\": \"user\", \"content\": \"\\ud800\"}], \"n\": 99}",
];

const QUESTIONS: [&str; 6] = [
    "What is the capital of France?",
    "Tell me a story about a fox.",
    "Count from one to ten.",
    "What is two plus three?",
    "Name a colour.",
    "Who are you, and what can you do for me on a long day?",
];

pub(crate) async fn run(extent: Extent, findings: &mut Findings) {
    let requests = extent.pick(20_000, 500_000);
    let server = Process::start(&["--max-queued", "64", "--kv-memory", "64MiB"]).await;
    let server = Arc::new(server);
    drop(attack(&server, requests / 20, 1).await); // Buffers and caches reach their sizes.
    server.idle().await;
    let before = server.held();
    let (mut tally, mut resident) = (Tally::default(), Vec::new());
    for part in 0..20 {
        tally.merge(attack(&server, requests / 20, 2 + part).await);
        resident.push(server.held().resident as f64);
    }
    server.idle().await;
    let after = server.settled(before.files).await;
    findings.check_ends(&tally);
    let unreachable = tally.of(&Outcome::Unreachable);
    findings.check(
        &format!("{unreachable} requests without an answer"),
        unreachable == 0,
    );
    let complete = tally.of(&Outcome::Complete) as f64 / tally.total() as f64;
    findings.check(
        &format!("{:.0} % complete (at least 55)", 100.0 * complete),
        complete >= 0.55,
    );
    let mean = |samples: &[f64]| samples.iter().sum::<f64>() / samples.len() as f64;
    let growth = mean(&resident[15..]) / mean(&resident[5..10]) - 1.0;
    let figure = format!(
        "resident memory {:.1} -> {:.1} MiB, {:+.2} % in the second half",
        before.resident as f64 / 1024.0,
        after.resident as f64 / 1024.0,
        100.0 * growth
    );
    let (limit, holds) = match extent {
        Extent::Short => (
            "at most +16 MiB",
            after.resident <= before.resident + MAX_SHORT_GROWTH_KIB,
        ),
        Extent::Long => ("at most +1 % in the second half", growth <= MAX_GROWTH),
    };
    findings.check(&format!("{figure} ({limit})"), holds);
    let figure = format!("files {} -> {}", before.files, after.files);
    findings.check(&figure, after.files <= before.files);
    let figure = format!(
        "threads {} -> {} (at most +{MAX_MORE_THREADS})",
        before.threads, after.threads
    );
    let most = before.threads + MAX_MORE_THREADS;
    findings.check(&figure, after.threads <= most);
}

/// Sends `requests` requests by parallel clients.
async fn attack(server: &Arc<Process>, requests: u64, seed: u64) -> Tally {
    let next = Arc::new(AtomicU64::new(0));
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (server, next) = (Arc::clone(server), Arc::clone(&next));
        let mut random = Random::new(sterna_random::mix(seed * CLIENTS + client));
        clients.spawn(async move {
            let mut tally = Tally::default();
            let mut connection = None;
            while next.fetch_add(1, Ordering::Relaxed) < requests {
                let open = match connection.take() {
                    Some(open) => Ok(open),
                    None => Connection::open(server.address).await,
                };
                let Ok(mut open) = open else {
                    tally.count(Outcome::Unreachable);
                    continue;
                };
                let (body, leave_after) = request(&mut random);
                let path = "/v1/chat/completions";
                let served = serve(&mut open, (path, "", &body), leave_after).await;
                if served.outcome != Outcome::Left && !served.closes {
                    connection = Some(open);
                }
                tally.count(served.outcome);
            }
            tally
        });
    }
    let mut all = Tally::default();
    while let Some(tally) = clients.join_next().await {
        all.merge(tally.expect("the client does not panic"));
    }
    all
}

/// Returns a body, and after how many pieces of the answer its client leaves.
fn request(random: &mut Random) -> (String, Option<usize>) {
    if random.percent(MALFORMED_PERCENT) {
        return (random.pick(&MALFORMED).to_owned(), None);
    }
    let body = json!({
        "messages": [{"role": "user", "content": random.pick(&QUESTIONS)}],
        "max_tokens": 1 + random.below(6),
        "stream": random.percent(50),
        "n": 1 + random.below(8) / 7,
        "seed": random.below(1000),
    });
    let leaves = random.percent(LEAVING_PERCENT);
    (body.to_string(), leaves.then(|| random.index(3)))
}
