//! A token that may be drawn, and the order of such tokens.

use std::cmp::Ordering;

use sterna_scheduler::TokenId;

/// A token with its logit and its weight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) token: TokenId,
    pub(super) logit: f32,
    pub(super) weight: f32, // Relative to the most likely token, which weighs 1.
}

/// Orders candidates by their logits, largest first, and on a tie by their ids, lowest first.
pub(super) fn likelier_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}
