//! How the scheduler decides, as values: what the product uses, and what others do, for comparison.

use crate::Micros;

/// Between two tokens of a sequence, unless another is asked for. From here a longer target gives few tokens more, a shorter one costs more of them, and both keep chat beside long prompts waiting. Simulated
/// (`cargo simulate --cost 2b-2core-zen4 --requests 3000 --workload .. --itl-target-ms ..`):
///
/// ```text
/// target, ms                                               75   100   150   200   300   400   800
/// flooder: output tok/s                                    68    78    82    84    85    86    87
///   the victim's first token, p99 s                       1.3   1.0   0.8   0.8   0.9   1.1   1.6
/// long-prompts: chat's first token, p99 s                  33    21   9.0   8.1    12    21   116
/// chat: first token, p99 s                                 62    21   8.3   5.4   3.4   3.3   2.7
/// ```
pub const INTER_TOKEN_TARGET: Micros = 200_000;

/// One stream of the 2B shape on two Zen 4 cores, 0 / 2 / 4 / 6 / 8 / 12 / 16 drafted at most: 40 / 86 / 110 / 130 / 118 / 128 / 144 tok/s where
/// one word comes again and again, 39 / 42 / 42 / 42 / 41 / 39 / 38 in a text of its own.
const MAX_DRAFT: u32 = 6;

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
            budget: Budget::within(INTER_TOKEN_TARGET),
            growth: Growth::Expected,
            max_draft: MAX_DRAFT,
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

impl Budget {
    /// The time within which everybody's next token should come, and what that leaves for prompts. Of steps of the 2B shape on two Zen 4
    /// cores, simulated as above, a `most` of five targets instead of 5/4 changes tokens a second by less than 1 % and median times to a first
    /// token by less than 5 %, but the victim of `flooder` waits 1.2 instead of 0.8 s at p99. A `least` of none to half a target changes as
    /// little. A `most` of 5/8 of a target costs up to 3 % of the tokens a second.
    #[must_use]
    pub const fn within(inter_token_target: Micros) -> Budget {
        Budget::Time {
            inter_token_target,
            least: inter_token_target / 10,
            most: inter_token_target * 5 / 4,
        }
    }
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
