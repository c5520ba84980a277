//! A report as people read it: alone, or as a line of a table of policies.

use std::fmt;

use super::report::{Report, Steps};
use crate::latency::Percentiles;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} under {}, seed {}, load {:.2} ({:.3} sessions/s): {:.0} s of virtual time, {:.1} s of real time",
            self.workload,
            self.policy,
            self.seed,
            self.load,
            self.sessions_per_second,
            self.seconds,
            self.wall_seconds
        )?;
        for (how, count) in self.ends.iter() {
            writeln!(f, "  {count} {}", how.replace('_', " "))?;
        }
        for (how, count) in self.refusals.iter() {
            writeln!(f, "  {count} refused: {}", how.replace('_', " "))?;
        }
        writeln!(f)?;
        self.work(f)?;
        self.latencies(f)?;
        self.tenants(f)?;
        self.shares(f)
    }
}

impl Report {
    fn work(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        line(f, "output tokens/s", self.output_tokens_per_second, 1)?;
        line(
            f,
            "  while computing",
            self.output_tokens_per_busy_second,
            1,
        )?;
        line(f, "good requests/s", self.goodput, 3)?;
        line(f, "recompute tax, %", 100.0 * self.recompute_tax, 2)?;
        line(f, "preemptions/request", self.preemptions_per_request, 3)?;
        line(f, "wasted time, %", 100.0 * self.wasted, 2)?;
        line(f, "plan + commit, µs p50", self.plan_micros.p50, 1)?;
        line(f, "  p99", self.plan_micros.p99, 1)?;
        if let Some(ratio) = &self.prediction {
            line(f, "actual/predicted p50", ratio.p50, 3)?;
            line(f, "  p99", ratio.p99, 3)?;
        }
        Ok(())
    }

    fn latencies(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads = ["p50", "p99", "max"]
            .map(|head| format!("{head:>11}"))
            .concat();
        writeln!(f, "\n{:<34}{heads}", "latency, ms")?;
        for (name, class) in &self.classes {
            row(
                f,
                &format!("{name}: time to first token"),
                class.first_token_seconds,
            )?;
            row(
                f,
                &format!("{name}: inter-token"),
                class.inter_token_seconds,
            )?;
        }
        writeln!(f, "\n{:<34}{heads}", "steps to first token")?;
        for (name, class) in &self.classes {
            let Steps { p50, p99, max } = class.steps_to_first_token;
            writeln!(f, "{name:<34}{p50:>11}{p99:>11}{max:>11}")?;
        }
        let heads = ["hits", "infinite"]
            .map(|head| format!("{head:>11}"))
            .concat();
        writeln!(f, "\n{:<34}{heads}", "prompt tokens cached, %")?;
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
        writeln!(f, "\ntenants, busiest first; time to first token, ms")?;
        for decile in &self.tenant_deciles {
            writeln!(
                f,
                "{:>6} tenants, {:>8} requests {:>13.1}{:>11.1}",
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
        writeln!(
            f,
            "\nbacklogged tenants, {} windows of 60 s",
            fairness.windows
        )?;
        line(f, "Jain's index", fairness.jain, 4)?;
        line(f, "  worst window", fairness.least_jain, 4)?;
        line(f, "share error, %", 100.0 * fairness.share_error, 2)?;
        line(
            f,
            "  in the long run, %",
            100.0 * fairness.long_run_share_error,
            2,
        )?;
        line(f, "largest lag, s", fairness.largest_lag_seconds, 2)
    }
}

fn line(f: &mut fmt::Formatter<'_>, name: &str, value: f64, digits: usize) -> fmt::Result {
    writeln!(f, "{name:<24}{value:>10.digits$}")
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, found: Option<Percentiles>) -> fmt::Result {
    let Some(Percentiles { p50, p99, max, .. }) = found else {
        return writeln!(f, "{name:<34}{0:>11}{0:>11}{0:>11}", "-");
    };
    let cells = [p50, p99, max].map(|seconds| format!("{:>11.1}", seconds * 1e3));
    writeln!(f, "{name:<34}{}", cells.concat())
}

/// One line for each policy, and two for the latencies of each class.
pub(super) fn table(reports: &[Report]) -> String {
    let mut text = format!(
        "{:<24}{:>9}{:>9}{:>9}{:>7}{:>7}{:>8}{:>8}{:>7}{:>9}\n",
        "policy",
        "complete",
        "tok/s",
        "good/s",
        "hit %",
        "tax %",
        "preempt",
        "waste %",
        "Jain",
        "plan µs"
    );
    for report in reports {
        let jain = report.fairness.as_ref();
        let jain = jain.map_or("-".to_owned(), |fairness| format!("{:.3}", fairness.jain));
        text += &format!(
            "{:<24}{:>9}{:>9.1}{:>9.3}{:>7.1}{:>7.2}{:>8.3}{:>8.2}{jain:>7}{:>9.1}\n",
            report.policy,
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

fn class_table(name: &str, reports: &[Report]) -> String {
    let head = format!("\n{name}, ms");
    let mut text = format!(
        "{head:<25}{:>22}{:>11}{:>20}{:>11}{:>11}\n",
        "first token p50", "p99", "inter-token p50", "p99", "max"
    );
    for report in reports {
        let class = &report.classes[name];
        let ms = |found: Option<Percentiles>, at: fn(&Percentiles) -> f64| {
            found.map_or("-".to_owned(), |found| format!("{:.1}", 1e3 * at(&found)))
        };
        let (first, inter) = (class.first_token_seconds, class.inter_token_seconds);
        text += &format!(
            "{:<24}{:>22}{:>11}{:>20}{:>11}{:>11}\n",
            report.policy,
            ms(first, |found| found.p50),
            ms(first, |found| found.p99),
            ms(inter, |found| found.p50),
            ms(inter, |found| found.p99),
            ms(inter, |found| found.max),
        );
    }
    text
}
