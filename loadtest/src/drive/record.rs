//! What a run recorded: one line for each request, and when tokens arrived.
//!
//! Invariant: requests of the warm-up are not recorded.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::outcome::{ChatOutcome, CompleteAnswer, Failure};
use crate::latency::Latencies;

/// The length of a bin of output tokens, in seconds.
pub(super) const BIN_SECONDS: f64 = 0.1;

/// A request as a client passes it on when it has ended.
pub(super) struct EndedRequest {
    /// Which request it was.
    pub(super) identity: RequestIdentity,
    /// When the request should have started.
    pub(super) intended: Instant,
    /// When the client sent it.
    pub(super) sent: Instant,
    /// When it ended.
    pub(super) ended: Instant,
    /// How it ended. Its times count from `intended`.
    pub(super) outcome: ChatOutcome,
}

/// Says which request of a run it was.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestIdentity {
    /// The number of the request, in the order of sending.
    pub(super) number: u64,
    /// The number of its session, in the order of starting.
    pub(super) session: u64,
    /// The index of its turn in the session.
    pub(super) turn: usize,
    /// The class of its session.
    pub(super) class: &'static str,
    /// The tenant that sent it.
    pub(super) tenant: u32,
    /// Whether its client reads slowly.
    pub(super) is_slow: bool,
}

/// One request. Times are in seconds.
#[derive(Debug)]
pub(super) struct RequestRecord {
    /// Which request it was.
    pub(super) identity: RequestIdentity,
    /// When it should have started, counted from the first request.
    pub(super) start_seconds: f64,
    /// How much later than that it was sent.
    pub(super) late_seconds: f64,
    /// When it ended, counted from the first request.
    pub(super) end_seconds: f64,
    /// How it ended.
    pub(super) end: RequestEnd,
}

/// How a request ended.
#[derive(Debug)]
pub(super) enum RequestEnd {
    /// The whole answer arrived.
    Complete(AnswerFigures),
    /// The client disconnected on purpose.
    Left,
    /// The request failed.
    Failed(Failure),
}

/// The figures of a complete answer. Latencies count from the intended start.
#[derive(Clone, Copy, Debug)]
pub(super) struct AnswerFigures {
    /// The time to the first piece of text. `None`: there was no text.
    pub(super) first_token_seconds: Option<f64>,
    /// The time from the first to the last piece of text over the tokens after the first one.
    /// `None`: the answer has fewer than two tokens.
    pub(super) per_output_token_seconds: Option<f64>,
    /// The time to the end of the stream.
    pub(super) end_to_end_seconds: f64,
    /// The tokens of the prompt.
    pub(super) prompt_tokens: u64,
    /// The prompt tokens that came from the prefix cache.
    pub(super) cached_tokens: u64,
    /// The tokens of the answer.
    pub(super) output_tokens: u64,
}

/// Everything that a run recorded.
pub(super) struct RunRecord {
    /// The requests in the order in which they ended.
    pub(super) requests: Vec<RequestRecord>,
    /// The times between two tokens of one answer, by class. Without slow clients.
    pub(super) inter_token: BTreeMap<&'static str, Latencies>,
    /// Output tokens of complete answers, in bins of [`BIN_SECONDS`].
    pub(super) token_bins: Vec<f64>,
    start: Instant,
    warm_up: u64,
}

impl RunRecord {
    /// Creates the record of a run that starts at `start`. The first `warm_up` requests are left
    /// out.
    pub(super) fn new(start: Instant, warm_up: u64) -> RunRecord {
        RunRecord {
            requests: Vec::new(),
            inter_token: BTreeMap::new(),
            token_bins: Vec::new(),
            start,
            warm_up,
        }
    }

    /// Adds a request that has ended.
    pub(super) fn add(&mut self, request: EndedRequest) {
        let identity = request.identity;
        if identity.number < self.warm_up {
            return;
        }
        let start = request.intended.saturating_duration_since(self.start);
        let end = match request.outcome {
            ChatOutcome::Complete(answer) => {
                self.add_tokens(identity, start, &answer);
                RequestEnd::Complete(figures(&answer))
            }
            ChatOutcome::Disconnected => RequestEnd::Left,
            ChatOutcome::Failed(failure) => RequestEnd::Failed(failure),
        };
        let seconds =
            |later: Instant, earlier| later.saturating_duration_since(earlier).as_secs_f64();
        self.requests.push(RequestRecord {
            identity,
            start_seconds: start.as_secs_f64(),
            late_seconds: seconds(request.sent, request.intended),
            end_seconds: seconds(request.ended, self.start),
            end,
        });
    }

    /// Adds when the tokens of `answer` arrived. If the server has not told how many tokens the
    /// pieces have, the tokens are spread evenly over the pieces.
    fn add_tokens(&mut self, identity: RequestIdentity, start: Duration, answer: &CompleteAnswer) {
        let timing = &answer.timing;
        let Some(first) = timing.first_text else {
            return;
        };
        let tokens = answer.usage.completion_tokens as f64 / (timing.gaps.len() + 1) as f64;
        let gaps = self.inter_token.entry(identity.class).or_default();
        let mut at = start + first;
        for gap in std::iter::once(None).chain(timing.gaps.iter().map(Some)) {
            if let Some(gap) = gap {
                at += *gap;
                if !identity.is_slow {
                    gaps.record_seconds(gap.as_secs_f64());
                }
            }
            let bin = (at.as_secs_f64() / BIN_SECONDS) as usize;
            if self.token_bins.len() <= bin {
                self.token_bins.resize(bin + 1, 0.0);
            }
            self.token_bins[bin] += tokens;
        }
    }

    /// Returns the seconds from the start of the first request to the end of the last one. Both
    /// count from the start of the run.
    pub(super) fn span(&self) -> (f64, f64) {
        let starts = self.requests.iter().map(|request| request.start_seconds);
        let ends = self.requests.iter().map(|request| request.end_seconds);
        let from = starts.fold(f64::INFINITY, f64::min);
        let to = ends.fold(0.0, f64::max);
        if from <= to { (from, to) } else { (0.0, 0.0) }
    }
}

impl RequestRecord {
    /// Returns the figures of a complete answer.
    pub(super) fn answer(&self) -> Option<&AnswerFigures> {
        match &self.end {
            RequestEnd::Complete(answer) => Some(answer),
            _ => None,
        }
    }

    /// Returns the figures of a complete answer whose client did not read slowly.
    pub(super) fn timed_answer(&self) -> Option<&AnswerFigures> {
        self.answer().filter(|_| !self.identity.is_slow)
    }
}

fn figures(answer: &CompleteAnswer) -> AnswerFigures {
    let (timing, usage) = (&answer.timing, &answer.usage);
    let rest = usage.completion_tokens.saturating_sub(1);
    let reading: Duration = timing.gaps.iter().sum();
    AnswerFigures {
        first_token_seconds: timing.first_text.map(|first| first.as_secs_f64()),
        per_output_token_seconds: (rest > 0).then(|| reading.as_secs_f64() / rest as f64),
        end_to_end_seconds: timing.total.as_secs_f64(),
        prompt_tokens: usage.prompt_tokens,
        cached_tokens: usage.cached_tokens(),
        output_tokens: usage.completion_tokens,
    }
}
