//! How a chat request ended.
//!
//! Invariant: a request ends in exactly one of three ways: complete, disconnected on purpose, or
//! failed with a reason.

use std::fmt;
use std::time::Duration;

use serde::Deserialize;

/// How one request ended.
#[derive(Debug, PartialEq)]
pub(super) enum ChatOutcome {
    /// The whole answer arrived.
    Complete(CompleteAnswer),
    /// The client disconnected, as the workload defines.
    Disconnected,
    /// The request failed.
    Failed(Failure),
}

/// An answer that arrived completely.
#[derive(Debug, PartialEq)]
pub(super) struct CompleteAnswer {
    /// The text of the answer.
    pub(super) text: String,
    /// When its tokens arrived.
    pub(super) timing: Timing,
    /// The token counts that the server reported.
    pub(super) usage: TokenUsage,
}

/// The timing of one request, counted from the moment when it should have started.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Timing {
    /// The time to the first piece of text. `None`: there was no text.
    pub(super) first_text: Option<Duration>,
    /// The times between consecutive tokens. Tokens that arrive together share the time since the
    /// token before them evenly.
    pub(super) gaps: Vec<Duration>,
    /// The time to the end of the stream.
    pub(super) total: Duration,
}

/// The tokens of one request, as the server counts them.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub(super) struct TokenUsage {
    /// Tokens of the prompt, including the chat template.
    pub(super) prompt_tokens: u64,
    /// Tokens of the answer.
    pub(super) completion_tokens: u64,
    prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
struct PromptTokensDetails {
    #[serde(default)]
    cached_tokens: u64,
}

impl TokenUsage {
    /// Returns the prompt tokens that came from the prefix cache. 0 if the server does not say.
    pub(super) fn cached_tokens(&self) -> u64 {
        self.prompt_tokens_details
            .as_ref()
            .map_or(0, |details| details.cached_tokens)
    }
}

/// Why a request failed. Failures with the same text are counted together.
#[derive(Debug, PartialEq)]
pub(super) enum Failure {
    /// The connection failed, with the transport's message.
    Connection(String),
    /// The status was not 200, with the error code or the start of the body.
    Status(u16, String),
    /// The stream contained an error, with its code or message.
    InStream(String),
    /// The stream ended without `[DONE]`.
    CutOff,
    /// The stream breaks the protocol, with the reason.
    Protocol(String),
    /// The request took longer than the timeout.
    TimedOut,
}

impl Failure {
    /// Returns whether the server refused the request because it, or the tenant's limit, is full.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(self, Failure::Status(429 | 503, _))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Connection(message) => write!(f, "connection: {message}"),
            Failure::Status(status, code) => write!(f, "status {status}: {code}"),
            Failure::InStream(code) => write!(f, "error in the stream: {code}"),
            Failure::CutOff => write!(f, "stream ended without [DONE]"),
            Failure::Protocol(reason) => write!(f, "protocol: {reason}"),
            Failure::TimedOut => write!(f, "timed out"),
        }
    }
}
