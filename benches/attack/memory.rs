//! Memory: the process under overload and large bad bodies, beside the budget that it states.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::task::JoinSet;

use crate::client::Connection;
use crate::outcome::{Outcome, Tally, serve};
use crate::process::{Process, program};
use crate::{Extent, Findings};

/// The memory that requests may hold at most, in KiB: see `src/api/README.md`.
const REQUEST_MEMORY: u64 = 160 << 10;
/// The memory limit of the cgroup, beside the budget.
const LIMIT: f64 = 1.1;

/// Runs the attack in a memory cgroup where the machine allows one.
pub(crate) async fn run(extent: Extent, findings: &mut Findings) {
    let time = Duration::from_secs(extent.pick(10, 600));
    let base = Process::start(&["--kv-memory", "64MiB"]).await.held();
    let budget = base.peak + REQUEST_MEMORY;
    let limit = (budget as f64 * LIMIT) as u64;
    let group = MemoryGroup::new(limit << 10);
    let server = match &group {
        Some(group) => Process::start_by(group.command(), &["--kv-memory", "64MiB"]).await,
        None => Process::start(&["--kv-memory", "64MiB"]).await,
    };
    let server = Arc::new(server);
    let ended = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for client in 0..48 {
        let (server, ended) = (Arc::clone(&server), Arc::clone(&ended));
        clients.spawn(async move { attack(&server, client, &ended).await });
    }
    let start = Instant::now();
    while start.elapsed() < time && server.held().resident > 0 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    ended.store(true, Ordering::Relaxed);
    let mut tally = Tally::default();
    while let Some(client) = clients.join_next().await {
        tally.merge(client.expect("the client does not panic"));
    }
    let held = server.held();
    findings.check_ends(&tally);
    findings.check("the process lives", held.resident > 0);
    let figure = format!(
        "ready {} MiB, peak {} MiB, budget {} MiB; {}",
        base.peak >> 10,
        held.peak >> 10,
        budget >> 10,
        match group {
            Some(_) => format!("memory cgroup of {} MiB", limit >> 10),
            None => "no cgroup: the peak is compared with the limit".into(),
        }
    );
    findings.check(&figure, held.peak <= limit);
    server.idle().await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let after = server.held().resident;
    let figure = format!("{} MiB after the attack (at most ready + 32)", after >> 10);
    findings.check(&figure, after <= base.peak + (32 << 10));
}

/// Sends large bad bodies, long prompts, many choices and ordinary chats in turn.
async fn attack(server: &Process, client: usize, ended: &AtomicBool) -> Tally {
    let mut tally = Tally::default();
    let path = "/v1/chat/completions";
    let bodies = [
        format!("[{}]", vec!["{\"a\":1}"; 250_000].join(",")),
        format!(
            "{{\"messages\":[{}]}}",
            vec!["{\"a\":{\"b\":[1,2]}}"; 100_000].join(",")
        ),
        json!({"messages": [{"role": "user", "content": "word ".repeat(400_000)}]}).to_string(),
        json!({
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": 200, "n": 8, "stream": true, "logprobs": true, "top_logprobs": 20,
        })
        .to_string(),
        json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}).to_string(),
    ];
    for number in client.. {
        if ended.load(Ordering::Relaxed) {
            break;
        }
        let Ok(mut connection) = Connection::open(server.address).await else {
            tally.count(Outcome::Unreachable);
            continue;
        };
        let body = &bodies[number % bodies.len()];
        tally.count(serve(&mut connection, (path, "", body), None).await.outcome);
    }
    tally
}

/// A memory cgroup of its own, of version 1 or 2.
struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// Makes a group of at most `bytes`, if this process may.
    fn new(bytes: u64) -> Option<MemoryGroup> {
        let name = format!("sterna-attack-{}", std::process::id());
        let roots = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max"),
        ];
        roots.into_iter().find_map(|(root, file)| {
            let folder = PathBuf::from(root).join(&name);
            fs::create_dir(&folder).ok()?;
            let group = MemoryGroup(folder);
            fs::write(group.0.join(file), bytes.to_string()).ok()?;
            Some(group)
        })
    }

    /// Returns a command that enters the group and becomes the server.
    fn command(&self) -> Command {
        let mut command = Command::new("sh");
        let enter = "echo $$ > \"$0/cgroup.procs\"; exec \"$@\"";
        command.args(["-c", enter]).arg(&self.0).arg(program());
        command
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // An empty folder stays if the group still has a process.
        drop(fs::remove_dir(&self.0));
    }
}
