//! The server program under attack: its start, its memory, files and threads, and its end.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::client::{Connection, get};

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
/// The unit of the times in `/proc`: Linux reports them to programs in hundredths of a second.
const TICKS_PER_SECOND: f64 = 100.0;

/// Sets the path of the server program, once.
pub(crate) fn set_program(path: &str) {
    PROGRAM.get_or_init(|| path.into());
}

/// Returns the path of the server program.
pub(crate) fn program() -> &'static Path {
    PROGRAM.get().expect("the program is set")
}

/// A server process on a free loopback port. Dropping it kills the process.
pub(crate) struct Process {
    /// `None` if another process started the server.
    child: Option<Child>,
    pub(crate) address: SocketAddr,
}

/// What a process holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    /// Resident memory, in KiB.
    pub(crate) resident: u64,
    /// The largest resident memory since the start, in KiB.
    pub(crate) peak: u64,
    pub(crate) threads: u64,
    pub(crate) files: usize,
}

/// The processor time that server and client have used, in seconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessorTime {
    /// The threads that compute steps.
    steps: f64,
    /// All other threads of the server.
    rest: f64,
    client: f64,
    at: Instant,
}

impl ProcessorTime {
    /// Describes what was used since `before`, as shares of the machine.
    pub(crate) fn since(&self, before: &ProcessorTime) -> String {
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        let all = (self.at - before.at).as_secs_f64() * cores;
        let share = |now: f64, then: f64| 100.0 * (now - then) / all;
        format!(
            "of {cores} cores: steps {:.1} %, other threads of the server {:.1} %, client {:.1} %",
            share(self.steps, before.steps),
            share(self.rest, before.rest),
            share(self.client, before.client)
        )
    }
}

/// Returns the name of a process or thread and its processor time in seconds.
fn processor_time(folder: &Path) -> Option<(String, f64)> {
    let stat = fs::read_to_string(folder.join("stat")).ok()?;
    let (name, fields) = stat.split_once('(')?.1.rsplit_once(") ")?;
    let ticks = fields.split(' ').skip(11).take(2); // `utime` and `stime`.
    let ticks: f64 = ticks.filter_map(|field| field.parse::<f64>().ok()).sum();
    Some((name.to_owned(), ticks / TICKS_PER_SECOND))
}

/// Returns the processes that `parent` has started.
fn children(parent: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_child = |id: &u32| {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        let after_name = stat.rsplit_once(") ").map_or("", |(_, after)| after);
        after_name.split(' ').nth(1) == Some(&parent.to_string())
    };
    ids.filter(is_child).collect()
}

impl Process {
    /// Starts the server with `flags` and waits until it is ready.
    pub(crate) async fn start(flags: &[&str]) -> Process {
        Process::start_by(Command::new(program()), flags).await
    }

    /// Starts `command` with the server's `flags` and waits until the server is ready.
    pub(crate) async fn start_by(mut command: Command, flags: &[&str]) -> Process {
        let mut child = command
            .args(["--port", "0"])
            .args(flags)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the server starts");
        let output = child.stdout.take().expect("its output is a pipe");
        let address = BufReader::new(output)
            .lines()
            .map_while(Result::ok)
            .find_map(|line| {
                let rest = &line[line.find("http://")? + "http://".len()..];
                rest.split_whitespace().next()?.parse().ok()
            })
            .expect("the server names its address");
        let process = Process {
            child: Some(child),
            address,
        };
        while process.get("/ready").await.0 != 200 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        process
    }

    /// Returns a server that another process started and ends.
    pub(crate) fn of_another(address: SocketAddr) -> Process {
        let child = None;
        Process { child, address }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.as_ref().expect("we started the server").id()
    }

    /// Returns status and body of `path`. The status is 0 if no answer comes.
    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        match Connection::open(self.address).await {
            Ok(mut connection) => get(&mut connection, path).await.unwrap_or_default(),
            Err(_) => (0, String::new()),
        }
    }

    /// Returns the sum of all series of a metric.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.get("/metrics").await;
        text.lines()
            .filter(|line| {
                let rest = line.strip_prefix(name);
                rest.is_some_and(|rest| rest.starts_with([' ', '{']))
            })
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    /// Waits until no request is running or waiting.
    pub(crate) async fn idle(&self) {
        let patience = Instant::now() + Duration::from_secs(120);
        loop {
            let running = self.metric("vllm:num_requests_running").await;
            let waiting = self.metric("vllm:num_requests_waiting").await;
            if running + waiting == 0.0 {
                return;
            }
            assert!(Instant::now() < patience, "the server does not become idle");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until the server has closed the connections that clients left, and returns what it
    /// holds then.
    pub(crate) async fn settled(&self, files: usize) -> Held {
        let patience = Instant::now() + Duration::from_secs(10);
        while self.held().files > files && Instant::now() < patience {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.held()
    }

    pub(crate) fn held(&self) -> Held {
        let folder = format!("/proc/{}", self.id());
        let status = fs::read_to_string(format!("{folder}/status")).unwrap_or_default();
        let field = |name: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next());
            number.and_then(|number| number.parse().ok()).unwrap_or(0)
        };
        Held {
            resident: field("VmRSS:"),
            peak: field("VmHWM:"),
            threads: field("Threads:"),
            files: fs::read_dir(format!("{folder}/fd")).map_or(0, Iterator::count),
        }
    }

    /// Returns the processor time that this server and this program have used.
    pub(crate) fn processor_time(&self) -> ProcessorTime {
        let client = processor_time(Path::new("/proc/self"));
        let mut time = ProcessorTime {
            steps: 0.0,
            rest: 0.0,
            client: client.map_or(0.0, |(_, seconds)| seconds),
            at: Instant::now(),
        };
        let threads = fs::read_dir(format!("/proc/{}/task", self.id()));
        for thread in threads.into_iter().flatten().flatten() {
            let Some((name, seconds)) = processor_time(&thread.path()) else {
                continue;
            };
            match name.starts_with("sterna-engine") || name.starts_with("sterna-worker") {
                true => time.steps += seconds,
                false => time.rest += seconds,
            }
        }
        time
    }

    /// Returns the memory that each worker of a grammar shares with no other process, in KiB, and
    /// the worker's processor time in seconds. The server's children start the workers.
    pub(crate) fn workers(&self) -> Vec<(u64, f64)> {
        let folders = children(self.id()).into_iter().flat_map(children);
        let folders = folders.map(|id| PathBuf::from(format!("/proc/{id}")));
        folders
            .filter_map(|folder| {
                let (_, time) = processor_time(&folder)?; // It may have ended.
                let maps = fs::read_to_string(folder.join("smaps_rollup")).ok()?;
                let own = maps.lines().filter(|line| line.starts_with("Private_"));
                let own =
                    own.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
                Some((own.sum(), time))
            })
            .collect()
    }

    pub(crate) fn signal(&self, signal: &str) {
        let process = self.id().to_string();
        let sent = Command::new("kill").args([signal, &process]).status();
        assert!(sent.is_ok_and(|status| status.success()), "kill {signal}");
    }

    /// Waits until the process has ended.
    pub(crate) fn wait(mut self) -> ExitStatus {
        let child = self.child.as_mut().expect("we started the server");
        child.wait().expect("the process is our child")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // Both fail if the process has ended.
            drop(child.kill());
            drop(child.wait());
        }
    }
}
