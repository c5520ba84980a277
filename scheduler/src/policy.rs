//! How the scheduler decides, as values: what the product uses, and what others do, for comparison.

use crate::Micros;

/// Who is next, and how much a step may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Who is admitted next.
    pub order: Order,
    /// What bounds a step.
    pub budget: Budget,
    /// How much memory is kept for the answers of those that run.
    pub growth: Growth,
    /// Tokens drafted for a sequence at most; 0 for no speculation.
    pub max_draft: u32,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            order: Order::FairShare { slack: 250_000 },
            budget: Budget::Time {
                inter_token_target: 200_000,
                least: 20_000,
                most: 250_000,
            },
            growth: Growth::Expected,
            max_draft: 6,
        }
    }
}

/// Who is admitted next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The tenant served least so far (VTC, Sheng et al., arXiv:2401.00588); among those within `slack` of it, the
    /// request that the cache spares most (DLPM, Cao et al., arXiv:2501.14312).
    FairShare {
        /// Of machine time, whatever the tenant's weight.
        slack: Micros,
    },
    /// First come, first served, over all tenants.
    FirstCome,
    /// The request with the longest cached prefix (SGLang).
    LongestPrefix,
}

/// What bounds a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// Predicted time, such that no decode waits much longer than `inter_token_target` for its next token.
    Time {
        /// Between two tokens of a sequence.
        inter_token_target: Micros,
        /// A step is never made shorter than this.
        least: Micros,
        /// Nor longer than this.
        most: Micros,
    },
    /// So many tokens, decodes included (vLLM).
    Tokens(u32),
    /// Whole prompts before any decode (TGI).
    PrefillFirst,
}

/// How much memory is kept for the answers of those that run, when another is admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// A page each (vLLM): many run, and some lose their pages again.
    Least,
    /// As much as the tenant's answers usually come to.
    Expected,
    /// As much as they may come to (TGI, llama.cpp): nobody loses its pages, and much memory stays unused.
    Most,
}
