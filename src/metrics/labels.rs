//! The labels: properties of the server, and closed sets of values.

use sterna_scheduler::FinishReason;

/// Properties of the server that become labels.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    /// The name of the served model, on every series.
    pub model_name: String,
    /// The instruction set of the kernels.
    pub isa: String,
    /// The number format of keys and values.
    pub kv_dtype: String,
    /// KV pages in the pool.
    pub kv_pages: u32,
    /// Tokens in a page.
    pub page_tokens: u32,
}

/// Why a request was rejected: the label `reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectionReason {
    /// Too many requests wait.
    QueueFull,
    /// Its tenant has used up its rate.
    RateLimited,
    /// Too many requests of its tenant wait.
    TenantQueueFull,
    /// It could not meet its deadline.
    Deadline,
    /// Prompt and output exceed the memory or the model's context.
    TooLong,
    /// The model cannot run it.
    Invalid,
    /// The server is shutting down.
    Draining,
    /// The engine has stopped after a bug.
    Dead,
}

pub(super) const REJECTION_REASONS: [&str; 8] = [
    "queue_full",
    "rate_limited",
    "tenant_queue_full",
    "deadline",
    "too_long",
    "invalid",
    "draining",
    "dead",
];

pub(super) const FINISHED_REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

/// Returns the index of a finish reason's label in [`FINISHED_REASONS`].
pub(super) fn finished_reason(reason: FinishReason) -> usize {
    match reason {
        FinishReason::Stop => 0,
        FinishReason::Length => 1,
        FinishReason::Cancelled | FinishReason::Shutdown => 2,
        FinishReason::Error | FinishReason::Deadline => 3,
    }
}
