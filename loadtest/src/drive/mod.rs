//! `drive`, `sweep` and `compare`: parallel streaming clients against OpenAI-compatible servers.
//!
//! Invariant: this module knows the server only by HTTP and shares no code with it, so a changed
//! wire format breaks the load test.

mod args;
mod client;
mod compare;
mod conversation;
mod costs;
mod facts;
mod histograms;
mod http;
mod keys;
mod live;
mod objective;
mod outcome;
mod prompt_text;
mod record;
mod report;
mod run;
mod sse;
mod stream;
mod sweep;
mod target;

use std::process::ExitCode;

use crate::output::print;
pub(crate) use args::DriveArgs;
pub(crate) use compare::{CompareArgs, compare};
use report::{LiveReport, RunHeader, write_csv, write_html};
use run::{LoadPlan, RunRequests, run_load};
pub(crate) use sweep::{SweepArgs, sweep};
use target::TargetServer;

/// Drives the server and prints the report. Returns the exit code.
///
/// # Errors
/// If flags do not fit the workload.
#[tokio::main]
pub(crate) async fn drive(args: &DriveArgs) -> Result<ExitCode, String> {
    let requests = RunRequests::new(&args.workload, &args.client)?;
    let report = measure(args, &requests).await;
    Ok(report.unwrap_or_else(|error| {
        eprintln!("sterna-loadtest: {error}");
        ExitCode::FAILURE
    }))
}

/// Sends all requests and prints the report. Fails if the server cannot be reached before the
/// first request, or if a file cannot be written.
async fn measure(args: &DriveArgs, requests: &RunRequests) -> Result<ExitCode, String> {
    let target = TargetServer::connect(&args.url, &args.client).await?;
    let costs_before = match args.costs {
        Some(_) => Some(target.step_costs().await?),
        None => None,
    };
    let histograms_before = if args.server_histograms {
        Some(target.histograms().await?)
    } else {
        None
    };
    let plan = LoadPlan {
        requests,
        seed: args.workload.seed,
        schedule: args.load.schedule(&args.workload),
        title: String::new(),
    };
    let facts = target.facts(args.workload.describe()).await;
    let record = run_load(&target, &plan).await;
    let header = RunHeader {
        load: plan.schedule.source.to_string(),
        url: args.url.clone(),
        seed: plan.seed,
        warm_up: plan.schedule.warm_up,
    };
    let (names, objective) = (args.client.tenant_names(), args.objective.objective());
    let mut report = LiveReport::new(header, &record, &names, objective);
    report.facts = Some(facts);
    if let Some(before) = histograms_before {
        let ended = report.total.complete;
        let after = target.histograms_with(&before, ended).await?;
        let (first, all) = (
            report.total.time_to_first_token_seconds,
            report.total.end_to_end_seconds,
        );
        report.server = after.since(&before, first, all);
    }
    print(args.json, &report, &report.to_string());
    if let Some(file) = &args.files.csv {
        let written = write_csv(&record, file);
        written.map_err(|error| format!("--csv: cannot write {}: {error}", file.display()))?;
    }
    if let Some(file) = &args.files.html {
        let written = write_html(&report, &record, file);
        written.map_err(|error| format!("--html: cannot write {}: {error}", file.display()))?;
    }
    if let (Some(file), Some(before)) = (&args.costs, costs_before) {
        let written = target.write_costs(&before, file).await;
        written.map_err(|error| format!("--costs: {error}"))?;
    }
    Ok(ExitCode::from(u8::from(report.total.failed > 0)))
}
