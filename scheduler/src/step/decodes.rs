//! The decodes of a step, the time that they leave for the rest, and which of them pause.
//!
//! Invariant: every decode that has its page is in every step, except decodes that pause. No decode
//! pauses in more than [`MAX_PAUSES_FOR_SHORT_PROMPTS`] consecutive steps.

use super::plan::StepPlan;
use super::preempt::plan_row;
use super::prefills::PrefillRank;
use super::short_prompts::{MAX_PAUSES_FOR_SHORT_PROMPTS, ShortPrompts};
use crate::conditions::Conditions;
use crate::sequence::Sequence;
use crate::state::SchedulerState;
use crate::{Band, Budget, Micros, Nanos};

/// Consecutive steps in which a decode of the batch band may pause for lack of time.
const MAX_PAUSES: u32 = 3;

/// Plans the next token of every running decode and sets the step's budget. `prefills` receives the
/// sequences that still compute their prompt.
pub(super) fn plan_decodes(
    plan: &mut StepPlan,
    prefills: &mut Vec<PrefillRank>,
    state: &mut SchedulerState,
    short_prompts: &ShortPrompts,
    may_pause: bool,
) {
    prefills.clear();
    let any_short_prompts = !short_prompts.is_empty();
    let mut oldest_token = Micros::MAX;
    let mut place = 0;
    while place < state.sequences.running().len() {
        let slot = state.sequences.running()[place];
        place += 1;
        let sequence = &state.sequences[slot];
        if sequence.is_prefill() {
            prefills.push(PrefillRank::by_arrival(sequence));
            continue;
        }
        let pauses = may_pause
            && (any_short_prompts && pauses_for_short_prompt(sequence, short_prompts, state)
                || pauses_for_time(sequence, plan, &state.conditions, oldest_token));
        if pauses {
            state.sequences[slot].note_pause(true);
            continue;
        }
        let last_token_at = sequence.pacing.last_token_at;
        let is_planned = if sequence.lacks_pages_for(1) || sequence.lacks_slab_for(1, &state.pool) {
            let tokens = plan_row(plan, state, slot, 1);
            place = state.sequences.place(slot) + 1; // Earlier ones may have lost their pages.
            tokens > 0
        } else {
            plan.add(sequence, 1);
            true
        };
        if is_planned {
            oldest_token = oldest_token.min(last_token_at);
        }
        state.sequences[slot].note_pause(false);
    }
    plan.set_budget(step_budget(oldest_token, &state.conditions));
}

/// Returns whether a decode pauses in this step for another tenant's short prompt. The streams of a
/// tenant with more requests waiting must not fill the machine.
fn pauses_for_short_prompt(
    sequence: &Sequence,
    short_prompts: &ShortPrompts,
    state: &SchedulerState,
) -> bool {
    sequence.pacing.paused_steps < MAX_PAUSES_FOR_SHORT_PROMPTS
        && short_prompts.precede(sequence, state)
}

/// Returns whether a decode of the batch band pauses in this step for lack of time.
fn pauses_for_time(
    sequence: &Sequence,
    plan: &StepPlan,
    conditions: &Conditions,
    oldest_token: Micros,
) -> bool {
    // Not computed for other bands.
    let step = || plan.shape.plus(sequence.decode_shape());
    sequence.band == Band::Batch
        && sequence.pacing.paused_steps < MAX_PAUSES
        && !plan.rows.is_empty()
        && conditions.predictor.predict(step()) > step_budget(oldest_token, conditions)
}

/// Returns how long this step may take if `oldest_token` is the earliest time of a last token among
/// its decodes. After a step that took much longer than predicted, the next one may take less,
/// because other work may go on.
fn step_budget(oldest_token: Micros, conditions: &Conditions) -> Nanos {
    let Budget::Time {
        inter_token_target,
        min_step,
        max_step,
        is_strict,
    } = conditions.policy.budget
    else {
        return Nanos::MAX;
    };
    let target = conditions.predictor.target(inter_token_target, is_strict);
    let longer = target - inter_token_target;
    let due = oldest_token.saturating_add(target);
    let left = due.saturating_sub(conditions.now);
    let budget = left.clamp(min_step, max_step + longer) * 1000;
    if oldest_token == Micros::MAX {
        return budget; // No decode waits.
    }
    conditions.predictor.cautious(budget)
}
