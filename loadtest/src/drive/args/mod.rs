//! The flags of the subcommands that send requests to a server.

mod workload;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::client::ChatOptions;
use super::keys::{TenantKey, read_keys};
use super::objective::LatencyObjective;
use crate::flags::{fraction, positive};
use crate::workload::Workload;
pub(super) use workload::WorkloadArgs;

/// The number of requests without `--requests` and `--seconds`.
const REQUESTS: u64 = 64;

/// The flags of `drive`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DriveArgs {
    /// Address of the server, with or without /v1.
    #[arg(long, default_value = "http://127.0.0.1:30000")]
    pub(super) url: String,
    #[command(flatten)]
    pub(super) load: LoadArgs,
    #[command(flatten)]
    pub(super) workload: WorkloadArgs,
    #[command(flatten)]
    pub(super) client: ClientArgs,
    #[command(flatten)]
    pub(super) objective: ObjectiveArgs,
    /// Write the step costs that the server had during the run to this file. `simulate --cost`
    /// reads it. The server must be Sterna.
    #[arg(long, value_name = "FILE")]
    pub(super) costs: Option<PathBuf>,
    /// Also report what the server's own histograms say about the run, and whether the clients
    /// agree. The server needs the metrics of vLLM, as Sterna has, and no other clients.
    #[arg(long, conflicts_with = "warm_up")]
    pub(super) server_histograms: bool,
    #[command(flatten)]
    pub(super) files: ReportArgs,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(super) json: bool,
}

/// The flags of the files that a run writes beside its report.
#[derive(Args, Clone, Debug)]
pub(super) struct ReportArgs {
    /// Write one line for each request to this file.
    #[arg(long, value_name = "FILE")]
    pub(super) csv: Option<PathBuf>,
    /// Write a page with plots to this file. It needs no other file.
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
}

/// The flags that say how many requests are sent, and when.
#[derive(Args, Clone, Debug)]
pub(super) struct LoadArgs {
    /// Number of parallel clients (closed loop). Each starts its next session when its last one
    /// has ended.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    #[arg(conflicts_with = "trace")]
    clients: u64,
    /// Start this many sessions per second at random times (Poisson), instead of using --clients.
    /// New sessions do not wait for earlier ones (open loop). Latencies count from the moment when
    /// the request should have started, even if it started later.
    #[arg(long, value_parser = positive, conflicts_with_all = ["clients", "tenant_rates", "trace"])]
    rate: Option<f64>,
    /// Grow the load from 0 to its full size during the first X seconds.
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    ramp_seconds: f64,
    /// Total number of requests. If omitted: 64, or no limit with --seconds or --trace.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    requests: Option<u64>,
    /// Start no session after X seconds.
    #[arg(long, alias = "duration", value_name = "X", value_parser = positive)]
    seconds: Option<f64>,
    /// Send this many requests before those that count.
    #[arg(long, value_name = "N", default_value_t = 0)]
    warm_up: u64,
}

/// The flags of the clients.
#[derive(Args, Clone, Debug)]
pub(super) struct ClientArgs {
    /// Model to request. If omitted: the first model that the server lists.
    #[arg(long)]
    pub(super) model: Option<String>,
    /// File of API keys, one `tenant=key` per line. The first line is the key of the workload's
    /// tenant 0, the second line the key of tenant 1, and so on. Reports show the names before `=`.
    #[arg(long, value_name = "FILE", value_parser = read_keys)]
    keys: Option<Box<[TenantKey]>>,
    /// Continue after the end-of-sequence token, so that every answer has exactly the length that
    /// the workload defines.
    #[arg(long)]
    pub(super) ignore_eos: bool,
    /// Share of requests whose client reads slowly. Their latencies are not reported, because they
    /// measure the client.
    #[arg(long, default_value_t = 0.0, value_parser = fraction)]
    pub(super) slow_fraction: f64,
    /// Pause of a slow client before each read, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 200)]
    slow_read_ms: u64,
    /// Sampling temperature. 0 is greedy sampling.
    #[arg(long, default_value_t = 0.0, value_parser = clap::value_parser!(f64))]
    temperature: f64,
    /// Timeout of a request, in seconds. A request that takes longer has failed.
    #[arg(long, default_value_t = 600.0, value_parser = positive)]
    timeout_seconds: f64,
}

/// The flags of the latency objective.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct ObjectiveArgs {
    /// Latency objective: time to first token, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 5000)]
    slo_ttft_ms: u64,
    /// Latency objective: time per output token of an answer, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 250)]
    slo_itl_ms: u64,
}

/// How many requests are sent, and when.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadSchedule {
    /// What starts the sessions.
    pub(super) source: LoadSource,
    /// The seconds in which the load grows to its full size.
    pub(super) ramp_seconds: f64,
    /// The number of requests, without the warm-up.
    pub(super) requests: Option<u64>,
    /// The time after which no session starts.
    pub(super) seconds: Option<f64>,
    /// The number of requests that do not count.
    pub(super) warm_up: u64,
}

/// What starts the sessions of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum LoadSource {
    /// This many clients, each of which starts its next session when its last one has ended.
    Clients(u64),
    /// A clock: this many sessions per second.
    Rate(f64),
    /// The times of a trace file.
    Trace {
        /// How many times as fast as the trace the requests start.
        speed: f64,
    },
}

impl std::fmt::Display for LoadSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LoadSource::Clients(clients) => write!(f, "{clients} clients"),
            LoadSource::Rate(rate) => write!(f, "{rate} sessions/s"),
            LoadSource::Trace { speed } => write!(f, "a trace at {speed} times its speed"),
        }
    }
}

impl LoadSchedule {
    /// Returns the largest number of requests, with the warm-up.
    pub(super) fn all_requests(&self) -> u64 {
        self.warm_up
            .saturating_add(self.requests.unwrap_or(u64::MAX))
    }
}

impl LoadArgs {
    /// Returns the schedule of `workload`.
    pub(super) fn schedule(&self, workload: &WorkloadArgs) -> LoadSchedule {
        let source = match self.rate.or(workload.tenant_rate()) {
            _ if workload.has_trace() => LoadSource::Trace {
                speed: workload.speed,
            },
            Some(rate) => LoadSource::Rate(rate),
            None => LoadSource::Clients(self.clients),
        };
        let requests = match (self.requests, self.seconds, source) {
            (None, None, LoadSource::Clients(_) | LoadSource::Rate(_)) => Some(REQUESTS),
            (requests, _, _) => requests,
        };
        LoadSchedule {
            source,
            requests,
            ramp_seconds: self.ramp_seconds,
            seconds: self.seconds,
            warm_up: self.warm_up,
        }
    }
}

impl ClientArgs {
    /// Returns the tenants' names and API keys. Empty without `--keys`.
    pub(super) fn keys(&self) -> &[TenantKey] {
        self.keys.as_deref().unwrap_or_default()
    }

    /// Returns the tenants' names. Empty without `--keys`.
    pub(super) fn tenant_names(&self) -> Vec<String> {
        self.keys().iter().map(|entry| entry.name.clone()).collect()
    }

    /// Returns what all requests have in common.
    pub(super) fn options(&self) -> ChatOptions {
        ChatOptions {
            temperature: self.temperature,
            ignore_eos: self.ignore_eos,
            timeout: Duration::from_secs_f64(self.timeout_seconds),
            slow_pause: Duration::from_millis(self.slow_read_ms),
        }
    }

    /// Checks that the file of keys, if there is one, has a key for each tenant of `workload`.
    pub(super) fn check_keys(&self, workload: &Workload) -> Result<(), String> {
        let tenants = workload.tenants() as usize;
        match &self.keys {
            Some(keys) if keys.len() < tenants => Err(format!(
                "--keys: the workload has {tenants} tenants, but the file has {} keys",
                keys.len()
            )),
            _ => Ok(()),
        }
    }
}

impl ObjectiveArgs {
    /// Returns the objective in seconds.
    pub(super) fn objective(self) -> LatencyObjective {
        LatencyObjective {
            first_token_seconds: self.slo_ttft_ms as f64 / 1e3,
            per_output_token_seconds: self.slo_itl_ms as f64 / 1e3,
        }
    }
}
