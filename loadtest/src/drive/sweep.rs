//! `sweep`: finds the highest load under which the server meets the latency objective.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};

use super::args::{ClientArgs, LoadSchedule, LoadSource, ObjectiveArgs, WorkloadArgs};
use super::report::{LiveReport, RunHeader, SweepReport, SweepStep, write_sweep_html};
use super::run::{LoadPlan, RunRequests, run_load};
use super::target::TargetServer;
use crate::flags::{fraction, positive};
use crate::output::print;

/// The highest load and the lowest one that does not meet the objective differ by at most this
/// factor.
const PRECISION: f64 = 1.1;

/// The largest number of steps, however far the loads are apart.
const STEPS: usize = 24;

/// The share of a step in which the load grows. Clients that start together are not what comes
/// later.
const RAMP: f64 = 0.1;

/// The flags of `sweep`.
#[derive(Args, Clone, Debug)]
pub(crate) struct SweepArgs {
    /// Address of the server, with or without /v1.
    #[arg(long, default_value = "http://127.0.0.1:30000")]
    url: String,
    /// What makes the load: parallel clients (closed loop), or sessions per second (open loop).
    #[arg(long, value_enum, default_value = "clients")]
    by: SweepUnit,
    /// The first load.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = positive)]
    from: f64,
    /// Start no session of a step after X seconds.
    #[arg(long, value_name = "X", default_value_t = 10.0, value_parser = positive)]
    seconds: f64,
    /// A load meets the objective if this share of its requests does. Failed requests do not.
    #[arg(long, value_name = "X", default_value_t = 0.99, value_parser = fraction)]
    slo_share: f64,
    #[command(flatten)]
    objective: ObjectiveArgs,
    #[command(flatten)]
    workload: WorkloadArgs,
    #[command(flatten)]
    client: ClientArgs,
    /// Write a page with plots to this file. It needs no other file.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// What makes the load of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum SweepUnit {
    /// Parallel clients.
    Clients,
    /// Sessions per second.
    Rate,
}

/// Chooses the next load.
struct LoadSearch {
    from: f64,
    is_whole: bool, // Whether loads are whole numbers, such as clients.
    met: Option<f64>,
    missed: Option<f64>,
}

/// Sweeps the server and prints the report. Returns the exit code: 1 if no load meets the
/// objective.
///
/// # Errors
/// If flags do not fit the workload.
#[tokio::main]
pub(crate) async fn sweep(args: &SweepArgs) -> Result<ExitCode, String> {
    if args.workload.has_trace() || args.workload.tenant_rate().is_some() {
        return Err("sweep chooses the rate; --trace and --tenant-rates have their own".into());
    }
    let requests = RunRequests::new(&args.workload, &args.client)?;
    Ok(search(args, &requests).await.unwrap_or_else(|error| {
        eprintln!("sterna-loadtest: {error}");
        ExitCode::FAILURE
    }))
}

async fn search(args: &SweepArgs, requests: &RunRequests) -> Result<ExitCode, String> {
    let target = TargetServer::connect(&args.url, &args.client).await?;
    let mut search = LoadSearch {
        from: args.from,
        is_whole: args.by == SweepUnit::Clients,
        met: None,
        missed: None,
    };
    let facts = target.facts(args.workload.describe()).await;
    let mut steps = Vec::new();
    while let Some(size) = search.next().filter(|_| steps.len() < STEPS) {
        let step = measure(args, requests, &target, (steps.len(), size)).await;
        search.tried(size, step.is_met);
        steps.push(step);
    }
    // The result lies between these two, and one short run of each may be chance.
    for size in search.last_loads() {
        let step = measure(args, requests, &target, (steps.len(), size)).await;
        steps.push(SweepStep {
            is_repeated: true,
            ..step
        });
    }
    steps.sort_by(|a, b| a.size.total_cmp(&b.size));
    let report = SweepReport {
        facts,
        slo_share: args.slo_share,
        highest: search.met,
        steps,
    };
    print(args.json, &report, &report.to_string());
    if let Some(file) = &args.html {
        let written = write_sweep_html(&report, file);
        written.map_err(|error| format!("--html: cannot write {}: {error}", file.display()))?;
    }
    Ok(ExitCode::from(u8::from(report.highest.is_none())))
}

/// Runs one step. It has a seed of its own, so that the server has not cached its prompts.
async fn measure(
    args: &SweepArgs,
    requests: &RunRequests,
    target: &TargetServer,
    (step, size): (usize, f64),
) -> SweepStep {
    let source = match args.by {
        SweepUnit::Clients => LoadSource::Clients(size as u64),
        SweepUnit::Rate => LoadSource::Rate(size),
    };
    let plan = LoadPlan {
        requests,
        seed: args.workload.seed + step as u64,
        schedule: LoadSchedule {
            source,
            ramp_seconds: args.seconds * RAMP,
            requests: None,
            seconds: Some(args.seconds),
            warm_up: 0,
        },
        title: format!("{source} "),
    };
    let record = run_load(target, &plan).await;
    let header = RunHeader {
        load: source.to_string(),
        url: args.url.clone(),
        seed: plan.seed,
        warm_up: 0,
    };
    let names = args.client.tenant_names();
    let report = LiveReport::new(header, &record, &names, args.objective.objective());
    let good_share = report.good_share();
    SweepStep {
        size,
        good_share,
        is_met: good_share >= args.slo_share,
        is_repeated: false,
        report,
    }
}

impl LoadSearch {
    /// Returns the next load to try. Doubles the load until the objective is missed, or halves it
    /// until it is met. Then tries loads between both.
    fn next(&self) -> Option<f64> {
        let next = match (self.met, self.missed) {
            (None, None) => self.from,
            (Some(met), None) => met * 2.0,
            (None, Some(missed)) => missed / 2.0,
            (Some(met), Some(missed)) if missed / met <= PRECISION => return None,
            (Some(met), Some(missed)) => (met * missed).sqrt(),
        };
        let next = if self.is_whole { next.round() } else { next };
        let is_new = next >= 1.0 || !self.is_whole;
        let tried = self.met == Some(next) || self.missed == Some(next);
        (is_new && !tried && next <= 65_536.0).then_some(next)
    }

    /// Returns the highest load that met the objective and the lowest one that missed it.
    fn last_loads(&self) -> impl Iterator<Item = f64> + use<> {
        [self.met, self.missed].into_iter().flatten()
    }

    fn tried(&mut self, size: f64, is_met: bool) {
        let bound = if is_met {
            &mut self.met
        } else {
            &mut self.missed
        };
        *bound = Some(size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the highest load that a search finds on a server that manages `limit`, and the
    /// number of steps.
    fn found(limit: f64, from: f64, is_whole: bool) -> (Option<f64>, usize) {
        let mut search = LoadSearch {
            from,
            is_whole,
            met: None,
            missed: None,
        };
        let mut steps = 0;
        while let Some(size) = search.next().filter(|_| steps < STEPS) {
            search.tried(size, size <= limit);
            steps += 1;
        }
        (search.met, steps)
    }

    #[test]
    fn the_loads_around_the_limit_are_the_last_ones() {
        let mut search = LoadSearch {
            from: 1.0,
            is_whole: true,
            met: None,
            missed: None,
        };
        while let Some(size) = search.next() {
            search.tried(size, size <= 35.0);
        }
        let last: Vec<f64> = search.last_loads().collect();
        assert_eq!(last, [35.0, 38.0]);
    }

    #[test]
    fn the_search_finds_the_highest_load() {
        assert_eq!(found(1.0, 1.0, true), (Some(1.0), 2));
        assert_eq!(found(0.0, 8.0, true), (None, 4));
        for limit in [2.0, 3.0, 7.0, 9.0, 40.0, 1000.0] {
            for from in [1.0, 5.0, 5000.0] {
                let (highest, steps) = found(limit, from, true);
                let highest = highest.unwrap();
                assert!(
                    highest <= limit && highest * 1.1 >= limit.min(limit - 0.5),
                    "{highest}"
                );
                assert!(steps <= 20, "{limit} from {from}: {steps}");
            }
        }
        let (highest, _) = found(0.37, 1.0, false);
        assert!((0.336..=0.37).contains(&highest.unwrap()));
    }
}
