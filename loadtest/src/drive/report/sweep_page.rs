//! The report of a sweep as a page that needs no other file.

use std::path::Path;

use serde::Serialize;
use serde_json::json;

use super::html::{STYLE, fact_rows, millis, render};
use super::plot::{LabelledPoint, PagePlot, curve, short};
use super::sweep_report::{SweepReport, SweepStep};
use crate::latency::Percentiles;

const SWEEP: &str = include_str!("page/sweep.html");

/// A row of the table of loads.
#[derive(Serialize)]
struct LoadRow {
    name: String,
    cells: Vec<String>,
    is_best: bool,
}

/// Writes the page of `report` to `file`.
pub(in crate::drive) fn write_sweep_html(report: &SweepReport, file: &Path) -> Result<(), String> {
    let first = report.steps.first().ok_or("the sweep has no step")?;
    let objective = first.report.objective;
    let plots = [
        throughput_against(
            report,
            "Output tokens/s against time to first token, p99, ms",
            objective.first_token_seconds,
            |step| step.report.total.time_to_first_token_seconds,
        ),
        throughput_against(
            report,
            "Output tokens/s against time per output token, p99, ms",
            objective.per_output_token_seconds,
            |step| step.report.total.time_per_output_token_seconds,
        ),
    ];
    let rows = report.steps.iter();
    let rows: Vec<LoadRow> = rows
        .map(|step| row(step, report.is_highest(step)))
        .collect();
    let values = json!({
        "style": STYLE,
        "url": first.report.header.url,
        "highest": report.best().map_or("none", |step| &step.report.header.load),
        "confirmation": report.confirmation(),
        "facts": fact_rows(Some(&report.facts)),
        "share": report.slo_share * 100.0,
        "first_token": objective.first_token_seconds * 1e3,
        "per_token": objective.per_output_token_seconds * 1e3,
        "plots": plots,
        "rows": rows,
    });
    std::fs::write(file, render(SWEEP, &values)).map_err(|error| error.to_string())
}

/// Plots the throughput of each load and the 99th percentile of a latency under it.
fn throughput_against(
    report: &SweepReport,
    title: &str,
    limit_seconds: f64,
    latency: fn(&SweepStep) -> Option<Percentiles>,
) -> PagePlot {
    // A repetition would make the curve go back.
    let first = report.steps.iter().filter(|step| !step.is_repeated);
    let points = first.filter_map(|step| {
        Some(LabelledPoint {
            x: step.report.total.output_tokens_per_second,
            y: latency(step)?.p99 * 1e3,
            label: short(step.size),
        })
    });
    curve(title, &points.collect::<Vec<_>>(), limit_seconds * 1e3)
}

fn row(step: &SweepStep, is_best: bool) -> LoadRow {
    let total = &step.report.total;
    let pair = |found: Option<Percentiles>| match found {
        Some(found) => [millis(found.p50), millis(found.p99)],
        None => ["-".to_owned(), "-".to_owned()],
    };
    let mut cells = vec![
        total.complete.to_string(),
        total.failed.to_string(),
        format!("{:.1} %", step.good_share * 100.0),
        short(total.output_tokens_per_second),
    ];
    cells.extend(pair(total.time_to_first_token_seconds));
    cells.extend(pair(total.time_per_output_token_seconds));
    LoadRow {
        name: step.name(),
        cells,
        is_best,
    }
}
