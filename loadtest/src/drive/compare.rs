//! `compare`: one workload against several servers, in turns.
//!
//! Invariant: in a round, every server gets the same sessions. The order of the servers turns round
//! by round, so that a machine that becomes slower does not harm one of them.

use std::collections::BTreeMap;
use std::fmt;
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::args::{ClientArgs, LoadArgs, ObjectiveArgs, WorkloadArgs};
use super::report::{LiveReport, RunHeader};
use super::run::{LoadPlan, RunRequests, run_load};
use super::target::TargetServer;
use crate::latency::Percentiles;
use crate::output::print;

/// The flags of `compare`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CompareArgs {
    /// Address of a server, with or without /v1. Give the flag for each server. Ratios are over the
    /// first one.
    #[arg(long = "url", value_name = "URL", required = true)]
    urls: Vec<String>,
    /// Number of rounds. In each, every server gets the same sessions.
    #[arg(long, value_name = "N", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1000))]
    rounds: u64,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    workload: WorkloadArgs,
    #[command(flatten)]
    client: ClientArgs,
    #[command(flatten)]
    objective: ObjectiveArgs,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// The figures of all servers.
#[derive(Serialize)]
struct CompareReport {
    rounds: u64,
    servers: Vec<ComparedServer>,
}

/// The figures of one server: medians over the rounds.
#[derive(Serialize)]
struct ComparedServer {
    url: String,
    /// Failed requests of all rounds.
    failed: u64,
    figures: BTreeMap<&'static str, ComparedFigure>,
}

/// One figure of one server.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct ComparedFigure {
    /// The median over the rounds.
    median: f64,
    /// The median, divided by the median of the first server.
    ratio: Option<f64>,
    /// The smallest ratio of a round.
    lowest_ratio: Option<f64>,
    /// The largest ratio of a round.
    highest_ratio: Option<f64>,
}

/// The figures of the table, with how many of the figure's unit a printed unit has.
const FIGURES: [(&str, f64); 9] = [
    ("output tokens/s", 1.0),
    ("goodput, requests/s", 1.0),
    ("time to first token p50, ms", 1e3),
    ("time to first token p99, ms", 1e3),
    ("inter-token latency p50, ms", 1e3),
    ("inter-token latency p99, ms", 1e3),
    ("time per output token p50, ms", 1e3),
    ("end-to-end latency p50, ms", 1e3),
    ("end-to-end latency p99, ms", 1e3),
];

/// Compares the servers and prints the report. Returns the exit code: 1 if a request failed.
///
/// # Errors
/// If flags do not fit the workload.
#[tokio::main]
pub(crate) async fn compare(args: &CompareArgs) -> Result<ExitCode, String> {
    if args.urls.len() < 2 {
        return Err("compare needs at least two --url".into());
    }
    let requests = RunRequests::new(&args.workload, &args.client)?;
    Ok(rounds(args, &requests).await.unwrap_or_else(|error| {
        eprintln!("sterna-loadtest: {error}");
        ExitCode::FAILURE
    }))
}

async fn rounds(args: &CompareArgs, requests: &RunRequests) -> Result<ExitCode, String> {
    let mut targets = Vec::new();
    for url in &args.urls {
        targets.push(TargetServer::connect(url, &args.client).await?);
    }
    let mut reports: Vec<Vec<LiveReport>> = args.urls.iter().map(|_| Vec::new()).collect();
    for round in 0..args.rounds {
        for turn in 0..targets.len() {
            let server = (turn + round as usize) % targets.len();
            let url = &args.urls[server];
            let plan = LoadPlan {
                requests,
                seed: args.workload.seed + round,
                schedule: args.load.schedule(&args.workload),
                title: format!("round {} of {}, {url} ", round + 1, args.rounds),
            };
            let record = run_load(&targets[server], &plan).await;
            let names = args.client.tenant_names();
            let objective = args.objective.objective();
            let header = RunHeader::default();
            reports[server].push(LiveReport::new(header, &record, &names, objective));
        }
    }
    let report = CompareReport {
        rounds: args.rounds,
        servers: args
            .urls
            .iter()
            .zip(&reports)
            .map(|(url, own)| compared(url, own, &reports[0]))
            .collect(),
    };
    print(args.json, &report, &report.to_string());
    let failed = report.servers.iter().any(|server| server.failed > 0);
    Ok(ExitCode::from(u8::from(failed)))
}

/// Returns the figures of one server. `first` are the reports of the first one.
fn compared(url: &str, own: &[LiveReport], first: &[LiveReport]) -> ComparedServer {
    let figure = |index: usize| {
        let of = |reports: &[LiveReport]| -> Vec<f64> {
            reports.iter().map(|report| values(report)[index]).collect()
        };
        compared_figure(&of(own), &of(first))
    };
    ComparedServer {
        url: url.to_owned(),
        failed: own.iter().map(|report| report.total.failed).sum(),
        figures: (0..)
            .zip(FIGURES)
            .map(|(index, (name, _))| (name, figure(index)))
            .collect(),
    }
}

/// Compares the values of one figure, round by round.
fn compared_figure(own: &[f64], first: &[f64]) -> ComparedFigure {
    let ratio = |own: f64, first: f64| (first > 0.0).then(|| own / first);
    let ratios = || {
        own.iter()
            .zip(first)
            .filter_map(|(own, first)| ratio(*own, *first))
    };
    ComparedFigure {
        median: median(own),
        ratio: ratio(median(own), median(first)),
        lowest_ratio: ratios().reduce(f64::min),
        highest_ratio: ratios().reduce(f64::max),
    }
}

/// Returns the values of a report, in the order of [`FIGURES`].
fn values(report: &LiveReport) -> [f64; FIGURES.len()] {
    let total = &report.total;
    let at =
        |found: Option<Percentiles>, quantile: fn(Percentiles) -> f64| found.map_or(0.0, quantile);
    let (first, all) = (total.time_to_first_token_seconds, total.end_to_end_seconds);
    [
        total.output_tokens_per_second,
        total.goodput,
        at(first, |found| found.p50),
        at(first, |found| found.p99),
        at(report.inter_token_seconds, |found| found.p50),
        at(report.inter_token_seconds, |found| found.p99),
        at(total.time_per_output_token_seconds, |found| found.p50),
        at(all, |found| found.p50),
        at(all, |found| found.p99),
    ]
}

/// Returns the median, or the mean of the two middle values.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

impl fmt::Display for CompareReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "medians of {} rounds; ratios over the first server",
            self.rounds
        )?;
        for server in &self.servers {
            writeln!(f, "\n{}, {} requests failed", server.url, server.failed)?;
            for (name, unit) in FIGURES {
                let figure = server.figures[name];
                write!(f, "  {name:<32}{:>10.1}", figure.median * unit)?;
                match (figure.ratio, figure.lowest_ratio, figure.highest_ratio) {
                    (Some(ratio), Some(low), Some(high)) => {
                        writeln!(f, "   x {ratio:.2}  ({low:.2} to {high:.2})")?;
                    }
                    _ => writeln!(f, "   x -")?,
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_that_of_the_medians_and_has_the_range_of_the_rounds() {
        let figure = compared_figure(&[30.0, 10.0, 20.0], &[10.0, 20.0, 10.0]);
        assert_eq!((figure.median, figure.ratio), (20.0, Some(2.0)));
        assert_eq!(
            (figure.lowest_ratio, figure.highest_ratio),
            (Some(0.5), Some(3.0))
        );
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(compared_figure(&[1.0], &[0.0]).ratio, None);
    }
}
