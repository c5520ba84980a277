//! Every knob: its name, default, unit and limits. Nothing else in the program reads flags or asks what the machine has; only the log
//! filter, `RUST_LOG`, comes from the environment.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};
use sterna_scheduler::INTER_TOKEN_TARGET;

use crate::cores;

/// The instruction sets that may be asked for.
const ISAS: [&str; 4] = ["scalar", "avx2", "avx512", "avx512vbmi"];

/// Of the memory this process may still use, the share that KV pages take unless `--kv-memory` says otherwise.
const KV_MEMORY_SHARE: f64 = 0.5;

/// What the command line says.
#[derive(Debug, Parser)]
#[command(
    name = "sterna",
    version,
    about,
    args_conflicts_with_subcommands = true
)]
pub struct Cli {
    /// What to do; `serve` when left out.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// The flags of `serve`, which may stand without its name.
    #[command(flatten)]
    pub serve: ServeConfig,
}

/// What the program can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over HTTP (the default).
    Serve(ServeConfig),
    /// Measure how fast a model runs on this machine, beside the least time that memory bandwidth and int8 peak allow.
    ///
    /// Checks first that the engine computes what it should, and measures nothing if it does not. Then come decode steps at 1 to 64
    /// streams and prompts of 128 to 2,048 tokens, through scheduler, model and sampler, without HTTP (the load test measures that).
    /// "roofline" is the least time that a step can take, max(bytes / bandwidth, operations / int8 peak), over the time that it took;
    /// "in turn" is the same with the least times of the step's parts added up: its products, attention, the output head. Both limits are
    /// sampled before and after each repetition. Keep the machine quiet meanwhile: a full run takes two to four minutes.
    Bench(BenchConfig),
    /// Write a checkpoint of a given shape with random ternary weights, for measuring speed and memory.
    Synthesize(SynthesizeConfig),
    /// Make a key for a tenant. The key is shown once, on standard error: keep it, for the server has its hash only. The lines for the
    /// tenants file go to standard output: sterna keygen ID >> tenants.toml
    Keygen(KeygenConfig),
}

/// The knobs of the server.
#[derive(Args, Clone, Debug)]
pub struct ServeConfig {
    /// Directory with a Hugging Face checkpoint (config.json, tokenizer.json, *.safetensors). Without it the embedded demo model is served.
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// The model's name in the API; by default the directory's name.
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one, which the start-up message names.
    #[arg(long, default_value_t = 30000)]
    pub port: u16,
    /// Compute threads; by default one for each physical core this process may use: as affinity and cgroup allow, hyperthreads
    /// not counted. On a machine with several memory nodes run one process for each (numactl --cpunodebind=N --membind=N).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Instruction set of the kernels; by default the best this machine has.
    #[arg(long, value_parser = ISAS)]
    pub isa: Option<String>,
    /// Memory for keys and values, e.g. 4GiB or 512MiB; by default half of what this process may still use (cgroup included),
    /// and no more than --max-running sequences of full length would fill.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub kv_memory: Option<u64>,
    /// Longest sequence (prompt and answer) in tokens; by default what the model was made for.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub max_model_len: Option<u32>,
    /// Sequences that run at the same time at most; --itl-target-ms usually allows fewer.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_running: u32,
    /// Requests that may wait; one more is answered 503 with Retry-After.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_queued: u32,
    /// Milliseconds between two tokens of an answer that everybody should be within: prompts get the time that this leaves, and no more
    /// answers run at once than it allows. On a machine too slow for it, twice what a single answer takes.
    #[arg(long, value_name = "MS", default_value_t = INTER_TOKEN_TARGET / 1000, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub itl_target_ms: u64,
    // The demo, prompts of 800 tokens from 8 clients, two cores: 64 / 128 / 256 / 512 / 1,024 / 2,048 give a first token after 172 / 156 / 82 /
    // 76 / 96 / 125 ms (p50, medians of four runs); requests a second are the same within a tenth.
    /// Tokens a step may compute at most, whatever time is left: it sets the memory that a step needs.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(16..=8192))]
    pub step_tokens: u32,
    /// Tokens that a step may guess for one answer from what its text said before, while few answers run; 0 guesses none. Guesses
    /// that the model confirms make repetitive answers faster; they never change one.
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(0..=32))]
    pub speculate: u32,
    /// Seconds of machine time that all waiting requests may come to; one more is answered 503 with Retry-After.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub max_queued_seconds: u64,
    /// Seconds from a request's arrival in which its first token must come, or it is ended (504); no limit by default. A tenant's own
    /// first_token_seconds wins.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub first_token_seconds: Option<u64>,
    /// Seconds from a request's arrival after which it is ended (504). A tenant's own total_seconds wins.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub request_seconds: u64,
    /// The tenants: a TOML file of ids, key hashes, shares and limits (README.md shows one). With it every route but /, /health and
    /// /ready needs a key. SIGHUP reads it again.
    #[arg(long, value_name = "FILE")]
    pub tenants: Option<PathBuf>,
    /// Let everybody who reaches a --host beyond this machine use the server without a key.
    #[arg(long)]
    pub insecure: bool,
    /// Let /metrics be read without a key.
    #[arg(long)]
    pub metrics_open: bool,
    /// Connections at the same time.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_connections: u32,
    /// Connections at the same time from one address; this machine's own addresses are not limited.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_connections_per_ip: u32,
    /// Seconds that running requests have to finish after SIGTERM or Ctrl-C.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    pub drain_seconds: u64,
    /// Write logs as JSON lines.
    #[arg(long)]
    pub log_json: bool,
}

/// The knobs of `bench`.
#[derive(Args, Clone, Debug)]
pub struct BenchConfig {
    /// Directory with a Hugging Face checkpoint. Without it the embedded demo model is measured: it is so small that its figures say
    /// little about real ones. `sterna synthesize DIR` makes a model of the size of BitNet b1.58 2B-4T.
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Compute threads; by default as for `serve`.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Instruction set of the kernels; by default the best this machine has.
    #[arg(long, value_parser = ISAS)]
    pub isa: Option<String>,
    /// Tokens before each stream that decodes; of several, each is measured. What does not fit the memory or the model is left out.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "256", value_parser = clap::value_parser!(u32).range(32..=1_048_576))]
    pub depths: Vec<u32>,
    /// Write the figures as JSON too, to a file or, as `-`, to standard output; the table then goes to standard error.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// A first look in half a minute: fewer streams, one prompt, fewer repetitions, and limits sampled on less memory.
    #[arg(long)]
    pub quick: bool,
}

/// The knobs of `synthesize`.
#[derive(Args, Clone, Debug)]
pub struct SynthesizeConfig {
    /// Which shape to write: 2b-4t, falcon3-1b or tiny.
    #[arg(long, default_value = "2b-4t")]
    pub shape: String,
    /// Seed of the random weights.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Directory to write; it is made, and must be empty or absent.
    pub directory: PathBuf,
}

/// The knobs of `keygen`.
#[derive(Args, Clone, Debug)]
pub struct KeygenConfig {
    /// The tenant's name: letters, digits, `.`, `_` and `-`.
    pub id: String,
}

impl ServeConfig {
    /// Compute threads: as asked, or one for each physical core that affinity and cgroup leave to this process.
    pub fn threads(&self) -> usize {
        threads(self.threads)
    }

    /// Whether each compute thread may have a core for itself.
    pub fn pin_threads(&self) -> bool {
        may_pin(self.threads())
    }

    /// KV pages to allocate, given the bytes of one page, its tokens, and the longest sequence in tokens.
    ///
    /// # Errors
    /// When not one page fits, or more is asked for than this process may use; the text names both.
    pub fn kv_pages(
        &self,
        page_bytes: usize,
        page_tokens: usize,
        max_model_len: u32,
    ) -> Result<u32, String> {
        let usable = usable_memory();
        let bytes = match self.kv_memory {
            Some(asked) if asked > usable => {
                return Err(format!(
                    "--kv-memory: {asked} bytes are asked for, and this process may use {usable} more"
                ));
            }
            Some(asked) => asked,
            None => {
                let sequence_pages = u64::from(max_model_len).div_ceil(page_tokens as u64);
                let full = sequence_pages * u64::from(self.max_running) * page_bytes as u64;
                ((usable as f64 * KV_MEMORY_SHARE) as u64).min(full)
            }
        };
        match u32::try_from(bytes / page_bytes as u64) {
            Ok(0) => Err(format!(
                "--kv-memory: {bytes} bytes hold no page, which takes {page_bytes}"
            )),
            Ok(pages) => Ok(pages),
            Err(_) => Err(format!(
                "--kv-memory: {bytes} bytes are more pages than can be numbered"
            )),
        }
    }
}

impl BenchConfig {
    /// Compute threads, as [`ServeConfig::threads`].
    pub fn threads(&self) -> usize {
        threads(self.threads)
    }

    /// Whether each compute thread may have a core for itself, as [`ServeConfig::pin_threads`].
    pub fn pin_threads(&self) -> bool {
        may_pin(self.threads())
    }
}

fn threads(asked: Option<u16>) -> usize {
    match asked {
        Some(threads) => usize::from(threads),
        None => cores::usable(),
    }
}

/// Only if threads are as many as the cores this process may run on. With fewer, another process may have chosen the same cores.
fn may_pin(threads: usize) -> bool {
    cores::physical().len() == threads
}

/// Bytes that this process may still take: the smaller of what the machine has available and what each enclosing cgroup leaves.
pub fn usable_memory() -> u64 {
    let machine = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| meminfo_available(&text));
    let cgroup = cgroup_memory_left();
    machine.into_iter().chain(cgroup).min().unwrap_or(2 << 30)
}

fn meminfo_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// The least that a memory limit leaves, over this process's cgroup (version 2, or version 1's memory controller) and its ancestors.
fn cgroup_memory_left() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    own.lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let path = path.trim_start_matches('/');
            match controllers {
                "" => Some((PathBuf::from("/sys/fs/cgroup").join(path), &CGROUP_2)),
                "memory" => Some((PathBuf::from("/sys/fs/cgroup/memory").join(path), &CGROUP_1)),
                _ => None,
            }
        })
        .flat_map(|(folder, names)| {
            let folders: Vec<PathBuf> = folder.ancestors().map(PathBuf::from).collect();
            folders
                .into_iter()
                .filter_map(|folder| memory_left(&folder, names))
        })
        .min()
}

/// The names of a cgroup version's files, and of the page cache in its statistics.
struct CgroupNames {
    limit: &'static str,
    used: &'static str,
    cache: [&'static str; 2],
}

const CGROUP_2: CgroupNames = CgroupNames {
    limit: "memory.max",
    used: "memory.current",
    cache: ["active_file", "inactive_file"],
};

const CGROUP_1: CgroupNames = CgroupNames {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: ["total_active_file", "total_inactive_file"],
};

/// `limit - used` of one cgroup, if it has a limit. Cached files count as used there, and give way when memory is needed: a
/// checkpoint that has just been read would otherwise look like memory that is gone.
fn memory_left(folder: &Path, names: &CgroupNames) -> Option<u64> {
    let read = |name| fs::read_to_string(folder.join(name)).ok();
    let number = |name| read(name)?.trim().parse::<u64>().ok();
    let limit = number(names.limit)?;
    let statistics = read("memory.stat").unwrap_or_default();
    let cached: u64 = statistics
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(name, _)| names.cache.contains(name))
        .filter_map(|(_, value)| value.parse::<u64>().ok())
        .sum();
    let used = number(names.used).unwrap_or(0).saturating_sub(cached);
    Some(limit.saturating_sub(used))
}

/// `4GiB`, `512 MiB`, `1.5G`, `2000000000`.
fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number
        .parse()
        .map_err(|_| format!("`{text}` does not begin with a number"))?;
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        other => {
            return Err(format!(
                "`{other}` is no unit of memory; use KiB, MiB, GiB or TiB"
            ));
        }
    };
    Ok((number * factor as f64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serve(flags: &[&str]) -> ServeConfig {
        Cli::try_parse_from(["sterna"].iter().chain(flags))
            .unwrap()
            .serve
    }

    #[test]
    fn sizes_are_read_with_their_units() {
        for (text, expected) in [
            ("4GiB", 4 << 30),
            ("512 MiB", 512 << 20),
            ("1.5g", 3 << 29),
            ("2gb", 2_000_000_000),
            ("77", 77),
        ] {
            assert_eq!(parse_size(text), Ok(expected), "{text}");
        }
        for text in ["", "GiB", "4 parsecs", "-1"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn serving_needs_no_flags_and_no_name() {
        assert_eq!(serve(&[]).port, 30000);
        assert_eq!(serve(&["--port", "0"]).port, 0);
        let named = Cli::try_parse_from(["sterna", "serve", "--threads", "2"]).unwrap();
        assert!(matches!(named.command, Some(Command::Serve(config)) if config.threads() == 2));
        assert!(Cli::try_parse_from(["sterna", "--threads", "0"]).is_err());
        assert!(Cli::try_parse_from(["sterna", "--isa", "neon"]).is_err());
        assert_eq!(serve(&["--speculate", "0"]).speculate, 0);
        assert!(Cli::try_parse_from(["sterna", "--speculate", "33"]).is_err());
    }

    #[test]
    fn a_bench_has_several_depths_of_some_length() {
        let bench = |flags: &[&str]| {
            let cli = Cli::try_parse_from(["sterna", "bench"].iter().chain(flags));
            cli.map(|cli| match cli.command {
                Some(Command::Bench(config)) => config,
                other => panic!("{other:?}"),
            })
        };
        assert_eq!(bench(&[]).unwrap().depths, [256]);
        let config = bench(&["--depths", "256,2048", "--threads", "3"]).unwrap();
        assert_eq!(
            (config.depths.as_slice(), config.threads()),
            (&[256, 2048][..], 3)
        );
        assert!(bench(&["--depths", "8"]).is_err());
        assert!(bench(&["--isa", "neon"]).is_err());
    }

    #[test]
    fn kv_memory_is_as_asked_or_bounded_by_what_can_run() {
        let asked = |size: &str| serve(&["--kv-memory", size]).kv_pages(1024, 16, 4096);
        assert_eq!(asked("1MiB"), Ok(1024));
        assert!(asked("1000TiB").is_err_and(|error| error.contains("may use")));
        assert!(asked("1000").is_err_and(|error| error.contains("1000 bytes hold no page")));
        let two = serve(&["--max-running", "2"]).kv_pages(1024, 16, 64);
        assert!(two.is_ok_and(|pages| pages <= 8));
    }

    #[test]
    fn files_in_the_page_cache_are_not_memory_that_is_gone() {
        let folder = std::env::temp_dir().join(format!("sterna-cgroup-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let write = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
        write("memory.max", "max\n");
        assert_eq!(memory_left(&folder, &CGROUP_2), None);
        write("memory.max", "1000\n");
        write("memory.current", "900\n");
        write(
            "memory.stat",
            "anon 200\nactive_file 300\ninactive_file 400\n",
        );
        assert_eq!(memory_left(&folder, &CGROUP_2), Some(800));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_machine_tells_its_memory() {
        assert_eq!(
            meminfo_available("MemTotal: 9 kB\nMemAvailable:  7 kB\n"),
            Some(7 * 1024)
        );
        assert!(usable_memory() > 0);
    }
}
