//! The decisions of the scheduler as values: the product's policy, and others for comparison.

use crate::{Micros, TokenId};

/// The default target for the time between two tokens of a sequence. Measured: see
/// `benches/record/scheduler.md`.
pub const INTER_TOKEN_TARGET: Micros = 200_000;

/// The share of the tokens per second, in percent, that an inter-token target may cost unless it is
/// strict.
pub const MAX_THROUGHPUT_LOSS: u64 = 25;

/// The share of the tokens per second, in percent, that a step is planned to cost for a target that
/// gives way. It is less than [`MAX_THROUGHPUT_LOSS`], because other work usually disturbs a
/// machine that has to give way: its steps differ from the predictions, and steps omit decodes for
/// prompts that wait.
pub(crate) const PLANNED_THROUGHPUT_LOSS: u64 = MAX_THROUGHPUT_LOSS * 3 / 5;

/// The default of [`Policy::max_draft`]. Measured: see `benches/record/scheduler.md`.
const MAX_DRAFT: u32 = 6;

/// The order of admission, and the bounds of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The order in which waiting requests are admitted.
    pub order: Order,
    /// The bound of a step.
    pub budget: Budget,
    /// The memory that admission reserves for the output of running sequences.
    pub growth: Growth,
    /// The largest number of draft tokens of a sequence in a step that are looked up in its past; 0
    /// turns this off.
    pub max_draft: u32,
    /// How the model drafts for itself, if it can.
    pub own_drafts: Option<OwnDrafts>,
}

/// A model that fills masked tokens, and so drafts for itself: the last known token and mask tokens
/// after it are a block, whose tokens attend to all of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnDrafts {
    /// The token in the place of an unknown token.
    pub mask_token: TokenId,
    /// The largest number of tokens in a block.
    pub block: u32,
}

/// How a model fills blocks of masked tokens, for requests whose output comes by block diffusion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Diffusion {
    /// The number of tokens in a block, at least 2.
    pub block: u32,
    /// The number of tokens in each part of a block. The parts are filled from left to right.
    pub part: u32,
    /// The token in the place of an unknown token.
    pub mask_token: TokenId,
    /// Whether the keys and values of known tokens are those of causal attention. Otherwise a token
    /// attends to all of its block, and requests share whole blocks of one tenant alone.
    pub is_causal: bool,
    /// Whether a pass over a part whose first token is known computes that part alone. Its tokens
    /// attend to the keys and values of the rest as the last pass over the whole block left them.
    pub has_block_cache: bool,
}

impl Diffusion {
    /// Returns the size of the blocks within which known tokens attend to each other, or 0 if a
    /// token attends to those up to its own.
    pub(crate) fn attended_block(&self) -> u32 {
        match self.is_causal {
            true => 0,
            false => self.block,
        }
    }
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            order: Order::FairShare { slack: 250_000 },
            budget: Budget::within(INTER_TOKEN_TARGET),
            growth: Growth::Expected,
            max_draft: MAX_DRAFT,
            own_drafts: None,
        }
    }
}

/// The order in which waiting requests are admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The tenant with the least service is next (VTC, Sheng et al., arXiv:2401.00588). Among the
    /// tenants within `slack` of it, the request with the longest cached prefix is next (DLPM, Cao
    /// et al., arXiv:2501.14312).
    FairShare {
        /// Machine time, independent of the tenant's weight.
        slack: Micros,
    },
    /// First come, first served, over all tenants.
    FirstCome,
    /// The request with the longest cached prefix is next (SGLang).
    LongestPrefix,
}

/// The bound of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// Predicted time: no decode waits much longer than `inter_token_target` for its next token.
    Time {
        /// The target for the time between two tokens of a sequence.
        inter_token_target: Micros,
        /// The time budget of a step is at least this.
        min_step: Micros,
        /// The time budget of a step is at most this.
        max_step: Micros,
        /// Whether the target holds however much throughput it costs. Otherwise a machine that is
        /// too slow gets a longer target: one that costs at most [`MAX_THROUGHPUT_LOSS`].
        is_strict: bool,
    },
    /// A number of tokens, decodes included (vLLM).
    Tokens(u32),
    /// Whole prompts before any decode (TGI).
    PrefillFirst,
}

impl Budget {
    /// Returns the time budget for a target between two tokens. Measured: see
    /// `benches/record/scheduler.md`.
    pub const fn within(inter_token_target: Micros) -> Budget {
        Budget::Time {
            inter_token_target,
            min_step: inter_token_target / 10,
            max_step: inter_token_target * 5 / 4,
            is_strict: false,
        }
    }

    /// Returns the time budget for a target that holds however much throughput it costs.
    #[must_use]
    pub const fn strictly_within(inter_token_target: Micros) -> Budget {
        Budget::Time {
            inter_token_target,
            min_step: inter_token_target / 10,
            max_step: inter_token_target * 5 / 4,
            is_strict: true,
        }
    }
}

/// The memory that admission reserves for the output of running sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// The next token of each sequence (vLLM): many sequences run, and some are preempted.
    Minimal,
    /// The usual output length of the tenant.
    Expected,
    /// The largest possible output (TGI, llama.cpp): no sequence is preempted, and much memory
    /// stays unused.
    Maximal,
}
