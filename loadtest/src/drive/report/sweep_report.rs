//! The report of a sweep, and the same as text.

use std::fmt;

use serde::Serialize;

use super::LiveReport;
use super::text::fmt_facts;
use crate::drive::facts::RunFacts;

/// A load and its figures.
#[derive(Serialize)]
pub(in crate::drive) struct SweepStep {
    /// The number of clients, or of sessions per second.
    pub(in crate::drive) size: f64,
    /// The share of requests within the objective, of those that did not disconnect.
    pub(in crate::drive) good_share: f64,
    /// Whether the load meets the objective.
    pub(in crate::drive) is_met: bool,
    /// Whether this is the repetition of a load, after the search.
    pub(in crate::drive) is_repeated: bool,
    #[serde(flatten)]
    pub(in crate::drive) report: LiveReport,
}

/// The steps of a sweep in the order of their loads.
#[derive(Serialize)]
pub(in crate::drive) struct SweepReport {
    /// The share of requests that must be within the objective.
    pub(in crate::drive) slo_share: f64,
    /// The circumstances of the sweep.
    pub(in crate::drive) facts: RunFacts,
    /// The highest load that meets the objective in the search. `None`: no load does.
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
            writeln!(
                f,
                "{:<18}{:>9}{:>8}{:>8.1}{:>11.1}{:>11}{:>11}{:>11}{:>11}{}",
                step.name(),
                total.complete,
                total.failed,
                step.good_share * 100.0,
                total.output_tokens_per_second,
                millis(first.map(|found| found.p50)),
                millis(first.map(|found| found.p99)),
                millis(per_token.map(|found| found.p50)),
                millis(per_token.map(|found| found.p99)),
                if self.is_highest(step) { " *" } else { "" }
            )?;
        }
        match self.best() {
            Some(step) => writeln!(
                f,
                "\n* highest load within the objective: {}, {:.1} output tokens/s{}",
                step.report.header.load,
                step.report.total.output_tokens_per_second,
                self.confirmation()
            )?,
            None => writeln!(f, "\nno load is within the objective")?,
        }
        fmt_facts(f, &self.facts)
    }
}

impl SweepStep {
    /// Returns the load, and whether the step repeats it.
    pub(super) fn name(&self) -> String {
        let again = if self.is_repeated { " again" } else { "" };
        format!("{}{again}", self.report.header.load)
    }
}

impl SweepReport {
    /// Returns the first run of the highest load that meets the objective.
    pub(super) fn best(&self) -> Option<&SweepStep> {
        self.steps.iter().find(|step| self.is_highest(step))
    }

    /// Returns whether `step` is the first run of the highest load.
    pub(super) fn is_highest(&self, step: &SweepStep) -> bool {
        self.highest == Some(step.size) && !step.is_repeated
    }

    /// Says what the repetition of the highest load adds to the first run.
    pub(super) fn confirmation(&self) -> String {
        let mut repeated = self.steps.iter().filter(|step| step.is_repeated);
        let Some(again) = repeated.find(|step| self.highest == Some(step.size)) else {
            return String::new();
        };
        let rate = again.report.total.output_tokens_per_second;
        let missed = if again.is_met { "" } else { ", missed" };
        format!(" (again: {rate:.1}{missed})")
    }
}
