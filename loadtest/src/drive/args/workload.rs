//! The flags that describe which requests are sent.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use crate::flags::{fraction, positive};
use crate::workload::{
    Arrivals, Count, Disconnects, RecordedTrace, SessionClass, SharedPrefix, TenantRange, Workload,
    named, names,
};

/// The latest disconnect under `--disconnect-fraction`, in seconds. Long enough that some clients
/// disconnect while decoding, short enough that some disconnect while queued.
const DISCONNECT_WITHIN: f64 = 2.0;

/// The mean lengths of the phases under `--arrivals bursts:X`, in seconds.
const CALM_SECONDS: f64 = 10.0;
const BURST_SECONDS: f64 = 2.0;

/// The flags that describe the requests: a named workload, or lengths, turns and tenants.
#[derive(Args, Clone, Debug)]
#[command(group = ArgGroup::new("described").multiple(true).conflicts_with("workload"))]
pub(crate) struct WorkloadArgs {
    /// Run a named workload instead of the one that the flags describe. `simulate --list`
    /// describes each. Add --ignore-eos to get answers of the lengths that the workload defines.
    #[arg(long, value_parser = names())]
    workload: Option<String>,
    /// Send only the sessions of this class of the named workload. They are the same sessions, at
    /// the same times, as in the whole workload.
    #[arg(long, value_name = "CLASS", requires = "workload")]
    pub(crate) only: Option<String>,
    /// Send the requests of a trace file at their times: an Azure LLM inference trace (CSV), or
    /// JSON lines of Mooncake or Sterna. Add --ignore-eos to get answers of the trace's lengths.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["workload", "described"])]
    trace: Option<PathBuf>,
    /// Start the requests of the trace X times as fast.
    #[arg(long, value_name = "X", requires = "trace", default_value_t = 1.0)]
    #[arg(value_parser = positive)]
    pub(crate) speed: f64,
    /// Mean number of tokens that a turn adds to the prompt, including the chat template around
    /// the user's message. A few probe requests measure how many tokens the server counts per
    /// word; the longest has 192 words.
    #[arg(long, group = "described", default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    prompt_tokens: u32,
    /// Largest deviation of a prompt's length from the mean, as a share of the mean. 0 makes all
    /// prompts equally long.
    #[arg(long, group = "described", default_value_t = 0.5, value_parser = fraction)]
    prompt_spread: f64,
    /// Mean number of tokens of an answer: the `max_tokens` of the request.
    #[arg(long, group = "described", default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Largest deviation of an answer's length from the mean, as a share of the mean. 0 makes all
    /// answers equally long.
    #[arg(long, group = "described", default_value_t = 0.0, value_parser = fraction)]
    max_tokens_spread: f64,
    /// Draw log-normal lengths, as in real chats. The numbers of tokens are then medians,
    /// and the spreads are standard deviations of the logarithm.
    #[arg(long, group = "described")]
    log_normal: bool,
    /// Number of tokens of a system message that all requests share.
    #[arg(long, group = "described", default_value_t = 0)]
    shared_prefix_tokens: u32,
    /// Number of turns of a session. Each turn repeats the conversation so far.
    #[arg(long, group = "described", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    turns: u32,
    /// Mean think time: seconds between an answer and the next turn.
    #[arg(long, group = "described", default_value_t = 0.0)]
    think_seconds: f64,
    /// Number of tenants. Sessions are spread over them evenly.
    #[arg(long, group = "described", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=65_536))]
    tenants: u32,
    /// Sessions per second of each tenant, such as 0.5,2,1 for three tenants. Instead of --rate.
    #[arg(long, group = "described", value_name = "X,Y,…", value_delimiter = ',')]
    #[arg(value_parser = positive, conflicts_with = "tenants")]
    tenant_rates: Vec<f64>,
    /// How sessions of an open loop arrive: poisson, steady (equal intervals), or bursts:X. Bursts
    /// last 2 s on average, with X times the rate of the 10 s between them.
    #[arg(
        long,
        group = "described",
        value_name = "KIND",
        default_value = "poisson"
    )]
    #[arg(value_parser = arrivals)]
    arrivals: Arrivals,
    /// Share of requests whose client disconnects at a random moment before the answer ends.
    #[arg(long, group = "described", default_value_t = 0.0, value_parser = fraction)]
    disconnect_fraction: f64,
    /// Seed of prompts, lengths, arrivals, disconnects and sampling.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// Parses a kind of arrivals.
fn arrivals(text: &str) -> Result<Arrivals, String> {
    match (text, text.split_once(':')) {
        ("poisson", _) => Ok(Arrivals::Poisson),
        ("steady", _) => Ok(Arrivals::Steady),
        (_, Some(("bursts", factor))) => Ok(Arrivals::Bursts {
            calm: CALM_SECONDS,
            burst: BURST_SECONDS,
            factor: positive(factor)?,
        }),
        _ => Err("must be poisson, steady or bursts:X".into()),
    }
}

impl WorkloadArgs {
    /// Reads the trace file, if there is one.
    pub(crate) fn recorded(&self) -> Result<Option<RecordedTrace>, String> {
        let read = |file: &PathBuf| RecordedTrace::read(file, self.speed);
        self.trace.as_ref().map(read).transpose()
    }

    /// Returns the named workload, or the one that the other flags describe.
    pub(crate) fn workload(&self) -> Workload {
        if let Some(name) = &self.workload {
            return named(name).expect("clap accepts only known names");
        }
        let class = |tenants: TenantRange, share: f64| SessionClass {
            share,
            tenants,
            arrivals: self.arrivals,
            shared: SharedPrefix {
                count: 1,
                tokens: self.shared_prefix_tokens,
                of_tenant: false,
            },
            prompt: self.length(self.prompt_tokens, self.prompt_spread),
            output: self.length(self.max_tokens, self.max_tokens_spread),
            turns: Count::Exactly(self.turns),
            think: self.think_seconds,
            disconnects: Disconnects {
                fraction: self.disconnect_fraction,
                within: DISCONNECT_WITHIN,
            },
            context: u32::MAX / 2, // The server says what is too long.
            ..SessionClass::default()
        };
        let tenants = |first: u32, count: u32| TenantRange {
            first,
            count,
            zipf: 0.0,
        };
        let classes = match &self.tenant_rates[..] {
            [] => vec![class(tenants(0, self.tenants), 1.0)],
            rates => (0..)
                .zip(rates)
                .map(|(tenant, rate)| class(tenants(tenant, 1), *rate))
                .collect(),
        };
        Workload {
            name: "flags",
            description: "the workload that the flags describe",
            load: 1.0,
            classes,
            weights: &[],
        }
    }

    /// Returns a line that says which requests are sent.
    pub(crate) fn describe(&self) -> String {
        if let Some(trace) = &self.trace {
            return format!("the trace {}", trace.display());
        }
        if self.workload.is_some() {
            let Workload {
                name, description, ..
            } = self.workload();
            let only = self.only.as_ref();
            let only = only.map_or(String::new(), |class| format!(", only the class {class}"));
            return format!("{name}{only}: {description}");
        }
        let length = |tokens: u32, spread: f64| match (spread, self.log_normal) {
            (0.0, false) => format!("{tokens} tokens"),
            (_, false) => format!("{tokens} tokens ± {} %", spread * 100.0),
            (_, true) => format!("{tokens} tokens (log-normal, sigma {spread})"),
        };
        let mut parts = vec![
            format!(
                "prompts of {}",
                length(self.prompt_tokens, self.prompt_spread)
            ),
            format!(
                "answers of {}",
                length(self.max_tokens, self.max_tokens_spread)
            ),
        ];
        let tenants = (self.tenants as usize).max(self.tenant_rates.len());
        let (shared, turns) = (self.shared_prefix_tokens, self.turns);
        let optional = [
            (shared > 0, format!("a shared prefix of {shared} tokens")),
            (turns > 1, format!("{turns} turns")),
            (tenants > 1, format!("{tenants} tenants")),
        ];
        parts.extend(
            optional
                .into_iter()
                .filter_map(|(is, text)| is.then_some(text)),
        );
        parts.join(", ")
    }

    /// Returns whether the requests come from a trace file.
    pub(crate) fn has_trace(&self) -> bool {
        self.trace.is_some()
    }

    /// Returns the sum of `--tenant-rates`, if there are any.
    pub(crate) fn tenant_rate(&self) -> Option<f64> {
        (!self.tenant_rates.is_empty()).then(|| self.tenant_rates.iter().sum())
    }

    fn length(&self, mean: u32, spread: f64) -> Count {
        let bound = |sign: f64| (f64::from(mean) * (1.0 + sign * spread)).round() as u32;
        if self.log_normal {
            return Count::LogNormal {
                median: f64::from(mean),
                sigma: spread,
                min: 1,
                max: u32::MAX,
            };
        }
        match spread {
            0.0 => Count::Exactly(mean),
            _ => Count::Between(bound(-1.0).max(1), bound(1.0)),
        }
    }
}
