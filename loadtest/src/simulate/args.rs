//! The flags of `simulate`.

use std::path::PathBuf;

use clap::Args;
use sterna_scheduler::INTER_TOKEN_TARGET;

use super::disturbance::DisturbanceKind;
use super::policies;
use super::router::{HashKey, RouterKind};
use crate::flags::{fraction, positive};
use crate::workload::names;

/// The flags of `simulate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct SimulateArgs {
    /// Workload to run. --list describes each.
    #[arg(long, default_value = "chat", value_parser = names())]
    pub(super) workload: String,
    /// Run the requests of a trace file instead of a workload: an Azure LLM inference trace (CSV),
    /// or JSON lines of Mooncake or Sterna. loadtest/README.md has the fields.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["workload", "load", "rate", "only"])]
    pub(super) trace: Option<PathBuf>,
    /// Start the requests of the trace X times as fast.
    #[arg(long, value_name = "X", requires = "trace", default_value_t = 1.0)]
    #[arg(value_parser = positive)]
    pub(super) speed: f64,
    /// List the workloads and exit.
    #[arg(long)]
    pub(super) list: bool,
    /// Scheduling policy: Sterna's, Sterna's with another order (fcfs, vtc, lpm), or the policy of
    /// another engine (token-budget, prefill-first, slots).
    #[arg(long, default_value = policies::NAMES[0], value_parser = policies::NAMES)]
    pub(super) policy: String,
    /// Target inter-token latency in milliseconds, as the server's flag of that name. Only
    /// policies with a time budget use it.
    #[arg(
        long,
        value_name = "MS",
        default_value_t = INTER_TOKEN_TARGET / 1000,
        value_parser = clap::value_parser!(u64).range(1..=60_000),
    )]
    pub(super) itl_target_ms: u64,
    /// Keep the target however much throughput that costs, as the server's flag of that name.
    #[arg(long)]
    pub(super) itl_strict: bool,
    /// Run all policies on the same workload and compare them.
    #[arg(long, conflicts_with = "policy")]
    pub(super) compare: bool,
    /// Total number of requests.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) requests: u64,
    /// Start no session after this many seconds of virtual time.
    #[arg(long, value_parser = positive)]
    pub(super) seconds: Option<f64>,
    /// Seed of the workload and of the noise.
    #[arg(long, default_value_t = 1)]
    pub(super) seed: u64,
    /// Machine seconds of work that arrive per second, for each machine. If omitted: the workload's
    /// own load.
    #[arg(long, value_parser = positive)]
    pub(super) load: Option<f64>,
    /// Sessions that start per second, instead of --load.
    #[arg(long, value_parser = positive, conflicts_with = "load")]
    pub(super) rate: Option<f64>,
    /// Closed loop: this many clients, each of which starts its next session when its last one has
    /// ended.
    #[arg(long, value_name = "N", conflicts_with_all = ["load", "rate", "seconds"])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(super) clients: Option<u32>,
    /// Other work makes steps longer for a time: slow:X by a factor, uneven:X and bursts:X by up to
    /// a factor, stolen-core, or half-bandwidth.
    #[arg(long, value_name = "KIND")]
    pub(super) disturb: Option<DisturbanceKind>,
    /// The disturbance begins after this many seconds of virtual time. From 0, it also disturbs
    /// the calibration at the start.
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub(super) disturb_from: u64,
    /// The disturbance lasts for this many seconds. With 0 it disturbs only the calibration.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub(super) disturb_seconds: u64,
    /// Run only the sessions of this class. They are the same sessions, at the same times, as in
    /// the whole workload.
    #[arg(long, value_name = "CLASS")]
    pub(super) only: Option<String>,
    /// Cost model of the machine: 2b-2core, 2b-2core-zen4, 2b-32core, demo, or a JSON file of
    /// coefficients in nanoseconds, as `drive --costs` writes it.
    #[arg(long, default_value = "2b-2core")]
    pub(super) cost: String,
    /// Number of machines behind the router. Each has a server with the scheduler and a cache.
    #[arg(long, value_name = "N", requires = "router")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    machines: Option<u32>,
    /// How the router chooses the machine of a request.
    #[arg(long, value_name = "KIND", requires = "machines")]
    pub(super) router: Option<RouterKind>,
    /// What consistent hashing maps to a machine. If omitted: the session.
    #[arg(long, value_name = "KEY", requires = "machines")]
    hash_by: Option<HashKey>,
    /// Each machine fails after this many seconds of virtual time on average. Its cache is lost.
    #[arg(long, value_name = "SECONDS", requires = "machines", value_parser = positive)]
    pub(super) mtbf_seconds: Option<f64>,
    /// A machine that failed returns after this many seconds.
    #[arg(
        long,
        value_name = "SECONDS",
        requires = "mtbf_seconds",
        default_value_t = 60.0
    )]
    #[arg(value_parser = positive)]
    pub(super) down_seconds: f64,
    /// Largest deviation of a step's time from its prediction, as a share of the prediction.
    #[arg(long, default_value_t = 0.03, value_parser = fraction)]
    pub(super) noise: f64,
    /// Number of KV pages. A page holds 16 tokens.
    #[arg(long, default_value_t = 6990, value_parser = clap::value_parser!(u32).range(256..))]
    pub(super) pages: u32,
    /// Maximum number of running sequences. The policy may set a lower one.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(super) max_running: u32,
    /// Maximum number of queued requests.
    #[arg(
        long,
        default_value_t = 10_000_000,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    pub(super) max_queued: u32,
    /// Latency objective: time to first token, in milliseconds.
    #[arg(long, default_value_t = 5000)]
    pub(super) slo_ttft_ms: u64,
    /// Latency objective: mean inter-token latency of an answer, in milliseconds.
    #[arg(long, default_value_t = 250)]
    pub(super) slo_itl_ms: u64,
    /// Print JSON instead of text.
    #[arg(long)]
    pub(super) json: bool,
}

impl SimulateArgs {
    /// Returns what consistent hashing maps to a machine.
    ///
    /// # Errors
    /// If another router was chosen.
    pub(super) fn hash_key(&self) -> Result<HashKey, String> {
        match (self.hash_by, self.router) {
            (Some(_), Some(router)) if router != RouterKind::ConsistentHash => Err(format!(
                "--hash-by is for --router {}; got --router {}",
                RouterKind::ConsistentHash.name(),
                router.name()
            )),
            (key, _) => Ok(key.unwrap_or(HashKey::Session)),
        }
    }

    /// Returns the number of machines.
    pub(super) fn machines(&self) -> usize {
        self.machines.unwrap_or(1) as usize
    }
}
