//! The report as a page that needs no other file.

use std::path::Path;

use minijinja::Environment;
use serde::Serialize;
use serde_json::json;

use super::plot::{PagePlot, distribution, over_time, short};
use super::series::{in_flight, output_rate};
use super::{GroupReport, LiveReport};
use crate::drive::facts::RunFacts;
use crate::drive::record::RunRecord;
use crate::latency::{Latencies, Percentiles};

pub(super) const STYLE: &str = include_str!("page/style.css");
const RUN: &str = include_str!("page/run.html");

/// A figure that the page shows first.
#[derive(Serialize)]
struct FigureCard {
    name: &'static str,
    value: String,
    note: String,
    is_bad: bool,
}

/// A row of a table.
#[derive(Serialize)]
pub(super) struct PageRow {
    name: String,
    cells: Vec<String>,
}

/// Writes the page of `report` and `record` to `file`.
pub(crate) fn write_html(
    report: &LiveReport,
    record: &RunRecord,
    file: &Path,
) -> Result<(), String> {
    let values = json!({
        "style": STYLE,
        "report": report,
        "cards": cards(report),
        "plots": plots(record),
        "latencies": latencies(report),
        "tenants": tenants(report),
        "facts": fact_rows(report.facts.as_ref()),
    });
    let page = render(RUN, &values);
    std::fs::write(file, page).map_err(|error| error.to_string())
}

/// Returns the rows of the table of circumstances.
pub(super) fn fact_rows(facts: Option<&RunFacts>) -> Vec<PageRow> {
    let row = |name: String, value: &str| PageRow {
        name,
        cells: vec![value.to_owned()],
    };
    let facts = facts.into_iter();
    let rows = facts.flat_map(|facts| {
        let own = facts
            .rows()
            .map(|(name, value)| row(name.to_owned(), value));
        let settings = facts.server_settings.iter();
        own.into_iter()
            .chain(settings.map(|(name, value)| row(format!("server's {name}"), value)))
    });
    rows.collect()
}

/// Fills a template of this folder. Everything except plots is escaped.
pub(super) fn render(template: &'static str, values: &impl Serialize) -> String {
    let mut templates = Environment::new();
    let added = templates.add_template("page.html", template);
    added.expect("the template is well formed");
    let page = templates.get_template("page.html");
    let page = page
        .expect("the template was added")
        .render(minijinja::value::Serde(values));
    page.expect("the template uses only what it gets")
}

fn cards(report: &LiveReport) -> Vec<FigureCard> {
    let total = &report.total;
    let ended = total.complete + total.failed;
    let latency = |name, percentiles: Option<Percentiles>| FigureCard {
        name,
        value: percentiles.map_or("-".into(), |found| format!("{} ms", millis(found.p50))),
        note: percentiles.map_or(String::new(), |found| {
            format!("p99 {} ms", millis(found.p99))
        }),
        is_bad: false,
    };
    let card = |name, value: String, note: String| FigureCard {
        name,
        value,
        note,
        is_bad: false,
    };
    vec![
        card(
            "output tokens/s",
            short(total.output_tokens_per_second),
            format!("{} with prompts", short(total.tokens_per_second)),
        ),
        latency("time to first token", total.time_to_first_token_seconds),
        latency("inter-token latency", report.inter_token_seconds),
        latency("end to end", total.end_to_end_seconds),
        card(
            "within objective",
            format!("{:.1} %", report.good_share() * 100.0),
            format!("{} requests/s", short(total.goodput)),
        ),
        card(
            "prompt cache hits",
            format!("{:.1} %", total.cache_hit_rate * 100.0),
            format!("of {} tokens", short(total.prompt_tokens as f64)),
        ),
        FigureCard {
            is_bad: total.failed > 0,
            ..card(
                "failed requests",
                total.failed.to_string(),
                format!("of {ended}, {} refused", total.refused),
            )
        },
    ]
}

fn plots(record: &RunRecord) -> Vec<PagePlot> {
    let (from, to) = record.span();
    let mut plots = vec![
        over_time("Output tokens per second", &output_rate(record), from, to),
        over_time("Requests in flight", &in_flight(record), from, to),
    ];
    let answers = || {
        record
            .requests
            .iter()
            .filter_map(|request| request.timed_answer())
    };
    let mut inter_token = Latencies::default();
    let gaps = record.inter_token.values();
    gaps.for_each(|gaps| inter_token.add(gaps));
    let latencies = [
        (
            "Time to first token, ms",
            Latencies::of(answers().filter_map(|answer| answer.first_token_seconds)),
        ),
        ("Inter-token latency, ms", inter_token),
        (
            "End-to-end latency, ms",
            Latencies::of(answers().map(|answer| answer.end_to_end_seconds)),
        ),
    ];
    for (title, latencies) in &latencies {
        let bars = super::series::distribution_of(latencies);
        plots.extend(bars.map(|bars| distribution(title, &bars)));
    }
    plots
}

fn latencies(report: &LiveReport) -> Vec<PageRow> {
    let total = &report.total;
    let rows = [
        ("time to first token", total.time_to_first_token_seconds),
        ("inter-token latency", report.inter_token_seconds),
        ("time per output token", total.time_per_output_token_seconds),
        ("end-to-end latency", total.end_to_end_seconds),
        ("sent later than intended", report.start_delay_seconds),
    ];
    let mut rows: Vec<PageRow> = rows
        .map(|(name, found)| latency_row(name.to_owned(), found))
        .into();
    for (class, figures) in report.classes.iter().filter(|_| report.classes.len() > 1) {
        let name = |of: &str| format!("{class}: {of}");
        rows.push(latency_row(
            name("time to first token"),
            figures.first_token_seconds,
        ));
        rows.push(latency_row(
            name("inter-token latency"),
            figures.inter_token_seconds,
        ));
    }
    rows
}

fn latency_row(name: String, found: Option<Percentiles>) -> PageRow {
    let cells = match found {
        Some(found) => [found.p50, found.p90, found.p99, found.max]
            .map(millis)
            .into(),
        None => vec!["-".to_owned(); 4],
    };
    let count = found.map_or(0, |found| found.count).to_string();
    PageRow {
        name,
        cells: std::iter::once(count).chain(cells).collect(),
    }
}

fn tenants(report: &LiveReport) -> Vec<PageRow> {
    let tenants = report.tenants.iter();
    tenants
        .map(|tenant| PageRow {
            name: tenant.tenant.clone(),
            cells: tenant_cells(&tenant.figures),
        })
        .collect()
}

fn tenant_cells(figures: &GroupReport) -> Vec<String> {
    let pair = |found: Option<Percentiles>| match found {
        Some(found) => [millis(found.p50), millis(found.p99)],
        None => ["-".to_owned(), "-".to_owned()],
    };
    let counts = [figures.complete, figures.refused, figures.failed];
    let mut cells: Vec<String> = counts.iter().map(u64::to_string).collect();
    cells.push(short(figures.output_tokens_per_second));
    cells.push(format!("{:.1} %", figures.cache_hit_rate * 100.0));
    cells.extend(pair(figures.time_to_first_token_seconds));
    cells.extend(pair(figures.time_per_output_token_seconds));
    cells
}

/// Writes seconds as milliseconds.
pub(super) fn millis(seconds: f64) -> String {
    format!("{:.1}", seconds * 1e3)
}
