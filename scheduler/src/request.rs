//! The values at the scheduler's interface: requests, refusals, events and the snapshot.
//!
//! Invariant: nothing in this file decides anything.

use crate::{Band, Micros, Nanos, RateKind, SequenceId, SlabCounts, SubTenant, TenantId, TokenId};

/// A request to generate tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// The prompt, of at least one token.
    pub prompt: Vec<TokenId>,
    /// The largest number of output tokens, at least 1. The request ends with
    /// [`FinishReason::Length`] when it has this many.
    pub max_new_tokens: u32,
    /// Whether the client asked for outputs of `max_new_tokens`. If so, all of it counts as used
    /// in what a tenant that has used up its rate is told.
    pub is_length_given: bool,
    /// A stop token ends the request only if the output then has at least this many tokens.
    pub min_new_tokens: u32,
    /// The tokens that end the request with [`FinishReason::Stop`].
    pub stop_tokens: Vec<TokenId>,
    /// Whether the logits of every token of the prompt are wanted. The cache has no logits, so the
    /// whole prompt is then computed, and each of its positions gives logits once.
    pub scores_prompt: bool,
    /// Whether the output comes by block diffusion: see [`Limits::diffusion`](crate::Limits).
    pub is_diffused: bool,
    /// The time that the request's sampling parameters add to each draw of a token, as the caller
    /// has measured it: 0 for plain draws, at most [`MAX_DRAW_TIME`]. The tenant is charged for it.
    pub draw_time: Nanos,
    /// The tenant that is charged.
    pub tenant: TenantId,
    /// The client of the tenant, if the tenant tells its clients apart. The clients take turns, so
    /// that none can keep another waiting. Requests without a client count as one more client.
    pub sub_tenant: Option<SubTenant>,
    /// The priority of the request, if it is lower than its tenant's. The request then comes
    /// after the tenant's other requests. A higher priority than the tenant's has no effect.
    pub band: Option<Band>,
    /// The request ends with [`FinishReason::Deadline`] if it has no output token this long after
    /// `submit`.
    pub first_token_within: Option<Micros>,
    /// The request ends with [`FinishReason::Deadline`] if it has not ended this long after
    /// `submit`.
    pub ends_within: Option<Micros>,
}

/// The greatest [`Request::draw_time`]: a tenth of a second.
pub const MAX_DRAW_TIME: Nanos = 100_000_000;

/// The reason why the scheduler refuses a request. A refusal leaves the scheduler as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The prompt has no token.
    EmptyPrompt,
    /// `max_new_tokens` is 0.
    NothingToGenerate,
    /// Prompt and output do not fit, even if the request runs alone.
    TooLong {
        /// The prompt tokens plus `max_new_tokens`.
        needed_tokens: u64,
        /// The [longest sequence](crate::Limits::longest_sequence) that the limits allow, reduced
        /// by the pages of public prefixes and by the tenant's cap.
        limit_tokens: u64,
    },
    /// The tenant has used up its rate.
    RateLimited {
        /// The rate that is used up.
        rate: RateKind,
        /// The time until the rate allows a request again.
        retry_after: Micros,
    },
    /// The tenant has too many waiting requests, or too much predicted time in its queue. Requests
    /// that have started do not count.
    TenantQueueFull {
        /// The time until the tenant's queue is served at its present share of the machine.
        retry_after: Micros,
    },
    /// All tenants together have too many waiting requests, or too much predicted time in the
    /// queue, and this tenant has no less of it than its share.
    Overloaded {
        /// The time until the queue is served.
        retry_after: Micros,
    },
    /// The first token would miss the request's deadline.
    Deadline {
        /// The time until the deadline can be met, or `None` if the prompt alone takes longer.
        retry_after: Option<Micros>,
    },
    /// The scheduler is draining and accepts no requests.
    Draining,
}

/// The reason why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The model drew a stop token, or the caller found a stop string.
    Stop,
    /// The output has `max_new_tokens` tokens.
    Length,
    /// The client cancelled the request.
    Cancelled,
    /// A step failed, or the request's row in it.
    Error,
    /// The request missed one of its deadlines.
    Deadline,
    /// The server shuts down.
    Shutdown,
}

/// A change in the life of a request. Events come in the order in which they happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The request runs for the first time.
    Admitted {
        /// The request.
        id: SequenceId,
        /// The number of prompt tokens found in the prefix tree.
        cached_tokens: u32,
    },
    /// The request gave its place in the full queue to a request of a tenant that had less of the
    /// queue than its share. It never ran, and its handle is dead.
    Displaced {
        /// The request.
        id: SequenceId,
        /// The tenant of the request.
        tenant: TenantId,
        /// The time until the queue is served.
        retry_after: Micros,
    },
    /// The request lost its pages and waits again, at its old place in the queue.
    Preempted {
        /// The request.
        id: SequenceId,
    },
    /// The request ended, and its handle is dead. Each accepted request has exactly one such event,
    /// or one [`Event::Displaced`].
    Finished {
        /// The request.
        id: SequenceId,
        /// The reason.
        reason: FinishReason,
        /// The tenant that is charged.
        tenant: TenantId,
        /// The number of tokens in the prompt.
        prompt_tokens: u32,
        /// The number of prompt tokens found in the prefix tree at the first admission.
        cached_tokens: u32,
        /// The number of output tokens, including a stop token.
        output_tokens: u32,
    },
}

/// The scheduler's state in numbers. `free + private + tree` is the number of all pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The slabs of states.
    pub slabs: SlabCounts,
    /// Running sequences.
    pub running: usize,
    /// Waiting requests, including preempted ones.
    pub queued: usize,
    /// Free pages.
    pub free: usize,
    /// Pages that belong to one sequence.
    pub private: usize,
    /// Cached pages.
    pub tree: usize,
    /// Cached pages that cannot be evicted, because a running sequence uses them or they are
    /// public.
    pub pinned: usize,
    /// Prompt tokens looked up in the prefix tree so far, at first admissions.
    pub prefix_queries: u64,
    /// Prompt tokens found in the prefix tree so far.
    pub prefix_hits: u64,
    /// Preemptions so far.
    pub preemptions: u64,
    /// Evictions so far.
    pub evictions: u64,
    /// Computed pages so far that were replaced by an equal page of the tree.
    pub redirects: u64,
    /// Admissions so far that were deferred until a running prefill has computed a shared prefix. A
    /// request counts once in each plan.
    pub deferrals: u64,
    /// Cached pages copied so far because only their first tokens were the wanted ones.
    pub copies: u64,
    /// Draft tokens so far.
    pub drafted: u64,
    /// Accepted draft tokens so far.
    pub accepted: u64,
    /// Draft tokens of the model itself so far, a part of `drafted`.
    pub own_drafted: u64,
    /// Accepted ones of these.
    pub own_accepted: u64,
    /// Passes over blocks so far, by sequence.
    pub block_passes: u64,
    /// Mask tokens that these have replaced.
    pub unmasked: u64,
    /// The predicted machine time of all waiting requests.
    pub queued_time: Micros,
    /// The known tokens of all waiting sequences. Some of them may be cached.
    pub queued_tokens: u64,
}
