//! The report of a run: counts, rates and percentiles, as a table and as JSON.
//!
//! Invariant: only complete requests contribute latencies and tokens. Others are only counted.
//!
//! Invariant: JSON has seconds; the table has milliseconds.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::outcome::{ChatOutcome, Timing};
use crate::latency::{Latencies, Percentiles};

/// Collects outcomes during a run.
#[derive(Default)]
pub(super) struct LiveRecorder {
    counts: LiveReport, // Without rates and percentiles, which follow from the whole run.
    all: ClassLatencies,
    classes: BTreeMap<&'static str, ClassLatencies>,
    end_to_end: Latencies,
}

/// The latencies of one class of sessions.
#[derive(Default)]
struct ClassLatencies {
    first_text: Latencies,
    inter_token: Latencies,
}

/// The figures of a whole run.
#[derive(Default, Serialize)]
pub(super) struct LiveReport {
    /// Requests whose whole answer arrived.
    pub(super) complete: u64,
    /// Requests whose client disconnected on purpose.
    pub(super) left: u64,
    /// Requests that failed.
    pub(super) failed: u64,
    /// Failed requests by reason.
    pub(super) failures: BTreeMap<String, u64>,
    /// The time from the first request sent to the last one ended.
    pub(super) seconds: f64,
    /// Tokens of all prompts.
    pub(super) prompt_tokens: u64,
    /// Prompt tokens that came from the prefix cache.
    pub(super) cached_tokens: u64,
    /// Tokens of all answers.
    pub(super) output_tokens: u64,
    /// Output tokens over the time of the run.
    pub(super) output_tokens_per_second: f64,
    /// Complete requests over the time of the run.
    pub(super) requests_per_second: f64,
    /// The time from sending a request to its first piece of text.
    pub(super) time_to_first_token_seconds: Option<Percentiles>,
    /// The time between two pieces of text of one answer.
    pub(super) inter_token_seconds: Option<Percentiles>,
    /// The time from sending a request to the end of its stream.
    pub(super) end_to_end_seconds: Option<Percentiles>,
    /// The latencies of each class of the workload.
    pub(super) classes: BTreeMap<&'static str, ClassReport>,
}

/// The latencies of one class.
#[derive(Serialize)]
pub(super) struct ClassReport {
    /// The time from sending a request to its first piece of text.
    pub(super) first_token_seconds: Option<Percentiles>,
    /// The time between two pieces of text of one answer.
    pub(super) inter_token_seconds: Option<Percentiles>,
}

impl ClassLatencies {
    fn record(&mut self, timing: &Timing) {
        if let Some(latency) = timing.first_text {
            self.first_text.record_micros(micros(latency));
        }
        for &gap in &timing.gaps {
            self.inter_token.record_micros(micros(gap));
        }
    }

    fn report(&self) -> ClassReport {
        ClassReport {
            first_token_seconds: self.first_text.percentiles(),
            inter_token_seconds: self.inter_token.percentiles(),
        }
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros() as u64
}

impl LiveRecorder {
    /// Adds the outcome of a request of `class`.
    pub(super) fn record(&mut self, class: &'static str, outcome: &ChatOutcome) {
        let counts = &mut self.counts;
        let answer = match outcome {
            ChatOutcome::Complete(answer) => answer,
            ChatOutcome::Disconnected => {
                counts.left += 1;
                return;
            }
            ChatOutcome::Failed(failure) => {
                counts.failed += 1;
                *counts.failures.entry(failure.to_string()).or_default() += 1;
                return;
            }
        };
        counts.complete += 1;
        counts.prompt_tokens += answer.usage.prompt_tokens;
        counts.cached_tokens += answer.usage.cached_tokens();
        counts.output_tokens += answer.usage.completion_tokens;
        self.all.record(&answer.timing);
        self.classes
            .entry(class)
            .or_default()
            .record(&answer.timing);
        self.end_to_end.record_micros(micros(answer.timing.total));
    }

    /// Returns the number of requests that have failed so far.
    pub(super) fn failed(&self) -> u64 {
        self.counts.failed
    }

    /// Returns the figures of a run that took `elapsed`.
    pub(super) fn report(self, elapsed: Duration) -> LiveReport {
        let seconds = elapsed.as_secs_f64();
        let classes = self.classes.iter();
        LiveReport {
            seconds,
            output_tokens_per_second: self.counts.output_tokens as f64 / seconds,
            requests_per_second: self.counts.complete as f64 / seconds,
            time_to_first_token_seconds: self.all.first_text.percentiles(),
            inter_token_seconds: self.all.inter_token.percentiles(),
            end_to_end_seconds: self.end_to_end.percentiles(),
            classes: classes
                .map(|(name, class)| (*name, class.report()))
                .collect(),
            ..self.counts
        }
    }
}

impl fmt::Display for LiveReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_outcomes(f)?;
        writeln!(f)?;
        let rates = [
            ("output tokens/s", self.output_tokens_per_second, 1),
            ("complete requests/s", self.requests_per_second, 2),
        ];
        for (name, rate, digits) in rates {
            writeln!(f, "{name:<24}{rate:>10.digits$}")?;
        }
        writeln!(f, "{:<24}{:>10}", "output tokens", self.output_tokens)?;
        writeln!(
            f,
            "{:<24}{:>10}  ({} from the prefix cache)",
            "prompt tokens", self.prompt_tokens, self.cached_tokens
        )?;
        writeln!(f)?;
        writeln!(
            f,
            "{:<24}{:>10}{:>10}{:>10}{:>10}",
            "latency, ms", "p50", "p90", "p99", "max"
        )?;
        row(f, "time to first token", self.time_to_first_token_seconds)?;
        row(f, "inter-token latency", self.inter_token_seconds)?;
        row(f, "end-to-end latency", self.end_to_end_seconds)?;
        for (name, class) in self.classes.iter().filter(|_| self.classes.len() > 1) {
            writeln!(f, "class {name}")?;
            row(f, "  time to first token", class.first_token_seconds)?;
            row(f, "  inter-token latency", class.inter_token_seconds)?;
        }
        Ok(())
    }
}

impl LiveReport {
    fn fmt_outcomes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (complete, failed) = (self.complete, self.failed);
        write!(f, "{complete} requests complete, {failed} failed")?;
        if self.left > 0 {
            write!(f, ", {} disconnected on purpose", self.left)?;
        }
        writeln!(f, ", in {:.2} s", self.seconds)?;
        for (failure, count) in &self.failures {
            writeln!(f, "  {count} x {failure}")?;
        }
        Ok(())
    }
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, percentiles: Option<Percentiles>) -> fmt::Result {
    write!(f, "{name:<24}")?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::outcome::{CompleteAnswer, Failure, TokenUsage};

    fn complete(first_ms: u64, gaps_ms: &[u64]) -> ChatOutcome {
        let millis = Duration::from_millis;
        let usage = concat!(
            r#"{"prompt_tokens":10,"completion_tokens":3,"#,
            r#""prompt_tokens_details":{"cached_tokens":4}}"#
        );
        ChatOutcome::Complete(CompleteAnswer {
            text: String::new(),
            timing: Timing {
                first_text: Some(millis(first_ms)),
                gaps: gaps_ms.iter().map(|gap| millis(*gap)).collect(),
                total: millis(first_ms + gaps_ms.iter().sum::<u64>()),
            },
            usage: serde_json::from_str::<TokenUsage>(usage).unwrap(),
        })
    }

    fn report(outcomes: &[ChatOutcome], seconds: u64) -> LiveReport {
        let mut recorder = LiveRecorder::default();
        outcomes
            .iter()
            .for_each(|outcome| recorder.record("chat", outcome));
        recorder.report(Duration::from_secs(seconds))
    }

    fn near(value: f64, expected: f64) -> bool {
        (value - expected).abs() <= expected * 1e-3
    }

    #[test]
    fn percentiles_of_a_hundred_latencies() {
        let outcomes: Vec<ChatOutcome> = (1..=100).rev().map(|ms| complete(ms, &[5])).collect();
        let found = report(&outcomes, 10).time_to_first_token_seconds.unwrap();
        assert_eq!(found.count, 100);
        assert!(
            near(found.p50, 0.050) && near(found.p90, 0.090),
            "{found:?}"
        );
        assert!(
            near(found.p99, 0.099) && near(found.max, 0.100),
            "{found:?}"
        );
    }

    #[test]
    fn rates_are_over_the_whole_run() {
        let report = report(&[complete(10, &[1, 30]), complete(10, &[2, 2])], 4);
        assert_eq!((report.output_tokens, report.cached_tokens), (6, 8));
        assert!(
            near(report.output_tokens_per_second, 1.5) && near(report.requests_per_second, 0.5)
        );
        assert!(
            near(report.inter_token_seconds.unwrap().max, 0.030),
            "the longest gap"
        );
    }

    #[test]
    fn failures_are_counted_by_reason_and_have_no_latencies() {
        let outcomes = [
            ChatOutcome::Failed(Failure::CutOff),
            ChatOutcome::Failed(Failure::Status(503, "draining".into())),
            ChatOutcome::Failed(Failure::CutOff),
            ChatOutcome::Disconnected,
        ];
        let report = report(&outcomes, 1);
        assert_eq!((report.complete, report.left, report.failed), (0, 1, 3));
        assert_eq!(report.failures["stream ended without [DONE]"], 2);
        assert_eq!(report.failures["status 503: draining"], 1);
        assert_eq!(report.end_to_end_seconds, None);
        let table = report.to_string();
        assert!(
            table.contains("0 requests complete, 3 failed, 1 disconnected on purpose"),
            "{table}"
        );
    }
}
