//! The latency objective of a run.

use serde::Serialize;

use super::record::AnswerFigures;

/// The latency objective. A complete answer that meets it is good.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct LatencyObjective {
    /// The limit of the time to first token.
    pub(super) first_token_seconds: f64,
    /// The limit of the time per output token of an answer.
    pub(super) per_output_token_seconds: f64,
}

impl LatencyObjective {
    /// Returns whether `answer` meets the objective. An answer of one token has no time per output
    /// token, so only its first token counts.
    pub(super) fn is_met_by(&self, answer: &AnswerFigures) -> bool {
        let first = answer.first_token_seconds;
        let rest = answer.per_output_token_seconds;
        first.is_none_or(|seconds| seconds <= self.first_token_seconds)
            && rest.is_none_or(|seconds| seconds <= self.per_output_token_seconds)
    }
}
