//! The live view of a run in the terminal.
//!
//! Invariant: the view is visible only if stderr is a terminal.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::outcome::ChatOutcome;
use super::record::EndedRequest;
use crate::latency::{Latencies, Percentiles};

/// The time over which the view averages tokens per second.
const WINDOW: Duration = Duration::from_secs(2);

/// Counts of a running run.
#[derive(Clone, Copy, Debug)]
pub(super) struct LiveCounts {
    /// Requests that were sent.
    pub(super) started: u64,
    /// Pieces of text that have arrived.
    pub(super) pieces: u64,
}

/// The live view and what it shows.
pub(super) struct LiveView {
    bar: ProgressBar,
    ended: u64,
    failed: u64,
    tokens: u64, // Of complete answers, as are `pieces`.
    pieces: u64,
    first_token: Latencies,
    inter_token: Latencies,
    window: VecDeque<(Instant, u64)>, // Pieces that had arrived at a time.
}

impl LiveView {
    /// Shows the view of a run of `requests` after `warm_up` others. `None`: their number is open.
    pub(super) fn new(title: &str, requests: Option<u64>, warm_up: u64) -> LiveView {
        let (bar, progress) = match requests {
            Some(requests) => (
                ProgressBar::new(requests + warm_up),
                "{bar:30} {pos}/{len} requests",
            ),
            None => (ProgressBar::new_spinner(), "{spinner} {pos} requests"),
        };
        let style = format!("{{prefix}}{{elapsed_precise}} {progress}, {{msg}}");
        let style = ProgressStyle::with_template(&style).expect("the template is well formed");
        LiveView {
            bar: bar.with_style(style).with_prefix(title.to_owned()),
            ended: 0,
            failed: 0,
            tokens: 0,
            pieces: 0,
            first_token: Latencies::default(),
            inter_token: Latencies::default(),
            window: VecDeque::new(),
        }
    }

    /// Adds a request that has ended.
    pub(super) fn ended(&mut self, request: &EndedRequest) {
        self.ended += 1;
        match &request.outcome {
            ChatOutcome::Complete(answer) => {
                let timing = &answer.timing;
                self.tokens += answer.usage.completion_tokens;
                self.pieces += 1 + timing.gaps.len() as u64;
                if let Some(first) = timing.first_text {
                    self.first_token.record_seconds(first.as_secs_f64());
                }
                for gap in &timing.gaps {
                    self.inter_token.record_seconds(gap.as_secs_f64());
                }
            }
            ChatOutcome::Failed(_) => self.failed += 1,
            ChatOutcome::Disconnected => {}
        }
    }

    /// Shows the figures so far.
    pub(super) fn show(&mut self, counts: LiveCounts) {
        let message = self.message(counts, Instant::now());
        self.bar.set_position(self.ended);
        self.bar.set_message(message);
    }

    /// Removes the view.
    pub(super) fn close(self) {
        self.bar.finish_and_clear();
    }

    fn message(&mut self, counts: LiveCounts, now: Instant) -> String {
        let in_flight = counts.started.saturating_sub(self.ended);
        let rate = self.tokens_per_second(counts.pieces, now);
        let failed = self.failed;
        format!(
            "{failed} failed, {in_flight} in flight, {rate:.0} tokens/s\n  \
             time to first token {}, inter-token latency {}",
            quantiles(self.first_token.percentiles()),
            quantiles(self.inter_token.percentiles()),
        )
    }

    /// Returns the tokens per second over the window that ends now, when `pieces` have arrived. A
    /// piece can hold several tokens: as many as in the answers that are complete.
    fn tokens_per_second(&mut self, pieces: u64, now: Instant) -> f64 {
        self.window.push_back((now, pieces));
        while self.window.len() > 2 && now - self.window[1].0 >= WINDOW {
            self.window.pop_front();
        }
        let (from, before) = self.window[0];
        let seconds = (now - from).as_secs_f64();
        let tokens_per_piece = match self.pieces {
            0 => 1.0,
            pieces => self.tokens as f64 / pieces as f64,
        };
        if seconds > 0.0 {
            (pieces - before) as f64 * tokens_per_piece / seconds
        } else {
            0.0
        }
    }
}

fn quantiles(percentiles: Option<Percentiles>) -> String {
    match percentiles {
        Some(Percentiles { p50, p90, p99, .. }) => {
            let [p50, p90, p99] = [p50, p90, p99].map(|seconds| seconds * 1e3);
            format!("p50 {p50:.1}, p90 {p90:.1}, p99 {p99:.1} ms")
        }
        None => "-".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_per_second_are_those_of_the_last_two_seconds() {
        let mut view = LiveView::new("", Some(4), 0);
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let counts = |pieces| LiveCounts { started: 5, pieces };
        view.ended = 2;
        assert!(view.message(counts(0), at(0)).contains("0 tokens/s"));
        let message = view.message(counts(50), at(1));
        assert!(
            message.contains("0 failed, 3 in flight, 50 tokens/s"),
            "{message}"
        );
        view.message(counts(100), at(2));
        view.message(counts(400), at(3));
        let message = view.message(counts(700), at(4));
        assert!(message.contains("300 tokens/s"), "{message}");
        // Complete answers had two tokens a piece.
        (view.tokens, view.pieces) = (20, 10);
        assert!(view.message(counts(700), at(5)).contains("300 tokens/s"));
    }
}
