//! The prompts of a step: their order, and how much of each the step computes.
//!
//! Invariant: prompts take the time that the decodes leave of the budget. The first prompt gets at
//! least [`PREFILL_FLOOR`] tokens.

use super::plan::StepPlan;
use super::preempt::plan_row;
use crate::conditions::Conditions;
use crate::limits::PREFILL_FLOOR;
use crate::sequence::Sequence;
use crate::state::SchedulerState;
use crate::{Budget, Micros, Order};

/// The running prefills, in the order in which the step serves them.
pub(super) struct Prefills {
    ranks: Vec<PrefillRank>,
}

/// A prefill's rank; the least is first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct PrefillRank {
    band: usize,    // The band's place in the order of `Queue::bands`.
    ahead: u64, // How far its tenant is ahead of the tenant served least, in units of the slack.
    remaining: i64, // Microseconds to compute, less the time waited since its last part.
    arrival: u64,
    slot: usize,
}

impl Prefills {
    pub(super) fn with_capacity(max_running: usize) -> Prefills {
        Prefills {
            ranks: Vec::with_capacity(max_running),
        }
    }

    pub(super) fn clear(&mut self) {
        self.ranks.clear();
    }

    pub(super) fn add(&mut self, sequence: &Sequence) {
        self.ranks.push(PrefillRank {
            arrival: sequence.arrival,
            slot: sequence.id.slot(),
            ..PrefillRank::default()
        });
    }

    /// Shares the rest of the budget among the prompts. `planned_at` is the time of the last plan.
    pub(super) fn plan(
        &mut self,
        plan: &mut StepPlan,
        state: &mut SchedulerState,
        planned_at: Micros,
    ) {
        self.rank(state);
        let mut is_first = true;
        for rank in &self.ranks {
            let sequence = &state.sequences[rank.slot];
            // An earlier sequence may have taken its pages.
            if !sequence.is_running {
                continue;
            }
            let since = state.conditions.now - planned_at.max(sequence.pacing.last_token_at);
            let tokens = chunk(sequence, plan, &state.conditions, is_first);
            let planned = if tokens > 0 {
                plan_row(plan, state, rank.slot, tokens)
            } else {
                0
            };
            is_first &= planned == 0;
            state.sequences[rank.slot].note_prefill(planned > 0, since);
        }
    }

    /// Orders the prefills. Among equals the shortest is first, less the time that it has waited,
    /// so that no prompt waits for ever.
    fn rank(&mut self, state: &SchedulerState) {
        if let Order::FairShare { slack } = state.conditions.policy.order {
            let bands = state.queue.bands();
            for rank in &mut self.ranks {
                let sequence = &state.sequences[rank.slot];
                let tenant = state.queue.tenant(sequence.tenant);
                let band = tenant.policy.band;
                let ahead = tenant.machine_time_since(state.queue.least_virtual_time(band));
                let predictor = &state.conditions.predictor;
                let time = predictor.prefill_time(sequence.len(), sequence.remaining()) / 1000;
                let place = bands.iter().position(|&other| other == band);
                rank.band = place.unwrap_or(0);
                rank.ahead = ahead / slack.saturating_mul(1000).max(1);
                rank.remaining = time as i64 - sequence.pacing.prefill_waited as i64;
            }
        }
        self.ranks.sort_unstable();
    }
}

/// Returns the length of a prompt's next chunk: as many tokens as the budget allows. The first
/// chunk of a step has a minimum.
fn chunk(sequence: &Sequence, plan: &StepPlan, conditions: &Conditions, is_first: bool) -> usize {
    let limits = &conditions.limits;
    let (start, left) = (sequence.start(), sequence.remaining());
    let planned = plan.shape.rows as usize;
    let limit = left
        .min(limits.prefill_chunk as usize)
        .min((limits.step_tokens as usize).saturating_sub(planned));
    let allowed = match conditions.policy.budget {
        Budget::Time { .. } => {
            let largest = |logits| {
                let predictor = &conditions.predictor;
                predictor.largest_chunk(plan.budget, plan.shape, start, limit, logits)
            };
            let chunk = largest(0);
            // The end of the prompt needs logits.
            if chunk < left { chunk } else { largest(1) }
        }
        Budget::Tokens(tokens) => limit.min((tokens as usize).saturating_sub(planned)),
        Budget::PrefillFirst => limit,
    };
    let floor = if is_first { PREFILL_FLOOR.min(left) } else { 0 };
    allowed.max(floor)
}
