//! What a run measured: counts, rates and percentiles, as a table for people and as JSON.
//!
//! Always true: latencies and tokens are those of complete requests; all others are only counted. JSON has seconds.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::client::{End, Outcome, Timing};
use crate::latency::{Latencies, Percentiles};

/// Gathers outcomes while a run goes on.
pub(crate) struct Recorder {
    all: Class,
    classes: BTreeMap<&'static str, Class>,
    end_to_end: Latencies,
    complete: u64,
    left: u64,
    failures: BTreeMap<String, u64>,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
}

/// Latencies of the sessions of one kind.
struct Class {
    first_text: Latencies,
    inter_token: Latencies,
}

/// The figures of a whole run.
#[derive(Serialize)]
pub(crate) struct Report {
    /// Requests whose whole answer arrived.
    pub(crate) complete: u64,
    /// Requests whose client left, as the workload asked.
    pub(crate) left: u64,
    /// All others.
    pub(crate) failed: u64,
    /// The others by reason.
    pub(crate) failures: BTreeMap<String, u64>,
    /// From the first request sent to the last one ended.
    pub(crate) seconds: f64,
    /// Tokens of all prompts.
    pub(crate) prompt_tokens: u64,
    /// Those of them that came from the prefix cache.
    pub(crate) cached_tokens: u64,
    /// Tokens of all answers.
    pub(crate) output_tokens: u64,
    /// Answers' tokens over the whole run's time.
    pub(crate) output_tokens_per_second: f64,
    /// Complete requests over the whole run's time.
    pub(crate) requests_per_second: f64,
    /// From sending a request to its first piece of text.
    pub(crate) time_to_first_token_seconds: Option<Percentiles>,
    /// Between two pieces of text of one answer; its `max` is the longest gap anyone saw.
    pub(crate) inter_token_seconds: Option<Percentiles>,
    /// From sending a request to the end of its stream.
    pub(crate) end_to_end_seconds: Option<Percentiles>,
    /// By class of the workload.
    pub(crate) classes: BTreeMap<&'static str, ClassReport>,
}

/// Latencies of one class.
#[derive(Serialize)]
pub(crate) struct ClassReport {
    /// From sending a request to its first piece of text.
    pub(crate) first_token_seconds: Option<Percentiles>,
    /// Between two pieces of text of one answer.
    pub(crate) inter_token_seconds: Option<Percentiles>,
}

impl Class {
    fn new() -> Class {
        Class {
            first_text: Latencies::new(),
            inter_token: Latencies::new(),
        }
    }

    fn record(&mut self, timing: &Timing) {
        let micros = |latency: &Duration| latency.as_micros() as u64;
        if let Some(latency) = &timing.first_text {
            self.first_text.record_micros(micros(latency));
        }
        for gap in &timing.gaps {
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

impl Recorder {
    /// Nothing recorded yet.
    pub(crate) fn new() -> Recorder {
        Recorder {
            all: Class::new(),
            classes: BTreeMap::new(),
            end_to_end: Latencies::new(),
            complete: 0,
            left: 0,
            failures: BTreeMap::new(),
            prompt_tokens: 0,
            cached_tokens: 0,
            output_tokens: 0,
        }
    }

    /// Adds the outcome of a request of this class.
    pub(crate) fn record(&mut self, class: &'static str, outcome: &Outcome) {
        let usage = match &outcome.end {
            End::Complete(usage) => usage,
            End::Left => {
                self.left += 1;
                return;
            }
            End::Failed(failure) => {
                *self.failures.entry(failure.to_string()).or_default() += 1;
                return;
            }
        };
        self.complete += 1;
        self.prompt_tokens += usage.prompt_tokens;
        self.cached_tokens += usage.cached_tokens();
        self.output_tokens += usage.completion_tokens;
        let timing = &outcome.timing;
        self.all.record(timing);
        let class = self.classes.entry(class).or_insert_with(Class::new);
        class.record(timing);
        self.end_to_end
            .record_micros(timing.total.as_micros() as u64);
    }

    /// Requests that have failed so far.
    pub(crate) fn failed(&self) -> u64 {
        self.failures.values().sum()
    }

    /// The figures of a run that took `elapsed`.
    pub(crate) fn report(self, elapsed: Duration) -> Report {
        let seconds = elapsed.as_secs_f64();
        Report {
            complete: self.complete,
            left: self.left,
            failed: self.failed(),
            failures: self.failures,
            seconds,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            output_tokens: self.output_tokens,
            output_tokens_per_second: self.output_tokens as f64 / seconds,
            requests_per_second: self.complete as f64 / seconds,
            time_to_first_token_seconds: self.all.first_text.percentiles(),
            inter_token_seconds: self.all.inter_token.percentiles(),
            end_to_end_seconds: self.end_to_end.percentiles(),
            classes: self
                .classes
                .iter()
                .map(|(name, class)| (*name, class.report()))
                .collect(),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report {
            complete,
            left,
            failed,
            seconds,
            ..
        } = self;
        write!(f, "{complete} requests complete, {failed} failed")?;
        if *left > 0 {
            write!(f, ", {left} left on purpose")?;
        }
        writeln!(f, ", in {seconds:.2} s")?;
        for (failure, count) in &self.failures {
            writeln!(f, "  {count} x {failure}")?;
        }
        writeln!(f)?;
        writeln!(
            f,
            "{:<22}{:>10}",
            "output tokens/s",
            format!("{:.1}", self.output_tokens_per_second)
        )?;
        writeln!(
            f,
            "{:<22}{:>10}",
            "requests/s",
            format!("{:.2}", self.requests_per_second)
        )?;
        writeln!(f, "{:<22}{:>10}", "output tokens", self.output_tokens)?;
        writeln!(
            f,
            "{:<22}{:>10}  ({} cached)",
            "prompt tokens", self.prompt_tokens, self.cached_tokens
        )?;
        writeln!(f)?;
        writeln!(
            f,
            "{:<22}{:>10}{:>10}{:>10}{:>10}",
            "latency, ms", "p50", "p90", "p99", "max"
        )?;
        row(f, "time to first token", self.time_to_first_token_seconds)?;
        row(f, "inter-token", self.inter_token_seconds)?;
        row(f, "end to end", self.end_to_end_seconds)?;
        for (name, class) in self.classes.iter().filter(|_| self.classes.len() > 1) {
            writeln!(f, "{name}")?;
            row(f, "  time to first token", class.first_token_seconds)?;
            row(f, "  inter-token", class.inter_token_seconds)?;
        }
        Ok(())
    }
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, percentiles: Option<Percentiles>) -> fmt::Result {
    write!(f, "{name:<22}")?;
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
    use crate::drive::client::{Failure, Usage};

    fn complete(first_ms: u64, gaps_ms: &[u64]) -> Outcome {
        let millis = Duration::from_millis;
        let usage = r#"{"prompt_tokens":10,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}"#;
        Outcome {
            timing: Timing {
                first_text: Some(millis(first_ms)),
                gaps: gaps_ms.iter().map(|gap| millis(*gap)).collect(),
                total: millis(first_ms + gaps_ms.iter().sum::<u64>()),
            },
            end: End::Complete(serde_json::from_str::<Usage>(usage).unwrap()),
            answer: String::new(),
        }
    }

    fn report(outcomes: &[Outcome], seconds: u64) -> Report {
        let mut recorder = Recorder::new();
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
        let outcomes: Vec<Outcome> = (1..=100).rev().map(|ms| complete(ms, &[5])).collect();
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
    fn failures_are_counted_by_reason_and_measure_nothing() {
        let failed = |failure| Outcome {
            timing: Timing::default(),
            end: End::Failed(failure),
            answer: String::new(),
        };
        let outcomes = [
            failed(Failure::CutOff),
            failed(Failure::Status(503, "draining".into())),
            failed(Failure::CutOff),
            Outcome {
                timing: Timing::default(),
                end: End::Left,
                answer: String::new(),
            },
        ];
        let report = report(&outcomes, 1);
        assert_eq!((report.complete, report.left, report.failed), (0, 1, 3));
        assert_eq!(report.failures["stream ended without [DONE]"], 2);
        assert_eq!(report.failures["status 503: draining"], 1);
        assert_eq!(report.end_to_end_seconds, None);
        let table = report.to_string();
        assert!(
            table.contains("0 requests complete, 3 failed, 1 left on purpose"),
            "{table}"
        );
    }
}
