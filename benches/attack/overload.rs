//! Overload, and a neighbour that floods.

use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::task::JoinSet;

use crate::client::Connection;
use crate::outcome::{Outcome, Served, Tally, serve};
use crate::process::{Process, program};
use crate::{Extent, Findings};

const PATH: &str = "/v1/chat/completions";
const MIN_GOODPUT: f64 = 0.9;
const MAX_FIRST_TOKEN: f64 = 2.0;
const MAX_REFUSAL: Duration = Duration::from_millis(20);
const MAX_NEIGHBOUR: f64 = 1.5;

/// The inter-token target in the attack of a neighbour, as a multiple of the median longest gap
/// of an answer before.
const TARGET_FACTOR: f64 = 1.5;

/// Clients that fill the batch and the queue without a refusal.
const FULL: usize = 16;

/// What some clients saw in a time.
#[derive(Default)]
struct Load {
    tally: Tally,
    tokens: u64,
    first: Vec<Duration>,
    gaps: Vec<Duration>,
    refusals: Vec<Duration>,
    late: Vec<Duration>, // How much later than planned requests were sent.
}

impl Load {
    fn add(&mut self, served: Served) {
        match served.outcome {
            Outcome::Complete => {
                self.tokens += served.tokens;
                self.first.push(served.first);
                self.gaps.push(served.longest_gap);
            }
            Outcome::Refused => self.refusals.push(served.first),
            _ => {}
        }
        self.tally.count(served.outcome);
    }

    fn merge(&mut self, other: Load) {
        self.tally.merge(other.tally);
        self.tokens += other.tokens;
        self.first.extend(other.first);
        self.gaps.extend(other.gaps);
        self.refusals.extend(other.refusals);
        self.late.extend(other.late);
    }
}

pub(crate) fn percentile(times: &mut [Duration], percent: usize) -> f64 {
    times.sort_unstable();
    let at = (times.len() * percent / 100).min(times.len().saturating_sub(1));
    times
        .get(at)
        .map_or(0.0, |time| 1000.0 * time.as_secs_f64())
}

/// Offers ten times the load that the server can bear, in requests. `model` is the folder of a
/// checkpoint; without it, the server serves the demo.
pub(crate) async fn overload(extent: Extent, model: Option<&str>, findings: &mut Findings) {
    let (calm, flood) = extent.pick((5, 10), (30, 300));
    let server = start(model, &["--max-running", "8", "--max-queued", "8"]).await;
    drop(clients(&server, FULL, "", Duration::from_secs(2)).await);
    let calm = Duration::from_secs(calm);
    let (before, start) = (server.processor_time(), Instant::now());
    let mut full = clients(&server, FULL, "", calm).await;
    let of_full = server.processor_time().since(&before);
    let calm = start.elapsed().as_secs_f64(); // The last requests end later than planned.
    let goodput = full.tokens as f64 / calm;
    let rate = 10.0 * full.first.len() as f64 / calm;
    let flood = Duration::from_secs(flood);
    let (before, start) = (server.processor_time(), Instant::now());
    let mut over = open_loop(&server, rate, flood).await;
    let of_flood = server.processor_time().since(&before);
    let share = over.tokens as f64 / start.elapsed().as_secs_f64() / goodput;
    println!("  full: {goodput:.0} tok/s; {of_full}");
    println!("  then {rate:.0} requests/s; {of_flood}");
    println!(
        "  the client is late by {:.1} ms (p99)",
        percentile(&mut over.late, 99)
    );
    findings.check_ends(&over.tally);
    findings.check_time(
        &format!("goodput {share:.2} of full (at least 0.9)"),
        share >= MIN_GOODPUT,
    );
    let [calm, late] = [&mut full, &mut over].map(|load| percentile(&mut load.first, 99));
    let figure = format!("p99 to first token {calm:.0} -> {late:.0} ms (at most 2 times)");
    findings.check_time(&figure, late <= MAX_FIRST_TOKEN * calm);
    let refusal = percentile(&mut over.refusals, 99);
    let figure = format!(
        "{} refusals, p99 {refusal:.1} ms (at most 20)",
        over.refusals.len()
    );
    findings.check_time(&figure, refusal <= 1000.0 * MAX_REFUSAL.as_secs_f64());
}

/// Floods as one tenant, and measures what another tenant sees. The other tenant's baseline is a
/// neighbour who uses no more than its share. The two take turns, so that what else happens on the
/// machine lengthens both alike.
///
/// A larger batch gives more tokens per second and a longer step, and `--itl-target-ms` says how
/// long it may be. So the server of this attack has a target: 1.5 times the usual longest gap of
/// an answer beside the calm neighbour.
pub(crate) async fn neighbour(extent: Extent, model: Option<&str>, findings: &mut Findings) {
    let (calm, rounds) = extent.pick((3, 1), (10, 12));
    let (calm, time) = (Duration::from_secs(calm), Duration::from_secs(6));
    let path = std::env::temp_dir().join(format!("sterna-attack-{}.toml", std::process::id()));
    let path = path.to_str().expect("the path is UTF-8");
    let (quiet, flood) = (keygen("quiet"), keygen("flood"));
    fs::write(path, quiet.1 + &flood.1).expect("the tenants file is written");
    let server = start(model, &["--tenants", path]).await;
    let (mut alone, _) = tokio::join!(
        clients(&server, 2, &quiet.0, calm),
        clients(&server, 2, &flood.0, calm)
    );
    drop(server);
    let longest = percentile(&mut alone.gaps, 50);
    let target = (TARGET_FACTOR * longest).ceil().to_string();
    println!("  longest gap beside a calm neighbour {longest:.1} ms; target {target} ms");
    let flags = [
        "--tenants",
        path,
        "--itl-target-ms",
        &target,
        "--itl-strict",
    ];
    let server = start(model, &flags).await;
    drop(fs::remove_file(path));
    let mut seen = [Load::default(), Load::default()];
    let mut flooded = Tally::default();
    for _ in 0..rounds {
        for (load, others) in seen.iter_mut().zip([2, 64]) {
            let (quiet, flood) = tokio::join!(
                clients(&server, 2, &quiet.0, time),
                clients(&server, others, &flood.0, time)
            );
            load.merge(quiet);
            flooded.merge(flood.tally);
        }
    }
    findings.check_ends(&flooded);
    let answers = seen.each_ref().map(|load| load.first.len());
    println!("  {answers:?} answers for the quiet tenant, in {rounds} rounds");
    let refused: u64 = seen
        .iter()
        .map(|load| load.tally.of(&Outcome::Refused))
        .sum();
    findings.check(
        &format!("{refused} requests of the quiet tenant refused"),
        refused == 0,
    );
    let first = seen.each_mut().map(|load| percentile(&mut load.first, 99));
    let gaps = seen.each_mut().map(|load| percentile(&mut load.gaps, 99));
    for (name, [calm, flooded]) in [("to first token", first), ("longest gap", gaps)] {
        let figure = format!("p99 {name} {calm:.1} -> {flooded:.1} ms (at most 1.5 times)");
        findings.check_time(&figure, flooded <= MAX_NEIGHBOUR * calm);
    }
}

pub(crate) async fn start(model: Option<&str>, flags: &[&str]) -> Arc<Process> {
    let model = model.into_iter().flat_map(|folder| ["--model", folder]);
    let flags: Vec<&str> = model.chain(flags.iter().copied()).collect();
    Arc::new(Process::start(&flags).await)
}

/// Makes a tenant. Returns its key and its table for the tenants file.
pub(crate) fn keygen(tenant: &str) -> (String, String) {
    let made = Command::new(program()).args(["keygen", tenant]).output();
    let made = made.expect("keygen runs");
    let shown = String::from_utf8_lossy(&made.stderr).into_owned();
    let key = shown
        .split_whitespace()
        .find(|word| word.starts_with("sk-"));
    let key = key.expect("keygen shows the key").to_owned();
    (key, String::from_utf8_lossy(&made.stdout).into_owned())
}

fn body(number: usize) -> String {
    let body = json!({
        "messages": [{"role": "user", "content": format!("What is {number} plus three?")}],
        "max_tokens": 24, "ignore_eos": true, "stream": true,
        "stream_options": {"include_usage": true},
    });
    body.to_string()
}

/// Runs `count` clients for `time`. Each sends its next request when its last one has ended.
async fn clients(server: &Arc<Process>, count: usize, key: &str, time: Duration) -> Load {
    let end = Instant::now() + time;
    let mut clients = JoinSet::new();
    for client in 0..count {
        let (server, key) = (Arc::clone(server), key.to_owned());
        clients.spawn(async move {
            let mut load = Load::default();
            let mut connection = None;
            while Instant::now() < end {
                let body = body(client + 1000 * load.tally.total() as usize);
                let served = request(&server, &mut connection, &key, &body).await;
                let refused = served.outcome == Outcome::Refused;
                load.add(served);
                if refused {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
            load
        });
    }
    joined(clients).await
}

/// Starts `rate` requests per second for `time`, whether or not earlier ones have ended.
async fn open_loop(server: &Arc<Process>, rate: f64, time: Duration) -> Load {
    let start = Instant::now();
    let mut requests = JoinSet::new();
    let mut load = Load::default();
    for number in 0..(rate * time.as_secs_f64()) as usize {
        let due = start + Duration::from_secs_f64(number as f64 / rate);
        tokio::time::sleep_until(due.into()).await;
        let server = Arc::clone(server);
        requests.spawn(async move {
            let mut load = Load::default();
            load.late.push(due.elapsed());
            load.add(request(&server, &mut None, "", &body(number)).await);
            load
        });
        while let Some(ended) = requests.try_join_next() {
            load.merge(ended.expect("the client does not panic"));
        }
    }
    load.merge(joined(requests).await);
    load
}

async fn joined(mut clients: JoinSet<Load>) -> Load {
    let mut all = Load::default();
    while let Some(load) = clients.join_next().await {
        all.merge(load.expect("the client does not panic"));
    }
    all
}

async fn request(
    server: &Process,
    connection: &mut Option<Connection>,
    key: &str,
    body: &str,
) -> Served {
    let open = match connection.take() {
        Some(open) => Ok(open),
        None => Connection::open(server.address).await,
    };
    let Ok(mut open) = open else {
        return Served::unreachable();
    };
    let served = serve(&mut open, (PATH, key, body), None).await;
    if !served.closes {
        *connection = Some(open);
    }
    served
}
