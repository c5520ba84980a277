//! Attacks the server program over HTTP and checks what it promises.
//!
//! `cargo bench --bench attack` runs every attack for as long as `tests/README.md` says.
//! `-- soak sigterm` runs only these two. `-- --short` runs each for seconds; it prints times but
//! does not judge them, because a machine that tests run on may be busy.
//! `-- --server=PATH` attacks another build of the server. `-- --model=DIR` lets `overload`,
//! `neighbour`, `text` and `grammars` serve this checkpoint instead of the demo. The program exits
//! with 1 if a check fails.
//!
//! Without `--bench` (so in `cargo test --benches`) it does nothing: a debug server is too slow for
//! figures.

mod client;
mod ending;
mod grammars;
mod memory;
mod outcome;
mod overload;
mod process;
mod quiet_tenant;
mod soak;
mod syscalls;
mod text;

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use outcome::Tally;

/// The attacks, in the order in which they run.
const KNOWN: [&str; 9] = [
    "soak",
    "sigterm",
    "sigkill",
    "overload",
    "neighbour",
    "text",
    "grammars",
    "memory",
    "syscalls",
];

/// How much an attack does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extent {
    Short,
    Long,
}

impl Extent {
    /// Returns `short` or `long`.
    fn pick<T>(self, short: T, long: T) -> T {
        match self {
            Extent::Short => short,
            Extent::Long => long,
        }
    }
}

/// The findings of one attack.
struct Findings {
    failures: u64,
    extent: Extent,
}

impl Findings {
    /// Prints a figure and whether it holds.
    fn check(&mut self, figure: &str, holds: bool) {
        let word = if holds { "ok    " } else { "MISSED" };
        println!("  {word} {figure}");
        self.failures += u64::from(!holds);
    }

    /// Prints a time and whether it holds. Only a long attack fails if it does not.
    fn check_time(&mut self, figure: &str, holds: bool) {
        match self.extent {
            Extent::Short if !holds => println!("  slow   {figure}"),
            _ => self.check(figure, holds),
        }
    }

    /// Checks that no request ended in a way that the promise excludes.
    fn check_ends(&mut self, tally: &Tally) {
        let broken = tally.broken();
        let figure = format!(
            "{broken} of {} requests without a proper end",
            tally.total()
        );
        self.check(&figure, broken == 0);
    }
}

/// Ends this program if an attack takes too long, because the server or a tool hangs. Dropping it
/// lifts the limit.
struct TimeLimit {
    _lifted: mpsc::Sender<()>,
}

impl TimeLimit {
    fn start(name: &str, extent: Extent) -> TimeLimit {
        let limit = Duration::from_secs(extent.pick(5, 60) * 60);
        let (lifted, waits) = mpsc::channel::<()>();
        let name = name.to_owned();
        thread::spawn(move || {
            if waits.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                println!("  MISSED {name} ends within {} s", limit.as_secs());
                std::process::exit(1);
            }
        });
        TimeLimit { _lifted: lifted }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |name: &str| arguments.iter().any(|argument| argument == name);
    if !given("--bench") {
        return;
    }
    let server = arguments
        .iter()
        .find_map(|argument| argument.strip_prefix("--server="));
    process::set_program(server.unwrap_or(env!("CARGO_BIN_EXE_sterna")));
    let extent = if given("--short") {
        Extent::Short
    } else {
        Extent::Long
    };
    let words = arguments
        .iter()
        .filter(|argument| !argument.starts_with("--"));
    let words: Vec<&str> = words.map(String::as_str).collect();
    if let Some(word) = words.iter().find(|word| !KNOWN.contains(word)) {
        eprintln!("'{word}' is not an attack; there are: {}", KNOWN.join(", "));
        std::process::exit(2);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let runtime = runtime.expect("the runtime starts");
    let model = arguments
        .iter()
        .find_map(|argument| argument.strip_prefix("--model="));
    let mut failures = 0;
    for name in KNOWN
        .into_iter()
        .filter(|name| words.is_empty() || words.contains(name))
    {
        println!("{name}");
        let start = Instant::now();
        let _limit = TimeLimit::start(name, extent);
        let mut findings = Findings {
            failures: 0,
            extent,
        };
        runtime.block_on(async {
            match name {
                "soak" => soak::run(extent, &mut findings).await,
                "sigterm" => ending::terminate(extent, &mut findings).await,
                "sigkill" => ending::kill(extent, &mut findings).await,
                "overload" => overload::overload(extent, model, &mut findings).await,
                "neighbour" => overload::neighbour(extent, model, &mut findings).await,
                "text" => text::run(extent, model, &mut findings).await,
                "grammars" => grammars::run(extent, model, &mut findings).await,
                "syscalls" => syscalls::run(extent, &mut findings).await,
                _ => memory::run(extent, &mut findings).await,
            }
        });
        println!("  {:.0} s", start.elapsed().as_secs_f64());
        failures += findings.failures;
    }
    if failures > 0 {
        println!("{failures} checks failed");
        std::process::exit(1);
    }
}
