//! The short prompts of tenants with nothing waiting, which precede the backlog of other tenants.

use crate::sequence::Sequence;
use crate::state::SchedulerState;
use crate::{Nanos, Order};

/// The greatest machine time of a short prompt.
const SHORT_PROMPT: Nanos = 2_000_000_000;

/// Consecutive steps in which a decode or a prompt may pause for another tenant's short prompt.
pub(super) const MAX_PAUSES_FOR_SHORT_PROMPTS: u32 = 7;

/// By band, the virtual time of the tenant whose short prompt is computed while it has no request
/// waiting. If there are several such tenants, it is the least of their virtual times.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ShortPrompts([Option<u64>; 3]);

impl ShortPrompts {
    /// Finds the short prompts of the running sequences. There are none unless requests wait and
    /// tenants share the machine by weight.
    pub(super) fn of(state: &SchedulerState) -> ShortPrompts {
        let mut found = ShortPrompts::default();
        let is_fair = matches!(state.conditions.policy.order, Order::FairShare { .. });
        if state.queue.len() == 0 || !is_fair {
            return found;
        }
        for sequence in state.sequences.iter_running() {
            let tenant = state.queue.tenant(sequence.tenant);
            let is_short = || {
                let len = sequence.len();
                let uncached = len - sequence.record.cached_tokens.unwrap_or(0).min(len);
                state.conditions.predictor.prefill_time(len, uncached) <= SHORT_PROMPT
            };
            if sequence.is_prefill() && tenant.waiting.is_empty() && is_short() {
                let time = tenant.virtual_time;
                let least = &mut found.0[tenant.policy.band as usize];
                *least = Some(least.map_or(time, |other: u64| other.min(time)));
            }
        }
        found
    }

    /// Returns whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        *self == ShortPrompts::default()
    }

    /// Returns whether a short prompt precedes this sequence. One does only if the sequence's
    /// tenant is ahead in virtual time and has more requests waiting.
    pub(super) fn precede(&self, sequence: &Sequence, state: &SchedulerState) -> bool {
        let tenant = state.queue.tenant(sequence.tenant);
        let least = self.0[tenant.policy.band as usize];
        let is_ahead = least.is_some_and(|least| tenant.virtual_time > least);
        is_ahead && !tenant.waiting.is_empty()
    }
}
