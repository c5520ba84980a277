//! The words that the outside uses: what may be asked, what is refused, and how a request ends.
//!
//! Plain values: nothing in this file decides anything.

use crate::step::PREFILL_FLOOR;
use crate::{PAGE_TOKENS, RateKind};

/// Microseconds on the caller's clock, which never runs backwards.
pub type Micros = u64;

/// One token of the model's vocabulary.
pub type TokenId = u32;

/// A request's handle from `submit` to its `Finished` event.
///
/// Slots are reused, generations are not: a handle kept for too long names nobody, never a stranger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId {
    slot: u32,
    generation: u32,
}

impl SequenceId {
    /// Names the sequence of `generation` in `slot`; for batches that are built by hand.
    pub fn new(slot: u32, generation: u32) -> SequenceId {
        SequenceId { slot, generation }
    }

    pub(crate) fn slot(self) -> usize {
        self.slot as usize
    }
}

/// Who pays for a request, and whose cached prefixes it may see: no page is ever shared between tenants, but for public
/// prefixes. Small numbers, for they index tables; tenant 0 exists from the start, with [the default policy](crate::TenantPolicy::default).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);

impl TenantId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// What is asked of the scheduler.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// The prompt; at least one token.
    pub prompt: Vec<TokenId>,
    /// Generation ends with [`FinishReason::Length`] at this many tokens; at least one.
    pub max_new_tokens: u32,
    /// Stop tokens do not end the request before this many tokens.
    pub min_new_tokens: u32,
    /// Any of these ends the request with [`FinishReason::Stop`]; empty when nothing should.
    pub stop_tokens: Vec<TokenId>,
    /// Who pays.
    pub tenant: TenantId,
    /// It is another answer to a request that was accepted just now, whose prompt it shares: the tenant's rates were met
    /// there, and neither a request nor the prompt is counted again.
    pub is_another_choice: bool,
    /// Ends with [`FinishReason::Deadline`] if no token has come this long after `submit`.
    pub first_token_within: Option<Micros>,
    /// Ends with [`FinishReason::Deadline`] if it has not ended this long after `submit`.
    pub ends_within: Option<Micros>,
}

/// Bounds that the scheduler never exceeds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Pages of KV memory, each of [`PAGE_TOKENS`] tokens.
    pub pages: u32,
    /// Sequences that hold pages at the same time.
    pub max_running: u32,
    /// Requests that may wait, at least 1; one more is refused. Preempted sequences wait too, but are never refused.
    pub max_queued: u32,
    /// Predicted machine time of all that waits, beyond which a request is refused.
    pub max_queued_time: Micros,
    /// Tokens in a step. Decodes always run, and prefills always get a few, so a step may exceed this: see
    /// [`Limits::max_batch_tokens`].
    pub step_tokens: u32,
    /// Tokens of one sequence's prompt in a step; at least a page. Smaller than `step_tokens`, it lets several prompts
    /// advance together.
    pub prefill_chunk: u32,
    /// Prompt and output of one sequence together: the model's context.
    pub max_sequence_tokens: u32,
}

impl Limits {
    /// The largest number of tokens that a batch can hold.
    pub fn max_batch_tokens(&self) -> usize {
        (self.step_tokens as usize).max(self.max_running as usize + PREFILL_FLOOR)
    }

    /// Tokens that one sequence may come to: as many as the model's context and all pages hold.
    pub fn longest_sequence(&self) -> u64 {
        let memory = u64::from(self.pages) * PAGE_TOKENS as u64;
        memory.min(u64::from(self.max_sequence_tokens))
    }
}

/// Why a request was not taken. The scheduler is then as if it had never been asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The prompt has no token.
    EmptyPrompt,
    /// `max_new_tokens` is 0.
    NothingToGenerate,
    /// Prompt and output could be longer than one sequence may be, even alone.
    TooLong {
        /// Prompt tokens plus `max_new_tokens`.
        needed_tokens: u64,
        /// [`Limits::longest_sequence`], less what public prefixes take and the tenant may not hold.
        limit_tokens: u64,
    },
    /// The tenant has used up its rate.
    RateLimited {
        /// Which of its rates.
        rate: RateKind,
        /// When it has recovered.
        retry_after: Micros,
    },
    /// Too much of the same tenant waits already.
    TenantQueueFull {
        /// When what waits now will have been served, at the tenant's present share of the machine.
        retry_after: Micros,
    },
    /// Too much waits already, over all tenants.
    Overloaded {
        /// When what waits now will have been served.
        retry_after: Micros,
    },
    /// Its first token would come too late.
    Deadline {
        /// When it could be in time; never, if its prompt alone takes longer.
        retry_after: Option<Micros>,
    },
    /// The scheduler takes no new requests.
    Draining,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// A stop token was produced, or the caller found a stop string.
    Stop,
    /// `max_new_tokens` were produced.
    Length,
    /// Nobody wants the answer any more.
    Cancelled,
    /// The step that computed it failed.
    Error,
    /// It took longer than its request allowed.
    Deadline,
    /// The server is going down.
    Shutdown,
}

/// What happened to a request, in the order in which it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// It runs for the first time.
    Admitted {
        /// Which request.
        id: SequenceId,
        /// Prompt tokens that were found in the prefix tree.
        cached_tokens: u32,
    },
    /// It lost its pages and waits again, in its old place.
    Preempted {
        /// Which request.
        id: SequenceId,
    },
    /// It ended; the handle is dead. Each submitted request has exactly one such event.
    Finished {
        /// Which request.
        id: SequenceId,
        /// How it ended.
        reason: FinishReason,
        /// Who pays.
        tenant: TenantId,
        /// Tokens in the prompt.
        prompt_tokens: u32,
        /// Prompt tokens found in the prefix tree when it was first admitted.
        cached_tokens: u32,
        /// Tokens produced, a stop token included.
        output_tokens: u32,
    },
}

/// The scheduler's state in numbers; `free + private + tree` are all pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Sequences that have a place in the batch.
    pub running: usize,
    /// Requests that wait, preempted ones included.
    pub queued: usize,
    /// Pages that hold nothing.
    pub free: usize,
    /// Pages that one sequence is writing.
    pub private: usize,
    /// Cached pages.
    pub tree: usize,
    /// Those of the cached pages that running sequences use. The others can be evicted.
    pub pinned: usize,
    /// Prompt tokens looked up in the prefix tree so far, at first admissions.
    pub prefix_queries: u64,
    /// Those of them that were found.
    pub prefix_hits: u64,
    /// Times that a sequence lost its pages to an earlier one.
    pub preemptions: u64,
    /// Cached pages dropped to make room.
    pub evictions: u64,
    /// Pages computed twice, whose copy was dropped for the equal one in the tree.
    pub redirects: u64,
    /// Admissions put off, each once a plan, until a running prefill has computed the prefix that both share.
    pub deferrals: u64,
    /// Pages copied because a cached page began with the tokens that were wanted, and then went on otherwise.
    pub copies: u64,
    /// Tokens guessed from a sequence's own past.
    pub drafted: u64,
    /// Those of them that were what the model then drew.
    pub accepted: u64,
    /// Machine time of all that waits, predicted.
    pub queued_time: Micros,
}
