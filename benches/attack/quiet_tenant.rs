//! A quiet tenant that streams the same answer, alone and in turn beside a tenant that attacks.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::client::Connection;
use crate::overload::{keygen, percentile, start};
use crate::process::Process;
use crate::{Extent, Findings};

const MAX_GAP: f64 = 1.2;
const MIN_SPEED: f64 = 0.95;
/// The memory that may stay after the attack, in KiB.
const MAX_KEPT: u64 = 32 << 10;

/// A request of the tenant that attacks.
pub(crate) struct AttackRequest {
    /// What the figures call it.
    pub(crate) name: &'static str,
    pub(crate) path: &'static str,
    pub(crate) body: Arc<str>,
}

/// How often requests of each name ended with each status; 0 is no answer.
type Ends = BTreeMap<(&'static str, u16), u64>;

/// What the stream saw.
#[derive(Default)]
struct Streamed {
    tokens: u64,
    time: Duration,
    gaps: Vec<Duration>,
    texts: BTreeMap<String, u64>, // How often each answer came.
    broken: u64,
}

impl Streamed {
    fn merge(&mut self, other: Streamed) {
        self.tokens += other.tokens;
        self.time += other.time;
        self.gaps.extend(other.gaps);
        self.broken += other.broken;
        for (text, count) in other.texts {
            *self.texts.entry(text).or_default() += count;
        }
    }

    fn speed(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64()
    }
}

/// Streams answers of the quiet tenant alone, and in turn beside the tenant that sends `requests`,
/// which have numbers from 0 on. Each of the attack's connections sends the next request as soon as
/// its last one is answered. Returns the server after the attack.
pub(crate) async fn attacked(
    extent: Extent,
    model: Option<&str>,
    findings: &mut Findings,
    connections: usize,
    requests: impl Fn(u64) -> AttackRequest + Send + Sync + 'static,
) -> Arc<Process> {
    let (time, rounds) = extent.pick((3, 1), (20, 6));
    let time = Duration::from_secs(time);
    let path = std::env::temp_dir().join(format!("sterna-quiet-{}.toml", std::process::id()));
    let path = path.to_str().expect("the path is UTF-8");
    let (quiet, attacker) = (keygen("quiet"), keygen("attacker"));
    fs::write(path, quiet.1 + &attacker.1).expect("the tenants file is written");
    let server = start(model, &["--tenants", path]).await;
    drop(fs::remove_file(path));
    let sent = AtomicU64::new(0);
    let next = Arc::new(move || requests(sent.fetch_add(1, Ordering::Relaxed)));
    drop(stream(&server, &quiet.0, Duration::from_secs(1)).await);
    let before = server.held().resident;
    let (mut alone, mut beside) = (Streamed::default(), Streamed::default());
    let mut ends = Ends::new();
    for _ in 0..rounds {
        let began = server.processor_time();
        let streamed = stream(&server, &quiet.0, time).await;
        let shares = server.processor_time().since(&began);
        println!("  alone: {:.1} tok/s; {shares}", streamed.speed());
        alone.merge(streamed);
        let began = server.processor_time();
        let streaming = async {
            let streamed = stream(&server, &quiet.0, time).await;
            (streamed, server.processor_time().since(&began))
        };
        let attack = attack(&server, &attacker.0, time, connections, &next);
        let ((streamed, shares), ended) = tokio::join!(streaming, attack);
        println!("  beside: {:.1} tok/s; {shares}", streamed.speed());
        beside.merge(streamed);
        for (end, count) in ended {
            *ends.entry(end).or_default() += count;
        }
    }
    for ((name, status), count) in &ends {
        println!("  {count} × {name}: {status}");
    }
    judge_attack(&ends, &server, before, findings);
    judge_stream(&mut alone, &mut beside, findings);
    server
}

/// Checks that all requests of the attack ended well, and that the server's memory is back.
fn judge_attack(ends: &Ends, server: &Process, before: u64, findings: &mut Findings) {
    let held = server.held();
    println!(
        "  resident {} MiB before, {} MiB after, peak {} MiB",
        before >> 10,
        held.resident >> 10,
        held.peak >> 10
    );
    let unexpected = |status: &u16| ![200, 400, 413, 429, 503].contains(status);
    let wrong: u64 = ends
        .iter()
        .filter(|((_, status), _)| unexpected(status))
        .map(|(_, count)| count)
        .sum();
    let all: u64 = ends.values().sum();
    findings.check(
        &format!("{wrong} of {all} requests of the attack without a proper end"),
        wrong == 0 && all > 0,
    );
    let kept = held.resident.saturating_sub(before);
    let figure = format!("{} MiB kept (at most {})", kept >> 10, MAX_KEPT >> 10);
    findings.check_time(&figure, kept <= MAX_KEPT);
}

/// Checks that all answers ended well, with the same text and about as fast.
fn judge_stream(alone: &mut Streamed, beside: &mut Streamed, findings: &mut Findings) {
    let broken = alone.broken + beside.broken;
    let count: u64 = beside.texts.values().sum();
    findings.check(
        &format!("{broken} streams broken, {count} whole beside the attack"),
        broken == 0 && count > 0,
    );
    let texts = alone.texts.keys().chain(beside.texts.keys());
    let same = texts.collect::<BTreeSet<_>>().len() == 1;
    findings.check("every answer has the same bytes", same);
    let medians = [&mut *alone, &mut *beside].map(|seen| percentile(&mut seen.gaps, 50));
    println!("  median gap {:.1} -> {:.1} ms", medians[0], medians[1]);
    let gaps = [&mut *alone, &mut *beside].map(|seen| percentile(&mut seen.gaps, 99));
    let figure = format!(
        "p99 inter-token gap {:.1} -> {:.1} ms (at most {MAX_GAP} times)",
        gaps[0], gaps[1]
    );
    findings.check_time(&figure, gaps[1] <= MAX_GAP * gaps[0]);
    let (calm, attacked) = (alone.speed(), beside.speed());
    let figure = format!("{calm:.1} -> {attacked:.1} tok/s (at least {MIN_SPEED} of it)");
    findings.check_time(&figure, attacked >= MIN_SPEED * calm);
}

/// Streams the same answer again and again.
async fn stream(server: &Arc<Process>, key: &str, time: Duration) -> Streamed {
    let body = json!({
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": 96, "ignore_eos": true, "temperature": 0, "stream": true,
        "stream_options": {"include_usage": true},
    })
    .to_string();
    let end = Instant::now() + time;
    let mut all = Streamed::default();
    while Instant::now() < end {
        match stream_once(server, key, &body).await {
            Ok(one) => all.merge(one),
            Err(_) => all.broken += 1,
        }
    }
    all
}

async fn stream_once(server: &Process, key: &str, body: &str) -> io::Result<Streamed> {
    let mut connection = Connection::open(server.address).await?;
    connection.post("/v1/chat/completions", key, body).await?;
    let head = connection.head().await?;
    let (mut one, mut text) = (Streamed::default(), Vec::new());
    let mut first_and_last: Option<(Instant, Instant)> = None;
    while let Some(piece) = connection.piece().await? {
        let now = Instant::now();
        if let Some((_, last)) = first_and_last {
            one.gaps.push(now - last);
        }
        first_and_last = Some((first_and_last.map_or(now, |(first, _)| first), now));
        text.extend(piece);
    }
    let text = String::from_utf8_lossy(&text);
    let chunks = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let mut answer = String::new();
    for chunk in chunks.filter(|chunk| *chunk != "[DONE]") {
        let chunk: Value = serde_json::from_str(chunk)?;
        answer += chunk["choices"][0]["delta"]["content"]
            .as_str()
            .unwrap_or_default();
        let tokens = &chunk["usage"]["completion_tokens"];
        one.tokens = tokens.as_u64().unwrap_or(one.tokens);
    }
    let is_whole = head.status == 200 && text.ends_with("data: [DONE]\n\n") && one.tokens == 96;
    one.broken = u64::from(!is_whole);
    one.time = first_and_last.map_or(Duration::ZERO, |(first, last)| last - first);
    one.texts.insert(answer, 1);
    Ok(one)
}

/// Sends requests for `time`.
async fn attack<R: Fn() -> AttackRequest + Send + Sync + 'static>(
    server: &Arc<Process>,
    key: &str,
    time: Duration,
    connections: usize,
    next: &Arc<R>,
) -> Ends {
    let end = Instant::now() + time;
    let mut attackers = JoinSet::new();
    for _ in 0..connections {
        let (server, next) = (Arc::clone(server), Arc::clone(next));
        let key = key.to_owned();
        attackers.spawn(async move {
            let mut ends = Ends::new();
            while Instant::now() < end {
                let request = next();
                let status = answered(&server, &key, &request).await.unwrap_or(0);
                *ends.entry((request.name, status)).or_default() += 1;
            }
            ends
        });
    }
    let mut all = Ends::new();
    while let Some(ends) = attackers.join_next().await {
        for (end, count) in ends.expect("the client does not panic") {
            *all.entry(end).or_default() += count;
        }
    }
    all
}

async fn answered(server: &Process, key: &str, request: &AttackRequest) -> io::Result<u16> {
    let mut connection = Connection::open(server.address).await?;
    connection.post(request.path, key, &request.body).await?;
    let status = connection.head().await?.status;
    connection.rest().await?;
    Ok(status)
}
