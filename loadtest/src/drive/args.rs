//! The flags of `drive`, and the workload that they describe.

use std::path::PathBuf;

use clap::Args;

use super::conversation::read_keys;
use crate::flags::{fraction, positive};
use crate::workload::{Count, Disconnects, SessionClass, SharedPrefix, Workload, named, names};

/// The latest disconnect under `--disconnect-fraction`, in seconds. Long enough that some clients
/// disconnect while decoding, short enough that some disconnect while queued.
const DISCONNECT_WITHIN: f64 = 2.0;

/// The flags of `drive`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DriveArgs {
    /// Address of the server, with or without /v1.
    #[arg(long, default_value = "http://127.0.0.1:30000")]
    pub(super) url: String,
    /// Model to request. If omitted: the first model that the server lists.
    #[arg(long)]
    pub(super) model: Option<String>,
    /// Run a named workload instead of the one that the flags describe. `simulate --list`
    /// describes each. Add --ignore-eos to get answers of the lengths that the workload defines.
    #[arg(
        long,
        value_parser = names(),
        conflicts_with_all = [
            "max_tokens",
            "prompt_tokens",
            "prompt_spread",
            "shared_prefix_tokens",
            "disconnect_fraction",
        ],
    )]
    workload: Option<String>,
    /// Send only the sessions of this class of the named workload. They are the same sessions, at
    /// the same times, as in the whole workload.
    #[arg(long, value_name = "CLASS", requires = "workload")]
    pub(super) only: Option<String>,
    /// File of API keys, one `tenant=key` per line. The first line is the key of the workload's
    /// tenant 0, the second that of tenant 1, and so on. The names before `=` are ignored.
    #[arg(long, value_name = "FILE", value_parser = read_keys)]
    keys: Option<Box<[String]>>,
    /// Number of parallel clients (closed loop). Each starts its next session when its last one
    /// has ended.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pub(super) clients: u64,
    /// Total number of requests.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) requests: u64,
    /// Start this many sessions per second at random times (Poisson), instead of using --clients.
    /// New sessions do not wait for earlier ones (open loop).
    #[arg(long, value_parser = positive, conflicts_with = "clients")]
    pub(super) rate: Option<f64>,
    /// Maximum number of output tokens of each request.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Continue after the end-of-sequence token, so that every answer has exactly --max-tokens
    /// tokens.
    #[arg(long)]
    pub(super) ignore_eos: bool,
    /// Mean number of tokens that a turn adds to the prompt, including the chat template around
    /// the user's message. A few probe requests measure how many tokens the server counts per
    /// word; the longest has 192 words.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    prompt_tokens: u32,
    /// Largest deviation of a prompt's length from the mean, as a share of the mean. 0 makes all
    /// prompts equally long.
    #[arg(long, default_value_t = 0.5, value_parser = fraction)]
    prompt_spread: f64,
    /// Number of tokens of a system message that all requests share.
    #[arg(long, default_value_t = 0)]
    shared_prefix_tokens: u32,
    /// Share of requests whose client disconnects at a random moment before the answer ends.
    #[arg(long, default_value_t = 0.0, value_parser = fraction)]
    disconnect_fraction: f64,
    /// Sampling temperature. 0 is greedy sampling.
    #[arg(long, default_value_t = 0.0, value_parser = clap::value_parser!(f64))]
    pub(super) temperature: f64,
    /// Timeout of a request, in seconds. A request that takes longer has failed.
    #[arg(long, default_value_t = 600.0, value_parser = positive)]
    pub(super) timeout_seconds: f64,
    /// Seed of prompts, lengths, arrivals, disconnects and sampling.
    #[arg(long, default_value_t = 1)]
    pub(super) seed: u64,
    /// Write the step costs that the server had during the run to this file. `simulate --cost`
    /// reads it. The server must be Sterna.
    #[arg(long, value_name = "FILE")]
    pub(super) costs: Option<PathBuf>,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(super) json: bool,
}

impl DriveArgs {
    /// Returns the API keys, indexed by tenant. Empty without `--keys`.
    pub(super) fn keys(&self) -> &[String] {
        self.keys.as_deref().unwrap_or_default()
    }

    /// Returns the named workload, or the one that the other flags describe.
    pub(super) fn workload(&self) -> Workload {
        if let Some(name) = &self.workload {
            return named(name).expect("clap accepts only known names");
        }
        let mean = f64::from(self.prompt_tokens);
        let bound = |sign: f64| (mean * (1.0 + sign * self.prompt_spread)).round() as u32;
        let class = SessionClass {
            shared: SharedPrefix {
                count: 1,
                tokens: self.shared_prefix_tokens,
            },
            prompt: Count::Between(bound(-1.0).max(1), bound(1.0)),
            output: Count::Exactly(self.max_tokens),
            disconnects: Disconnects {
                fraction: self.disconnect_fraction,
                within: DISCONNECT_WITHIN,
            },
            ..SessionClass::default()
        };
        Workload {
            name: "flags",
            description: "the workload that the flags describe",
            load: 1.0,
            classes: vec![class],
            weights: &[],
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
