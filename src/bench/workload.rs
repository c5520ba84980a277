//! The prompts and the policy of checks and figures.

use sterna_random::Random;

use crate::engine::{Budget, Policy, TokenId};

/// Longer than any step, in microseconds.
const HOUR: u64 = 3_600_000_000;

/// Returns `count` random tokens of a vocabulary.
pub(super) fn random_tokens(random: &mut Random, count: usize, vocabulary: usize) -> Vec<TokenId> {
    let token = |_| random.below(vocabulary as u64) as TokenId;
    (0..count).map(token).collect()
}

/// Returns the server's default policy without a time budget for steps and without draft tokens.
/// Draft tokens are accepted as often as the text repeats itself, and the text of a model with
/// random weights may repeat itself more often than real text.
pub(super) fn untimed_policy() -> Policy {
    Policy {
        budget: Budget::Time {
            inter_token_target: HOUR,
            min_step: HOUR,
            max_step: HOUR,
        },
        max_draft: 0,
        ..Policy::default()
    }
}
