//! Prints the report of one policy, or a comparison of several.

use std::fmt;

use super::report::{FleetLabel, PhaseFigures, SimulationReport, StepCounts};
use crate::latency::Percentiles;

impl fmt::Display for SimulationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let label = &self.label;
        writeln!(
            f,
            "workload {}, policy {}, seed {}, load {:.2} ({:.3} sessions/s)",
            label.workload, label.policy, label.seed, label.load, label.sessions_per_second,
        )?;
        if let Some(fleet) = label.fleet {
            let FleetLabel { machines, router } = fleet;
            writeln!(f, "{machines} machines behind a router: {router}")?;
        }
        writeln!(
            f,
            "{:.0} s of virtual time, simulated in {:.1} s",
            self.seconds, self.wall_seconds
        )?;
        for (end, count) in &self.ends {
            writeln!(f, "  {count} {}", end.replace('_', " "))?;
        }
        for (reason, count) in &self.refusals {
            writeln!(f, "  {count} rejected: {}", reason.replace('_', " "))?;
        }
        writeln!(f)?;
        self.work(f)?;
        self.machines(f)?;
        self.latencies(f)?;
        self.phases(f)?;
        self.prefix_hits(f)?;
        self.tenants(f)?;
        self.shares(f)
    }
}

impl SimulationReport {
    fn work(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let busy = self.output_tokens_per_busy_second;
        line(f, "output tokens/s", self.output_tokens_per_second, 1)?;
        line(f, "  per busy second", busy, 1)?;
        line(f, "requests/s within objective", self.goodput, 3)?;
        line(f, "prefill recomputed, %", 100.0 * self.recompute_tax, 2)?;
        line(
            f,
            "preemptions per request",
            self.preemptions_per_request,
            3,
        )?;
        line(f, "machine time wasted, %", 100.0 * self.wasted, 2)?;
        line(f, "plan and commit p50, µs", self.plan_micros.p50, 1)?;
        line(f, "  p99", self.plan_micros.p99, 1)?;
        if let Some(ratio) = &self.prediction {
            line(f, "step time/prediction p50", ratio.p50, 3)?;
            line(f, "  p99", ratio.p99, 3)?;
        }
        Ok(())
    }

    fn machines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(fleet) = &self.fleet else {
            return Ok(());
        };
        heads(f, "machines", &[])?;
        line(f, "most tokens over the mean", fleet.token_imbalance, 2)?;
        line(
            f,
            "most machine time over the mean",
            fleet.busy_imbalance,
            2,
        )?;
        line(f, "machines used", fleet.used_machines as f64, 0)?;
        line(f, "failures", fleet.failures as f64, 0)?;
        line(f, "requests sent again", fleet.sent_again as f64, 0)
    }

    fn latencies(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        heads(f, "latency, ms", &["p50", "p99", "max"])?;
        for (name, class) in &self.classes {
            let (first, inter) = (class.first_token_seconds, class.inter_token_seconds);
            row(f, &format!("{name}: time to first token"), first)?;
            row(f, &format!("{name}: inter-token latency"), inter)?;
        }
        heads(f, "steps to first token", &["p50", "p99", "max"])?;
        for (name, class) in &self.classes {
            let StepCounts { p50, p99, max } = class.steps_to_first_token;
            writeln!(f, "{name:<34}{p50:>11}{p99:>11}{max:>11}")?;
        }
        Ok(())
    }

    fn phases(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(phases) = &self.phases else {
            return Ok(());
        };
        heads(f, "around the disturbance", &["before", "during", "after"])?;
        let all = [&phases.before, &phases.during, &phases.after];
        let mut line = |name: &str, figure: &dyn Fn(&PhaseFigures) -> Option<f64>| {
            let cells = all.map(|phase| match figure(phase) {
                Some(figure) => format!("{figure:>11.1}"),
                None => format!("{:>11}", "-"),
            });
            writeln!(f, "{name:<34}{}", cells.concat())
        };
        line("seconds", &|phase| Some(phase.seconds))?;
        line("output tokens/s", &|phase| {
            Some(phase.output_tokens_per_second)
        })?;
        let ms = |found: Option<Percentiles>, at: fn(Percentiles) -> f64| {
            found.map(|found| 1e3 * at(found))
        };
        let first = |phase: &PhaseFigures| phase.first_token_seconds;
        let inter = |phase: &PhaseFigures| phase.inter_token_seconds;
        line("time to first token p50, ms", &|phase| {
            ms(first(phase), |found| found.p50)
        })?;
        line("  p99", &|phase| ms(first(phase), |found| found.p99))?;
        line("inter-token latency p50, ms", &|phase| {
            ms(inter(phase), |found| found.p50)
        })?;
        line("  p99", &|phase| ms(inter(phase), |found| found.p99))
    }

    fn prefix_hits(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        heads(f, "prompt tokens from cache, %", &["actual", "infinite"])?;
        for (name, class) in &self.classes {
            let hits = 100.0 * class.prefix.hits;
            let infinite = 100.0 * class.prefix.infinite_cache_hits;
            writeln!(f, "{name:<34}{hits:>11.1}{infinite:>11.1}")?;
        }
        Ok(())
    }

    fn tenants(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.tenant_deciles.len() < 2 {
            return Ok(());
        }
        heads(f, "time to first token, ms", &["p50", "p99"])?;
        writeln!(f, "(tenants in at most ten groups, busiest first)")?;
        for decile in &self.tenant_deciles {
            writeln!(
                f,
                "{:>6} tenants, {:>8} requests {:>12.1}{:>11.1}",
                decile.tenants,
                decile.requests,
                decile.first_token_p50 * 1e3,
                decile.first_token_p99 * 1e3
            )?;
        }
        Ok(())
    }

    fn shares(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(fairness) = &self.fairness else {
            return Ok(());
        };
        let long_run = 100.0 * fairness.long_run_share_error;
        writeln!(
            f,
            "\nfairness among backlogged tenants, {} windows of 60 s",
            fairness.windows
        )?;
        line(f, "Jain's index, mean", fairness.jain, 4)?;
        line(f, "  worst window", fairness.least_jain, 4)?;
        line(f, "share error, mean, %", 100.0 * fairness.share_error, 2)?;
        line(f, "  over the long run, %", long_run, 2)?;
        line(f, "largest lag, s", fairness.largest_lag_seconds, 2)
    }
}

fn line(f: &mut fmt::Formatter<'_>, name: &str, value: f64, digits: usize) -> fmt::Result {
    writeln!(f, "{name:<34}{value:>11.digits$}")
}

fn heads(f: &mut fmt::Formatter<'_>, title: &str, columns: &[&str]) -> fmt::Result {
    let columns: String = columns.iter().map(|name| format!("{name:>11}")).collect();
    writeln!(f, "\n{title:<34}{columns}")
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, found: Option<Percentiles>) -> fmt::Result {
    let Some(Percentiles { p50, p99, max, .. }) = found else {
        return writeln!(f, "{name:<34}{0:>11}{0:>11}{0:>11}", "-");
    };
    let cells = [p50, p99, max].map(|seconds| format!("{:>11.1}", seconds * 1e3));
    writeln!(f, "{name:<34}{}", cells.concat())
}

/// Returns a table of policies, followed by a table of latencies for each class.
pub(super) fn comparison(reports: &[SimulationReport]) -> String {
    let mut text = format!(
        "{:<16}{:>9}{:>10}{:>9}{:>10}{:>14}{:>11}{:>10}{:>7}{:>9}\n",
        "policy",
        "complete",
        "output/s",
        "good/s",
        "cached %",
        "recomputed %",
        "preempted",
        "wasted %",
        "Jain",
        "plan µs"
    );
    for report in reports {
        let jain = report.fairness.as_ref();
        let jain = jain.map_or("-".to_owned(), |fairness| format!("{:.3}", fairness.jain));
        text += &format!(
            "{:<16}{:>9}{:>10.1}{:>9.3}{:>10.1}{:>14.2}{:>11.3}{:>10.2}{jain:>7}{:>9.1}\n",
            report.label.policy,
            report.complete(),
            report.output_tokens_per_second,
            report.goodput,
            100.0 * report.prefix.hits,
            100.0 * report.recompute_tax,
            report.preemptions_per_request,
            100.0 * report.wasted,
            report.plan_micros.p50,
        );
    }
    let names = reports.first().map(|report| report.classes.keys());
    for name in names.into_iter().flatten() {
        text += &class_table(name, reports);
    }
    text
}

fn class_table(name: &str, reports: &[SimulationReport]) -> String {
    let mut text = format!(
        "\n{:<24}{:>22}{:>11}{:>20}{:>11}{:>11}\n",
        format!("{name}, ms"),
        "first token p50",
        "p99",
        "inter-token p50",
        "p99",
        "max"
    );
    for report in reports {
        let class = &report.classes[name];
        let ms = |found: Option<Percentiles>, at: fn(&Percentiles) -> f64| {
            found.map_or("-".to_owned(), |found| format!("{:.1}", 1e3 * at(&found)))
        };
        let (first, inter) = (class.first_token_seconds, class.inter_token_seconds);
        text += &format!(
            "{:<24}{:>22}{:>11}{:>20}{:>11}{:>11}\n",
            report.label.policy,
            ms(first, |found| found.p50),
            ms(first, |found| found.p99),
            ms(inter, |found| found.p50),
            ms(inter, |found| found.p99),
            ms(inter, |found| found.max),
        );
    }
    text
}
