//! The report of a sweep, and the same as text.

use std::fmt;

use serde::Serialize;

use super::LiveReport;

/// A load and its figures.
#[derive(Serialize)]
pub(in crate::drive) struct SweepStep {
    /// The number of clients, or of sessions per second.
    pub(in crate::drive) size: f64,
    /// The share of requests within the objective, of those that did not disconnect.
    pub(in crate::drive) good_share: f64,
    /// Whether the load meets the objective.
    pub(in crate::drive) is_met: bool,
    #[serde(flatten)]
    pub(in crate::drive) report: LiveReport,
}

/// The steps of a sweep in the order of their loads.
#[derive(Serialize)]
pub(in crate::drive) struct SweepReport {
    /// The share of requests that must be within the objective.
    pub(in crate::drive) slo_share: f64,
    /// The highest load that meets the objective. `None`: no load does.
    pub(in crate::drive) highest: Option<f64>,
    /// The loads, smallest first.
    pub(in crate::drive) steps: Vec<SweepStep>,
}

impl fmt::Display for SweepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<18}{:>9}{:>8}{:>8}{:>11}{:>11}{:>11}{:>11}{:>11}",
            "load",
            "requests",
            "failed",
            "good %",
            "output/s",
            "TTFT p50",
            "TTFT p99",
            "TPOT p50",
            "TPOT p99"
        )?;
        for step in &self.steps {
            let total = &step.report.total;
            let first = total.time_to_first_token_seconds;
            let per_token = total.time_per_output_token_seconds;
            let millis = |seconds: Option<f64>| match seconds {
                Some(seconds) => format!("{:.1}", seconds * 1e3),
                None => "-".into(),
            };
            let is_highest = self.highest == Some(step.size);
            writeln!(
                f,
                "{:<18}{:>9}{:>8}{:>8.1}{:>11.1}{:>11}{:>11}{:>11}{:>11}{}",
                step.report.header.load,
                total.complete,
                total.failed,
                step.good_share * 100.0,
                total.output_tokens_per_second,
                millis(first.map(|found| found.p50)),
                millis(first.map(|found| found.p99)),
                millis(per_token.map(|found| found.p50)),
                millis(per_token.map(|found| found.p99)),
                if is_highest { " *" } else { "" }
            )?;
        }
        let highest = self
            .steps
            .iter()
            .find(|step| self.highest == Some(step.size));
        match highest {
            Some(step) => writeln!(
                f,
                "\n* highest load within the objective: {}, {:.1} output tokens/s",
                step.report.header.load, step.report.total.output_tokens_per_second
            ),
            None => writeln!(f, "\nno load is within the objective"),
        }
    }
}
