//! The report of a run: counts, rates and percentiles.
//!
//! Invariant: only complete requests contribute latencies and tokens. Others are only counted.
//!
//! Invariant: JSON has seconds; the table has milliseconds.

mod html;
mod plot;
mod series;
mod sweep_page;
mod sweep_report;
mod table;
mod text;

use std::collections::BTreeMap;

use serde::Serialize;

use super::facts::RunFacts;
use super::histograms::ServerReport;
use super::objective::LatencyObjective;
use super::record::{RequestEnd, RequestRecord, RunRecord};
use crate::latency::{Latencies, Percentiles};
pub(super) use html::write_html;
pub(super) use sweep_page::write_sweep_html;
pub(super) use sweep_report::{SweepReport, SweepStep};
pub(super) use table::write_csv;

/// What a report says about its run before the figures.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct RunHeader {
    /// What started the sessions, such as "16 clients".
    pub(super) load: String,
    /// The address of the server.
    pub(super) url: String,
    /// The seed of the sessions.
    pub(super) seed: u64,
    /// The number of requests that were sent before those that count.
    pub(super) warm_up: u64,
}

/// The figures of a whole run.
#[derive(Serialize)]
pub(super) struct LiveReport {
    #[serde(flatten)]
    pub(super) header: RunHeader,
    #[serde(flatten)]
    pub(super) total: GroupReport,
    /// Failed requests by reason.
    pub(super) failures: BTreeMap<String, u64>,
    /// Complete requests whose client read slowly. They have no latencies.
    pub(super) slow_readers: u64,
    /// The time from the start of the first request to the end of the last one.
    pub(super) seconds: f64,
    /// Complete requests over the time of the run.
    pub(super) requests_per_second: f64,
    /// The latency objective.
    pub(super) objective: LatencyObjective,
    /// The time between two tokens of one answer.
    pub(super) inter_token_seconds: Option<Percentiles>,
    /// How much later than intended requests were sent. It shows whether the load test kept up.
    pub(super) start_delay_seconds: Option<Percentiles>,
    /// The latencies of each class of the workload.
    pub(super) classes: BTreeMap<&'static str, ClassReport>,
    /// The figures of each tenant that sent a request.
    pub(super) tenants: Vec<TenantReport>,
    /// The circumstances of the run. A sweep has the same for all its loads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) facts: Option<RunFacts>,
    /// What the server's own histograms say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) server: Option<ServerReport>,
}

/// The figures of a group of requests.
#[derive(Serialize)]
pub(super) struct GroupReport {
    /// Requests whose whole answer arrived.
    pub(super) complete: u64,
    /// Requests whose client disconnected on purpose.
    pub(super) left: u64,
    /// Requests that failed, refused ones among them.
    pub(super) failed: u64,
    /// Requests that the server refused with status 429 or 503.
    pub(super) refused: u64,
    /// Tokens of all prompts.
    pub(super) prompt_tokens: u64,
    /// Prompt tokens that came from the prefix cache.
    pub(super) cached_tokens: u64,
    /// Cached tokens over prompt tokens.
    pub(super) cache_hit_rate: f64,
    /// Tokens of all answers.
    pub(super) output_tokens: u64,
    /// Output tokens over the time of the run.
    pub(super) output_tokens_per_second: f64,
    /// Prompt and output tokens over the time of the run.
    pub(super) tokens_per_second: f64,
    /// Complete requests that met the latency objective.
    pub(super) good: u64,
    /// Those requests over the time of the run.
    pub(super) goodput: f64,
    /// The time from a request's intended start to its first piece of text.
    pub(super) time_to_first_token_seconds: Option<Percentiles>,
    /// The time from the first to the last piece of text over the tokens after the first one.
    pub(super) time_per_output_token_seconds: Option<Percentiles>,
    /// The time from a request's intended start to the end of its stream.
    pub(super) end_to_end_seconds: Option<Percentiles>,
}

/// The latencies of one class.
#[derive(Serialize)]
pub(super) struct ClassReport {
    /// The time from a request's intended start to its first piece of text.
    pub(super) first_token_seconds: Option<Percentiles>,
    /// The time between two tokens of one answer.
    pub(super) inter_token_seconds: Option<Percentiles>,
}

/// The figures of one tenant.
#[derive(Serialize)]
pub(super) struct TenantReport {
    /// The name in the file of keys, or the number.
    pub(super) tenant: String,
    #[serde(flatten)]
    pub(super) figures: GroupReport,
}

impl LiveReport {
    /// Computes the figures of `record`. `tenant_names` are indexed by tenant; a tenant without a
    /// name gets its number.
    pub(super) fn new(
        header: RunHeader,
        record: &RunRecord,
        tenant_names: &[String],
        objective: LatencyObjective,
    ) -> LiveReport {
        let (from, to) = record.span();
        let span = RunSpan {
            seconds: to - from,
            objective,
        };
        let all: Vec<&RequestRecord> = record.requests.iter().collect();
        let mut tenants: BTreeMap<u32, Vec<&RequestRecord>> = BTreeMap::new();
        let mut failures: BTreeMap<String, u64> = BTreeMap::new();
        for request in &record.requests {
            let tenant = tenants.entry(request.identity.tenant).or_default();
            tenant.push(request);
            if let RequestEnd::Failed(failure) = &request.end {
                *failures.entry(failure.to_string()).or_default() += 1;
            }
        }
        let name = |tenant: u32| match tenant_names.get(tenant as usize) {
            Some(name) => name.clone(),
            None => tenant.to_string(),
        };
        let mut inter_token = Latencies::default();
        let gaps = record.inter_token.values();
        gaps.for_each(|gaps| inter_token.add(gaps));
        let slow = all.iter().filter(|request| request.identity.is_slow);
        let total = span.group(&all);
        LiveReport {
            header,
            failures,
            slow_readers: slow.filter(|request| request.answer().is_some()).count() as u64,
            seconds: span.seconds,
            requests_per_second: span.rate(total.complete),
            total,
            objective,
            facts: None,
            server: None,
            inter_token_seconds: inter_token.percentiles(),
            start_delay_seconds: percentiles(all.iter().map(|request| request.late_seconds)),
            classes: classes(record),
            tenants: tenants
                .iter()
                .map(|(tenant, requests)| TenantReport {
                    tenant: name(*tenant),
                    figures: span.group(requests),
                })
                .collect(),
        }
    }
}

impl LiveReport {
    /// Returns the share of requests that met the latency objective. Requests whose client
    /// disconnected or read slowly are left out.
    pub(super) fn good_share(&self) -> f64 {
        let judged = self.total.complete + self.total.failed - self.slow_readers;
        ratio(self.total.good as f64, judged as f64)
    }
}

/// What all groups of a run have in common.
struct RunSpan {
    seconds: f64,
    objective: LatencyObjective,
}

impl RunSpan {
    fn rate(&self, count: u64) -> f64 {
        ratio(count as f64, self.seconds)
    }

    fn group(&self, requests: &[&RequestRecord]) -> GroupReport {
        let count = |is: fn(&RequestEnd) -> bool| {
            requests.iter().filter(|request| is(&request.end)).count() as u64
        };
        let answers = || requests.iter().filter_map(|request| request.answer());
        let timed = || requests.iter().filter_map(|request| request.timed_answer());
        let prompt_tokens = answers().map(|answer| answer.prompt_tokens).sum();
        let cached_tokens = answers().map(|answer| answer.cached_tokens).sum();
        let output_tokens = answers().map(|answer| answer.output_tokens).sum();
        let good = timed().filter(|answer| self.objective.is_met_by(answer));
        let good = good.count() as u64;
        GroupReport {
            complete: answers().count() as u64,
            left: count(|end| matches!(end, RequestEnd::Left)),
            failed: count(|end| matches!(end, RequestEnd::Failed(_))),
            refused: count(
                |end| matches!(end, RequestEnd::Failed(failure) if failure.is_refusal()),
            ),
            prompt_tokens,
            cached_tokens,
            cache_hit_rate: ratio(cached_tokens as f64, prompt_tokens as f64),
            output_tokens,
            output_tokens_per_second: self.rate(output_tokens),
            tokens_per_second: self.rate(prompt_tokens + output_tokens),
            good,
            goodput: self.rate(good),
            time_to_first_token_seconds: percentiles(
                timed().filter_map(|answer| answer.first_token_seconds),
            ),
            time_per_output_token_seconds: percentiles(
                timed().filter_map(|answer| answer.per_output_token_seconds),
            ),
            end_to_end_seconds: percentiles(timed().map(|answer| answer.end_to_end_seconds)),
        }
    }
}

fn classes(record: &RunRecord) -> BTreeMap<&'static str, ClassReport> {
    let mut first_tokens: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
    for request in &record.requests {
        if let Some(answer) = request.timed_answer() {
            let class = first_tokens.entry(request.identity.class).or_default();
            class.extend(answer.first_token_seconds);
        }
    }
    let report = |(class, seconds): (&'static str, Vec<f64>)| {
        let gaps = record.inter_token.get(class);
        let report = ClassReport {
            first_token_seconds: percentiles(seconds.into_iter()),
            inter_token_seconds: gaps.and_then(Latencies::percentiles),
        };
        (class, report)
    };
    first_tokens.into_iter().map(report).collect()
}

fn percentiles(seconds: impl Iterator<Item = f64>) -> Option<Percentiles> {
    Latencies::of(seconds).percentiles()
}

fn ratio(of: f64, all: f64) -> f64 {
    if all > 0.0 { of / all } else { 0.0 }
}

#[cfg(test)]
mod tests;
