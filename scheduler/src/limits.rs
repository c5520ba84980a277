//! How much the scheduler may do at the same time.

use crate::{Diffusion, Micros, PAGE_TOKENS, StateLimits};

/// The bounds that the scheduler never exceeds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The number of pages of KV memory, each of [`PAGE_TOKENS`] tokens.
    pub pages: u32,
    /// The largest number of sequences that run at the same time.
    pub max_running: u32,
    /// The largest number of waiting requests, at least 1. The choices of a request take one place.
    /// Preempted sequences wait too, but take no place. Beyond this limit the scheduler refuses a
    /// request, or displaces a request of a tenant that has more of the queue than its share.
    pub max_queued: u32,
    /// The largest predicted machine time of the requests that take a place. Beyond this limit the
    /// scheduler refuses or displaces as for `max_queued`. A single request may always wait. For a
    /// tenant with nothing waiting, only the time of other tenants counts, and one of their
    /// requests leaves.
    pub max_queued_time: Micros,
    /// The number of tokens that a step should have at most. Decodes always run, and prefills
    /// always get a few tokens, so a step may have more: see [`Limits::max_batch_tokens`].
    pub step_tokens: u32,
    /// The largest number of prompt tokens of one sequence in a step, at least a page. If it is
    /// smaller than `step_tokens`, several prompts advance in one step.
    pub prefill_chunk: u32,
    /// The largest number of tokens in prompt and output of one sequence: the model's context.
    pub max_sequence_tokens: u32,
    /// The slabs of states, if the model has recurrent layers.
    pub states: Option<StateLimits>,
    /// How the model fills blocks, if requests may ask for that.
    pub diffusion: Option<Diffusion>,
}

/// The largest number of prompt tokens that a step computes even if its decodes leave no time, so
/// that prefills never starve. See [`prefill_floor`].
pub(crate) const PREFILL_FLOOR: usize = 8;

/// Returns how many prompt tokens a step of this many decodes computes even if they leave no time.
/// It is a quarter of the decodes, at least 2 and at most [`PREFILL_FLOOR`]. On a machine that is
/// too slow for its inter-token target, more would lengthen each step by far. Without decodes the
/// number is [`PREFILL_FLOOR`], because no sequence waits for the step.
pub(crate) fn prefill_floor(decodes: usize) -> usize {
    match decodes {
        0 => PREFILL_FLOOR,
        _ => (decodes / 4).clamp(2, PREFILL_FLOOR),
    }
}

/// The largest number of draft tokens in a step, over all sequences. Beyond this number of rows,
/// each row makes a matrix product longer.
pub const MAX_DRAFTED_TOKENS: usize = 32;

/// The largest number of prompt tokens in a step whose logits are wanted although nothing is drawn
/// from them, or whose logits replace mask tokens, over all sequences.
pub(crate) const MAX_SCORED_TOKENS: usize = 64;

impl Limits {
    /// Returns the largest number of tokens in a batch.
    pub fn max_batch_tokens(&self) -> usize {
        let block = self
            .diffusion
            .map_or(0, |diffusion| diffusion.block as usize);
        let floor = PREFILL_FLOOR.max(block);
        (self.step_tokens as usize).max(self.max_running as usize + floor)
    }

    /// Returns the largest number of tokens of one sequence: as many as the context and all pages
    /// hold.
    pub fn longest_sequence(&self) -> u64 {
        let memory = u64::from(self.pages) * PAGE_TOKENS as u64;
        memory.min(u64::from(self.max_sequence_tokens))
    }

    /// Returns the largest number of drafts in a row. A row with drafts changes its slab in place,
    /// so that drafts can be rejected.
    pub(crate) fn max_drafts_of_row(&self) -> usize {
        self.states
            .map_or(usize::MAX, |states| states.in_place_tokens as usize - 1)
    }

    /// Returns the largest number of tokens in a batch that need logits: one for each sequence, one
    /// for each draft token, and the tokens of scored prompts.
    pub fn max_logits(&self) -> usize {
        self.max_running as usize + MAX_DRAFTED_TOKENS + MAX_SCORED_TOKENS
    }
}
