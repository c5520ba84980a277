//! The prompts and the policy of checks and figures.

use sterna_random::Random;
use sterna_scheduler::StateLimits;

use crate::engine::{Budget, Forward, Limits, Policy, TokenId};

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
            is_strict: false,
        },
        max_draft: 0,
        ..Policy::default()
    }
}

/// Returns limits for `streams` requests at once, without a limit on the time that they wait.
pub(super) fn untimed_limits(
    streams: usize,
    pages: usize,
    step_tokens: usize,
    max_sequence_tokens: usize,
) -> Limits {
    Limits {
        pages: pages as u32,
        max_running: streams as u32,
        max_queued: streams as u32,
        max_queued_time: u64::MAX,
        step_tokens: step_tokens as u32,
        prefill_chunk: step_tokens as u32,
        max_sequence_tokens: max_sequence_tokens as u32,
        states: None,
        diffusion: None,
    }
}

/// Adds slabs to limits if the model keeps states: one for each sequence, and some to read.
pub(super) fn with_states(limits: Limits, model: &impl Forward) -> Limits {
    let states = StateLimits {
        slabs: limits.max_running + 2,
        in_place_tokens: 1,
        trial_interval: 2048,
    };
    Limits {
        states: model.has_states().then_some(states),
        ..limits
    }
}
