//! The last minutes of the metrics that the page's charts show, so that the charts begin with them.
//!
//! Invariant: the ring has at most `SAMPLES` samples, and a sample has only series of `CHARTED`. So
//! neither tenants nor time make it grow.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The time between two samples.
pub(super) const INTERVAL: Duration = Duration::from_secs(5);
/// Five minutes, which is the time of a chart.
const SAMPLES: usize = 60;

/// What the charts show. A histogram counts by its buckets, and a response by its error.
const CHARTED: [&str; 11] = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "sterna_kv_pages",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
];
const RESPONSES: &str = "sterna_http_responses_total";
/// How the labels of an error begin the value of its status.
const ERRORS: [&str; 2] = ["status=\"4", "status=\"5"];

/// The charted series at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecentSample {
    /// How long ago the moment was.
    pub age: Duration,
    /// The series in Prometheus's text format, without comments.
    pub text: String,
}

/// The samples of the last minutes, oldest first.
#[derive(Default)]
pub(super) struct RecentMetrics {
    samples: VecDeque<(Instant, String)>,
}

impl RecentMetrics {
    /// Keeps the charted series of `text`, the metrics at `at`.
    pub(super) fn keep(&mut self, at: Instant, text: &str) {
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        let lines = text.split_inclusive('\n').filter(|line| is_charted(line));
        self.samples.push_back((at, lines.collect()));
    }

    /// Returns the samples as of `now`, oldest first.
    pub(super) fn samples(&self, now: Instant) -> Vec<RecentSample> {
        let samples = self.samples.iter().map(|(at, text)| RecentSample {
            age: now.saturating_duration_since(*at),
            text: text.clone(),
        });
        samples.collect()
    }
}

fn is_charted(line: &str) -> bool {
    let name = line.split(['{', ' ']).next().unwrap_or_default();
    CHARTED.contains(&name) || name == RESPONSES && ERRORS.iter().any(|error| line.contains(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_keeps_the_last_minutes_and_no_more() {
        let (mut recent, start) = (RecentMetrics::default(), Instant::now());
        let at = |sample: u32| start + INTERVAL * sample;
        for sample in 0..100 {
            recent.keep(at(sample), &format!("vllm:num_requests_running {sample}\n"));
        }
        let kept = recent.samples(at(99));
        assert_eq!(kept.len(), SAMPLES);
        assert_eq!(kept[0].age, INTERVAL * 59);
        assert_eq!(kept[0].text, "vllm:num_requests_running 40\n");
        assert_eq!(kept[59].age, Duration::ZERO);
    }

    #[test]
    fn a_sample_has_only_what_the_charts_show() {
        let charted = "\
            vllm:num_requests_running{engine=\"0\"} 1\n\
            vllm:inter_token_latency_seconds_bucket{le=\"0.1\"} 4\n\
            sterna_http_responses_total{route=\"/v1/models\",status=\"429\"} 2\n";
        let other = "\
            # TYPE vllm:num_requests_running gauge\n\
            vllm:num_requests_running_now 1\n\
            vllm:inter_token_latency_seconds_sum{engine=\"0\"} 4\n\
            sterna_http_responses_total{route=\"/v1/models\",status=\"200\"} 5\n\
            sterna_tenant_tokens_total{tenant=\"a\"} 3\n";
        let mut recent = RecentMetrics::default();
        let now = Instant::now();
        recent.keep(now, &format!("{other}{charted}"));
        assert_eq!(recent.samples(now)[0].text, charted);
    }
}
