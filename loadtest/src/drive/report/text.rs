//! The report as text.

use std::cmp::Reverse;
use std::fmt;

use super::super::facts::RunFacts;
use super::super::histograms::{BucketRange, ServerReport};
use super::{LiveReport, TenantReport};
use crate::latency::Percentiles;

/// The most tenants that the text has.
const TENANTS: usize = 20;

impl fmt::Display for LiveReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_outcomes(f)?;
        self.fmt_rates(f)?;
        self.fmt_latencies(f)?;
        if self.tenants.len() > 1 {
            self.fmt_tenants(f)?;
        }
        if let Some(server) = &self.server {
            fmt_server(f, server)?;
        }
        match &self.facts {
            Some(facts) => fmt_facts(f, facts),
            None => Ok(()),
        }
    }
}

/// Writes the circumstances of a run.
pub(super) fn fmt_facts(f: &mut fmt::Formatter<'_>, facts: &RunFacts) -> fmt::Result {
    writeln!(f)?;
    for (name, value) in facts.rows() {
        writeln!(f, "{name:<26}{value}")?;
    }
    if !facts.server_settings.is_empty() {
        writeln!(f, "server's settings")?;
    }
    for (name, value) in &facts.server_settings {
        writeln!(f, "  {name:<24}{value}")?;
    }
    Ok(())
}

impl LiveReport {
    fn fmt_outcomes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (header, total) = (&self.header, &self.total);
        write!(f, "{} to {}, seed {}", header.load, header.url, header.seed)?;
        if header.warm_up > 0 {
            write!(f, ", after a warm-up of {} requests", header.warm_up)?;
        }
        let (complete, failed) = (total.complete, total.failed);
        write!(f, "\n{complete} requests complete, {failed} failed")?;
        if total.refused > 0 {
            write!(f, " ({} of them refused)", total.refused)?;
        }
        if total.left > 0 {
            write!(f, ", {} disconnected on purpose", total.left)?;
        }
        writeln!(f, ", in {:.2} s", self.seconds)?;
        for (failure, count) in &self.failures {
            writeln!(f, "  {count} x {failure}")?;
        }
        Ok(())
    }

    fn fmt_rates(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (total, objective) = (&self.total, self.objective);
        let rates = [
            ("output tokens/s", total.output_tokens_per_second, 1),
            ("prompt + output tokens/s", total.tokens_per_second, 1),
            ("complete requests/s", self.requests_per_second, 2),
        ];
        writeln!(f)?;
        for (name, rate, digits) in rates {
            writeln!(f, "{name:<26}{rate:>10.digits$}")?;
        }
        writeln!(
            f,
            "{:<26}{:>10.2}  ({} requests: first token in {} ms, then {} ms a token)",
            "goodput, requests/s",
            total.goodput,
            total.good,
            objective.first_token_seconds * 1e3,
            objective.per_output_token_seconds * 1e3,
        )?;
        writeln!(f, "{:<26}{:>10}", "output tokens", total.output_tokens)?;
        writeln!(
            f,
            "{:<26}{:>10}  ({:.1} % from the prefix cache)",
            "prompt tokens",
            total.prompt_tokens,
            total.cache_hit_rate * 100.0
        )?;
        if self.slow_readers > 0 {
            writeln!(
                f,
                "{:<26}{:>10}  (not in the latencies)",
                "answers read slowly", self.slow_readers
            )?;
        }
        Ok(())
    }

    fn fmt_latencies(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = &self.total;
        writeln!(
            f,
            "\n{:<26}{:>10}{:>10}{:>10}{:>10}",
            "latency, ms", "p50", "p90", "p99", "max"
        )?;
        row(f, "time to first token", total.time_to_first_token_seconds)?;
        row(f, "inter-token latency", self.inter_token_seconds)?;
        row(
            f,
            "time per output token",
            total.time_per_output_token_seconds,
        )?;
        row(f, "end-to-end latency", total.end_to_end_seconds)?;
        row(f, "sent later than intended", self.start_delay_seconds)?;
        for (name, class) in self.classes.iter().filter(|_| self.classes.len() > 1) {
            writeln!(f, "class {name}")?;
            row(f, "  time to first token", class.first_token_seconds)?;
            row(f, "  inter-token latency", class.inter_token_seconds)?;
        }
        Ok(())
    }

    fn fmt_tenants(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{:<14}{:>9}{:>8}{:>8}{:>10}{:>9} {:>20}{:>20}",
            "tenant",
            "complete",
            "refused",
            "failed",
            "output/s",
            "cached %",
            "TTFT p50/p99, ms",
            "TPOT p50/p99, ms"
        )?;
        let mut tenants: Vec<&TenantReport> = self.tenants.iter().collect();
        tenants.sort_by_key(|tenant| Reverse(tenant.figures.complete));
        for tenant in tenants.iter().take(TENANTS) {
            let figures = &tenant.figures;
            writeln!(
                f,
                "{:<14}{:>9}{:>8}{:>8}{:>10.1}{:>9.1} {:>20}{:>20}",
                tenant.tenant,
                figures.complete,
                figures.refused,
                figures.failed,
                figures.output_tokens_per_second,
                figures.cache_hit_rate * 100.0,
                pair(figures.time_to_first_token_seconds),
                pair(figures.time_per_output_token_seconds),
            )?;
        }
        let more = tenants.len().saturating_sub(TENANTS);
        if more > 0 {
            writeln!(f, "and {more} tenants with fewer requests; --json has all")?;
        }
        Ok(())
    }
}

fn fmt_server(f: &mut fmt::Formatter<'_>, server: &ServerReport) -> fmt::Result {
    let range = |range: BucketRange| match range.to {
        Some(to) => format!("{} to {}", range.from * 1e3, to * 1e3),
        None => format!("over {}", range.from * 1e3),
    };
    writeln!(
        f,
        "\n{:<26}{:>10}{:>18}{:>18}{:>10}",
        "server's histograms, ms", "mean", "p50", "p99", "clients"
    )?;
    for (name, latency) in [
        ("time to first token", &server.time_to_first_token),
        ("end-to-end latency", &server.end_to_end),
    ] {
        writeln!(
            f,
            "{name:<26}{:>10.1}{:>18}{:>18}{:>10}",
            latency.mean * 1e3,
            range(latency.p50),
            range(latency.p99),
            if latency.agrees { "agree" } else { "differ" }
        )?;
    }
    Ok(())
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, percentiles: Option<Percentiles>) -> fmt::Result {
    write!(f, "{name:<26}")?;
    match percentiles {
        Some(Percentiles {
            p50, p90, p99, max, ..
        }) => {
            let cells = [p50, p90, p99, max].map(|seconds| format!("{:>10.1}", seconds * 1e3));
            writeln!(f, "{}", cells.concat())
        }
        None => writeln!(f, "{0:>10}{0:>10}{0:>10}{0:>10}", "-"),
    }
}

fn pair(percentiles: Option<Percentiles>) -> String {
    match percentiles {
        Some(Percentiles { p50, p99, .. }) => format!("{:.1} / {:.1}", p50 * 1e3, p99 * 1e3),
        None => "-".into(),
    }
}
