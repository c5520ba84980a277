//! System calls that fail while the server starts and while it serves. `strace` injects the faults.
//!
//! A server that starts must exit with a message, or serve correctly. A server that runs may lose
//! the requests that meet the fault, and must serve correctly when the faults end.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::client::Connection;
use crate::ending::answer;
use crate::outcome::{Outcome, serve};
use crate::process::{Process, program};
use crate::{Extent, Findings};

/// The faults of a running server: system call, error, and which calls fail. `futex` is not among
/// them: a call that wakes a thread never fails on Linux, and `strace` cannot tell it from a wait.
const RUNNING: [(&str, &str, &str); 13] = [
    ("accept4", "EMFILE", "1..20"),
    ("accept4", "ECONNABORTED", "2+2"),
    ("accept4", "ENOBUFS", "1+3"),
    ("recvfrom", "ECONNRESET", "3+5"),
    ("recvfrom", "ENOMEM", "2+7"),
    ("sendto,writev", "EPIPE", "2+5"),
    ("sendto,writev", "ENOBUFS", "3+4"),
    ("epoll_ctl", "ENOMEM", "2+3"),
    ("epoll_wait", "EINTR", "1+2"),
    ("setsockopt", "EINVAL", "1+2"),
    ("shutdown", "ENOTCONN", "1+2"),
    ("madvise", "ENOMEM", "1+2"),
    ("mprotect", "ENOMEM", "3"),
];

/// The faults of a starting server: system call and error. The first call fails, or the second, and
/// so on.
const STARTING: [(&str, &str); 9] = [
    ("mmap", "ENOMEM"), // Its first call is the loader's.
    ("openat", "EMFILE"),
    ("openat", "EACCES"),
    ("read", "EIO"),
    ("clone3", "EAGAIN"),
    ("bind", "EADDRINUSE"),
    ("listen", "EADDRINUSE"),
    ("epoll_create1", "EMFILE"),
    ("sched_setaffinity", "EPERM"),
];

/// How long to wait for an answer, and for `strace`.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) async fn run(extent: Extent, findings: &mut Findings) {
    let server = Process::start(&["--kv-memory", "16MiB"]).await;
    let expected = answer(&server).await;
    drop(server);
    starting(extent, &expected, findings).await;
    running(extent, &expected, findings).await;
}

async fn running(extent: Extent, expected: &str, findings: &mut Findings) {
    let time = Duration::from_secs(extent.pick(1, 5));
    let server = Arc::new(Process::start(&["--kv-memory", "16MiB"]).await);
    let before = server.held();
    for (call, error, when) in RUNNING {
        let mut strace = Command::new("strace");
        strace.args([
            "-f",
            "-qq",
            "-o",
            "/dev/null",
            "-p",
            &server.id().to_string(),
        ]);
        strace.args(["-e", &format!("inject={call}:error={error}:when={when}")]);
        let strace = strace.stderr(Stdio::null()).spawn();
        let mut strace = strace.expect("strace is installed");
        let (lost, complete) = clients(&server, time).await;
        detach(&mut strace).await;
        let lives = server.held().resident > 0;
        let text = tokio::time::timeout(PATIENCE, async {
            match lives {
                true => answer(&server).await,
                false => String::new(),
            }
        });
        let is_correct = text.await.is_ok_and(|text| text == expected);
        let figure = format!("{call} {error}: {complete} answers, {lost} lost; then correct");
        findings.check(&figure, is_correct);
        if !is_correct {
            return;
        }
    }
    server.idle().await;
    let after = server.settled(before.files).await;
    let figure = format!("files {} -> {}", before.files, after.files);
    findings.check(&figure, after.files <= before.files);
}

/// Ends `strace`, and with it the faults. It may hang while it detaches; then the kernel does that.
async fn detach(strace: &mut Child) {
    let interrupt = Command::new("kill")
        .args(["-INT", &strace.id().to_string()])
        .status();
    assert!(
        interrupt.is_ok_and(|status| status.success()),
        "strace lives"
    );
    let patience = Instant::now() + PATIENCE;
    while strace.try_wait().expect("strace is our child").is_none() {
        if Instant::now() > patience {
            println!("         strace hangs; it is killed");
            strace.kill().expect("strace is our child");
        }
        sleep(Duration::from_millis(5)).await;
    }
}

/// Runs 8 clients for `time`. Returns the numbers of lost requests and of complete answers.
async fn clients(server: &Arc<Process>, time: Duration) -> (u64, u64) {
    let end = Instant::now() + time;
    let mut clients = JoinSet::new();
    for _ in 0..8 {
        let server = Arc::clone(server);
        clients.spawn(async move {
            let body = "{\"messages\": [{\"role\": \"user\", \"content\": \"Hello there!\"}], \
                        \"max_tokens\": 8, \"stream\": true}";
            let (mut lost, mut complete) = (0, 0);
            while Instant::now() < end {
                let request = async {
                    let mut connection = Connection::open(server.address).await.ok()?;
                    let path = "/v1/chat/completions";
                    let served = serve(&mut connection, (path, "", body), None).await;
                    (served.outcome == Outcome::Complete).then_some(())
                };
                let patience = end + Duration::from_secs(1);
                match tokio::time::timeout_at(patience.into(), request).await {
                    Ok(Some(())) => complete += 1,
                    _ => lost += 1,
                }
            }
            (lost, complete)
        });
    }
    let mut all = (0, 0);
    while let Some(client) = clients.join_next().await {
        let (lost, complete) = client.expect("the client does not panic");
        all = (all.0 + lost, all.1 + complete);
    }
    all
}

/// How a start with a fault went.
#[derive(Debug, PartialEq)]
enum Start {
    Served(String),
    Refused,
    /// The process ended without a message, or hangs.
    Lost,
}

async fn starting(extent: Extent, expected: &str, findings: &mut Findings) {
    for (call, error) in STARTING {
        let (mut served, mut refused, mut others) = (0, 0, Vec::new());
        for number in 0..extent.pick(4, 60) {
            // A short attack takes some of the calls of a long attack, spread over all. Few threads
            // start.
            let distance = if call == "clone3" { 1 } else { 13 };
            let first = 1 + usize::from(call == "mmap");
            let number = first + number * extent.pick(distance, 1);
            match start(call, error, number).await {
                Start::Served(text) if text == expected => served += 1,
                Start::Refused => refused += 1,
                other => others.push((number, other)),
            }
        }
        let figure = format!(
            "start with {call} {error}: {served} serve, {refused} exit with a message; \
             others: {others:?}"
        );
        findings.check(&figure, others.is_empty());
    }
}

/// Starts a server whose call number `number` to `call` fails.
async fn start(call: &str, error: &str, number: usize) -> Start {
    let [output, errors] = ["out", "err"].map(|name| {
        let name = format!("sterna-attack-{}-{name}", std::process::id());
        std::env::temp_dir().join(name)
    });
    let create = |path: &PathBuf| File::create(path).expect("the temporary file is made");
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-o", "/dev/null"]);
    command.args(["-e", &format!("inject={call}:error={error}:when={number}")]);
    command
        .arg(program())
        .args(["--port", "0", "--kv-memory", "16MiB"]);
    let child = command
        .stdout(create(&output))
        .stderr(create(&errors))
        .spawn();
    let mut child = child.expect("strace is installed");
    let patience = Instant::now() + Duration::from_secs(60);
    let start = loop {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        if let Ok(Some(status)) = child.try_wait() {
            let has_message = !read(&errors).trim().is_empty();
            break match has_message && !status.success() {
                true => Start::Refused,
                false => Start::Lost,
            };
        }
        if let Some(text) = first_answer(&read(&output)).await {
            break Start::Served(text);
        }
        if Instant::now() > patience {
            break Start::Lost;
        }
        sleep(Duration::from_millis(20)).await;
    };
    end(&mut child);
    for path in [output, errors] {
        drop(fs::remove_file(path));
    }
    start
}

/// Returns the server's first answer, or `None` if it is not ready.
async fn first_answer(output: &str) -> Option<String> {
    let rest = &output[output.find("http://")? + "http://".len()..];
    let address = rest.split_whitespace().next()?.parse().ok()?;
    let server = Process::of_another(address);
    if server.get("/ready").await.0 != 200 {
        return None;
    }
    Some(answer(&server).await)
}

/// Ends `strace` and the server that it started.
fn end(strace: &mut Child) {
    let id = strace.id().to_string();
    drop(Command::new("pkill").args(["-KILL", "-P", &id]).status());
    drop(strace.kill());
    drop(strace.wait());
}
