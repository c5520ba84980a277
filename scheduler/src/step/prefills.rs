//! The prompts of a step: their order, and how much of each the step computes.
//!
//! Invariant: prompts take the time that the decodes leave of the budget. The first prompt gets at
//! least [`prefill_floor`] tokens.
//!
//! Prompts that yield to another tenant's short prompt wait for the next step once a prompt is in
//! this one. Otherwise they would fill the step, and the first token of the short prompt would wait
//! for all of it.

use super::plan::StepPlan;
use super::preempt::plan_row;
use super::short_prompts::{MAX_PAUSES_FOR_SHORT_PROMPTS, ShortPrompts};
use crate::conditions::Conditions;
use crate::limits::{MAX_SCORED_TOKENS, PREFILL_FLOOR, prefill_floor};
use crate::sequence::Sequence;
use crate::state::SchedulerState;
use crate::{Budget, Micros, Order, StepShape};

/// A running prefill's rank; the least is first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PrefillRank {
    band: usize,        // The band's place in the order of `Queue::bands`.
    yields: bool,       // To another tenant's short prompt.
    ahead: u64, // How far its tenant is ahead of the tenant served least, in units of the slack.
    turn: usize, // Its place among the prefills of its tenant.
    is_lowered: bool, // To a lower band than its tenant's.
    client_turn: usize, // Its place among the prefills of its client.
    remaining: i64, // Microseconds to compute, less the time waited since its last part.
    arrival: u64,
    slot: usize,
}

impl PrefillRank {
    /// Creates the rank by arrival alone.
    pub(super) fn by_arrival(sequence: &Sequence) -> PrefillRank {
        PrefillRank {
            arrival: sequence.arrival,
            slot: sequence.id.slot(),
            ..PrefillRank::default()
        }
    }
}

/// Shares the rest of the budget among the prompts. `planned_at` is the time of the last plan.
pub(super) fn plan_prefills(
    plan: &mut StepPlan,
    prefills: &mut [PrefillRank],
    state: &mut SchedulerState,
    short_prompts: &ShortPrompts,
    planned_at: Micros,
) {
    sort_prefills(prefills, state, short_prompts);
    let mut is_first = true;
    for &PrefillRank { slot, yields, .. } in &*prefills {
        let sequence = &state.sequences[slot];
        // An earlier sequence may have taken its pages.
        if !sequence.is_running {
            continue;
        }
        let since = state.conditions.now - planned_at.max(sequence.pacing.last_token_at);
        let paused = sequence.pacing.paused_steps;
        let pauses = yields && !is_first && paused < MAX_PAUSES_FOR_SHORT_PROMPTS;
        state.sequences[slot].note_pause(pauses);
        if pauses {
            state.sequences[slot].note_prefill(false, since);
            continue;
        }
        let sequence = &state.sequences[slot];
        let mut tokens = chunk(sequence, plan, &state.conditions, is_first);
        if tokens > 0 {
            tokens = plan_row(plan, state, slot, tokens);
        }
        is_first &= tokens == 0;
        state.sequences[slot].note_prefill(tokens > 0, since);
    }
}

/// Orders the prefills. Tenants take turns. Among equals the shortest is first, less the time that
/// it has waited, so that no prompt waits for ever.
fn sort_prefills(
    prefills: &mut [PrefillRank],
    state: &SchedulerState,
    short_prompts: &ShortPrompts,
) {
    if let Order::FairShare { slack } = state.conditions.policy.order {
        let bands = state.queue.bands();
        for rank in &mut *prefills {
            let sequence = &state.sequences[rank.slot];
            let tenant = state.queue.tenant(sequence.tenant);
            let band = tenant.policy.band;
            let ahead = tenant.machine_time_since(state.queue.least_virtual_time(band));
            let predictor = &state.conditions.predictor;
            let time = predictor.prefill_time(sequence.len(), sequence.remaining()) / 1000;
            let place = bands.iter().position(|&other| other == band);
            rank.band = place.unwrap_or(0);
            rank.yields = short_prompts.precede(sequence, state);
            rank.ahead = ahead / slack.saturating_mul(1000).max(1);
            rank.remaining = time as i64 - sequence.pacing.prefill_waited as i64;
        }
    }
    prefills.sort_unstable();
    take_client_turns(prefills, state);
    take_turns(prefills, state);
}

/// Lets the clients of a tenant take turns. Prompts with a lower band than the tenant's come last.
fn take_client_turns(prefills: &mut [PrefillRank], state: &SchedulerState) {
    let client = |rank: &PrefillRank| {
        let sequence = &state.sequences[rank.slot];
        let record = &sequence.record;
        (sequence.tenant, record.turn.lowered, record.client)
    };
    if prefills
        .iter()
        .all(|rank| matches!(client(rank), (_, None, None)))
    {
        return;
    }
    number_by(prefills, client, |rank, place| rank.client_turn = place);
    for rank in &mut *prefills {
        rank.is_lowered = client(rank).1.is_some();
    }
    prefills.sort_unstable();
}

/// Lets tenants take turns whose prompts are equally far ahead, so that many prompts of one tenant
/// do not delay the first one of another.
fn take_turns(prefills: &mut [PrefillRank], state: &SchedulerState) {
    let tenant = |rank: &PrefillRank| state.sequences[rank.slot].tenant;
    let are_of_one = |two: &[PrefillRank]| tenant(&two[0]) == tenant(&two[1]);
    if prefills.windows(2).all(are_of_one) {
        return;
    }
    number_by(prefills, tenant, |rank, place| rank.turn = place);
    prefills.sort_unstable();
}

/// Tells each prefill how many with the same key come before it.
fn number_by<K: PartialEq>(
    prefills: &mut [PrefillRank],
    key: impl Fn(&PrefillRank) -> K,
    tell: impl Fn(&mut PrefillRank, usize),
) {
    for place in 0..prefills.len() {
        let (earlier, rest) = prefills.split_at_mut(place);
        let own = key(&rest[0]);
        let before = earlier.iter().filter(|rank| key(rank) == own).count();
        tell(&mut rest[0], before);
    }
}

/// Returns the length of a prompt's next chunk: as many tokens as the budget allows. The first
/// chunk of a step has a minimum.
fn chunk(sequence: &Sequence, plan: &StepPlan, conditions: &Conditions, is_first: bool) -> usize {
    let limits = &conditions.limits;
    if sequence.is_unmasking() {
        return pass(sequence, plan, conditions, is_first);
    }
    let (start, left) = (sequence.start(), sequence.left_to_draw());
    let planned = plan.shape.rows as usize;
    let limit = left
        .min(limits.prefill_chunk as usize)
        .min((limits.step_tokens as usize).saturating_sub(planned));
    let (limit, scored) = if sequence.is_scoring() {
        let limit = limit.min(MAX_SCORED_TOKENS - plan.scored);
        (limit, limit as u64)
    } else {
        (limit, 0)
    };
    let allowed = match conditions.policy.budget {
        Budget::Time { .. } => {
            let largest = |base| {
                let predictor = &conditions.predictor;
                predictor.largest_chunk(plan.budget, base, start, limit)
            };
            let with_logits = |logits| {
                let logits = StepShape {
                    logits,
                    ..StepShape::default()
                };
                largest(plan.shape.plus(logits.with_draws(sequence.draw_time)))
            };
            match with_logits(scored) {
                chunk if chunk < left || scored > 0 => chunk,
                _ => with_logits(1), // The end of the prompt needs them.
            }
        }
        Budget::Tokens(tokens) => limit.min((tokens as usize).saturating_sub(planned)),
        Budget::PrefillFirst => limit,
    };
    let floor = match conditions.policy.budget {
        _ if !is_first => 0,
        Budget::Time { .. } => prefill_floor(planned),
        Budget::Tokens(_) | Budget::PrefillFirst => PREFILL_FLOOR,
    };
    match sequence.whole_rows(allowed.max(floor.min(left))) {
        0 if is_first => sequence.least_row(floor),
        chunk => chunk,
    }
}

/// Returns the length of a pass over a block or a part of it: all of its tokens, if the step has
/// room for them and for their logits, or if it has no other prefill.
fn pass(sequence: &Sequence, plan: &StepPlan, conditions: &Conditions, is_first: bool) -> usize {
    let tokens = sequence.left_to_draw();
    let shape = plan.shape.plus(sequence.shape_of(tokens));
    let scored = plan.scored + sequence.logits_of(tokens).saturating_sub(1);
    let is_short = match conditions.policy.budget {
        Budget::Time { .. } => conditions.predictor.predict(shape) <= plan.budget,
        Budget::Tokens(tokens) => shape.rows <= u64::from(tokens),
        Budget::PrefillFirst => true,
    };
    let fits = is_short
        && shape.rows <= u64::from(conditions.limits.step_tokens)
        && scored <= MAX_SCORED_TOKENS;
    if fits || is_first { tokens } else { 0 }
}
