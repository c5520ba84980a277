//! The drafts of a step: tokens computed along with the decodes where that should save time. They
//! are looked up in the past of a sequence, or the model drafts them in a pass before the step.

use super::plan::StepPlan;
use crate::conditions::Conditions;
use crate::cost::Drafting;
use crate::sequence::{Sequence, Sequences};
use crate::state::SchedulerState;
use crate::{MAX_DRAFTED_TOKENS, Nanos, OwnDrafts, PAGE_TOKENS, StepShape};

/// The greatest number of decodes in a step with drafts. With more of them additional rows are
/// hardly free, and the search for drafts takes time too.
const MAX_DRAFTING: usize = 16;

/// Adds drafts to decodes where a draft costs less than it should gain. An accepted draft saves a
/// part of a later step.
pub(super) fn plan_drafts(plan: &mut StepPlan, sequences: &Sequences, conditions: &Conditions) {
    let max_draft = conditions.policy.max_draft as usize;
    let decodes = plan.rows.iter().filter(|row| row.tokens == 1);
    let decodes = decodes.take(MAX_DRAFTING + 1).count();
    if max_draft == 0 || !(1..=MAX_DRAFTING).contains(&decodes) {
        return;
    }
    let shape = plan.shape;
    let predict = |shape| conditions.predictor.predict(shape);
    let token_time = token_time(shape.decode_keys, decodes as u64, conditions);
    if predict(shape.plus(StepShape::decode(1))) - predict(shape) >= token_time {
        return; // Even a draft that is certain to be accepted would not pay.
    }
    for index in 0..plan.rows.len() {
        let row = plan.rows[index];
        let sequence = &sequences[row.slot];
        if row.tokens != 1 || sequence.is_prefill() {
            continue;
        }
        let free_places = sequence.table().len * PAGE_TOKENS - sequence.len();
        let free_rows = conditions.limits.max_batch_tokens() - plan.shape.rows as usize;
        let limit = max_draft
            .min(sequence.output_left() - 1)
            .min(free_places)
            .min(free_rows)
            .min(conditions.limits.max_drafts_of_row())
            .min(MAX_DRAFTED_TOKENS - plan.drafts.len());
        let count = worthwhile_drafts(plan, sequence, conditions, limit, token_time);
        if count > 0 {
            plan.add_drafts(index, sequence, count);
        }
    }
}

/// Returns the time of a token in a step of `decodes` decodes and nothing else, which attend to
/// `keys` keys.
fn token_time(keys: u64, decodes: u64, conditions: &Conditions) -> Nanos {
    let decodes_only = StepShape {
        rows: decodes,
        decode_keys: keys,
        logits: decodes,
        ..StepShape::default()
    };
    conditions.predictor.predict(decodes_only) / decodes
}

/// Returns how many drafts of a sequence are each worth their cost, up to `limit`. `token_time` is
/// what an accepted draft saves.
fn worthwhile_drafts(
    plan: &StepPlan,
    sequence: &Sequence,
    conditions: &Conditions,
    limit: usize,
    token_time: Nanos,
) -> usize {
    let predictor = &conditions.predictor;
    let one = sequence.decode_shape();
    let draw_time = predictor.draw_time(sequence.draw_time);
    let acceptance = sequence.acceptances(conditions.usual_acceptances).looked_up;
    let (limit, is_certain) = match sequence.forced() {
        Some(forced) => (limit.min(forced.len()), true),
        None => (limit, false),
    };
    let expected = |drafts: usize| {
        if is_certain {
            (drafts as u64) << 16
        } else {
            u64::from(acceptance.expected(drafts as u32))
        }
    };
    let gain = |drafts| expected(drafts) * token_time;
    let mut shape = plan.shape;
    for count in 0..limit {
        let next = shape.plus(one);
        // The draw of an accepted draft is none that a later step makes, so it costs nothing.
        let cost = (predictor.predict(next) - predictor.predict(shape)).saturating_sub(draw_time);
        let gained = gain(count + 1) - gain(count);
        if predictor.predict(next) > plan.budget || gained <= cost << 16 {
            return count;
        }
        shape = next;
    }
    limit
}

/// The numbers of drafts that are tried.
const OWN_DRAFTS: [usize; 9] = [2, 3, 4, 6, 8, 12, 16, 24, 32];

/// Lets the model draft for the decodes of which it should know more of the next tokens than their
/// past does, if that gains more than the pass before the step costs.
///
/// A draft of a sequence costs a row of that pass and a row of the step. All sequences share the
/// pass, so they are judged together.
pub(super) fn plan_own_drafts(plan: &mut StepPlan, state: &mut SchedulerState) {
    let Some(OwnDrafts { mask_token, block }) = state.conditions.policy.own_drafts else {
        return;
    };
    let decodes = plan.rows.len();
    if !(1..=MAX_DRAFTING).contains(&decodes) || !plan.has_only_decodes() {
        return; // A part of a prompt fills the step.
    }
    if state.conditions.limits.states.is_some() {
        return; // A pass that drafts would change the states of recurrent layers.
    }
    let drafting = state.conditions.decode_speeds.drafting(decodes);
    if drafting == Drafting::Never {
        return;
    }
    let best = OWN_DRAFTS
        .into_iter()
        .take_while(|&count| count <= block as usize && count * decodes <= MAX_DRAFTED_TOKENS)
        .filter_map(|count| Some((own_gain(plan, state, count)?, count)))
        .max_by_key(|&(gain, _)| gain);
    let Some((gain, count)) = best else {
        return;
    };
    if gain <= 0 && drafting == Drafting::IfItPays {
        return;
    }
    for index in 0..plan.rows.len() {
        let drafts = own_drafts(plan, index, state, count);
        if drafts == 0 {
            continue;
        }
        let slot = plan.rows[index].slot;
        let free = state.pool.available(state.sequences[slot].tenant);
        let sequence = &mut state.sequences[slot];
        if free > SPARE_PAGES {
            sequence.take_pages(1 + drafts, &mut state.pool, &mut state.batch.tables);
        }
        let drafts = drafts.min(sequence.table().len * PAGE_TOKENS - sequence.len());
        if drafts > 0 {
            plan.add_own_drafts(index, sequence, drafts, mask_token);
        }
    }
}

/// Returns whether a step tells how fast decodes are with or without drafts of the model. Drafts
/// that a grammar forces are certain, so they tell nothing.
pub(super) fn tells_speed(plan: &StepPlan, state: &SchedulerState) -> bool {
    let is_forced = |slot: usize| state.sequences[slot].forced().is_some();
    plan.rows.len() <= MAX_DRAFTING
        && state.conditions.policy.own_drafts.is_some()
        && plan.has_only_decodes()
        && !plan.rows.iter().any(|row| is_forced(row.slot))
}

/// A sequence takes a page for its drafts if more than this many stay for others.
const SPARE_PAGES: usize = 64;

/// Returns how many of `count` drafts the model makes for a row: none if the row is no decode, if a
/// grammar says what follows, or if more should be right of what was looked up.
fn own_drafts(plan: &StepPlan, index: usize, state: &SchedulerState, count: usize) -> usize {
    let row = plan.rows[index];
    let sequence = &state.sequences[row.slot];
    if row.tokens != 1 || sequence.is_prefill() || sequence.forced().is_some() {
        return 0;
    }
    let count = count.min(sequence.output_left() - 1);
    let acceptances = sequence.acceptances(state.conditions.usual_acceptances);
    let looked_up = acceptances.looked_up.expected(row.drafts as u32);
    if acceptances.own.expected(count as u32) > looked_up {
        count
    } else {
        0
    }
}

/// What drafts of the model must gain, in parts of their cost. Costs and acceptance are estimates,
/// and each step takes the number of drafts whose estimate is best, which errs to one side.
const LEAST_GAIN: [i128; 2] = [5, 4];

/// Returns what `count` drafts of the model gain for each decode, less what they must gain: in
/// nanoseconds times 65,536. Returns `None` if there is no room or no time for them.
fn own_gain(plan: &StepPlan, state: &SchedulerState, count: usize) -> Option<i128> {
    let predictor = &state.conditions.predictor;
    let (mut shape, mut drafting, mut tokens) = (plan.shape, StepShape::default(), 0);
    for index in 0..plan.rows.len() {
        let drafts = own_drafts(plan, index, state, count);
        if drafts == 0 {
            continue;
        }
        let row = plan.rows[index];
        let sequence = &state.sequences[row.slot];
        let one = sequence.decode_shape();
        for _ in 0..row.drafts {
            shape = shape.minus(one);
        }
        for _ in 0..drafts {
            shape = shape.plus(one);
            drafting = drafting.plus(StepShape::decode(sequence.len()));
        }
        let acceptances = sequence.acceptances(state.conditions.usual_acceptances);
        let looked_up = acceptances.looked_up.expected(row.drafts as u32);
        tokens += u64::from(acceptances.own.expected(drafts as u32) - looked_up);
    }
    let rows = shape.rows as usize;
    let time = predictor.predict(shape) + predictor.predict(drafting);
    if drafting.rows == 0 || time > plan.budget || rows > state.conditions.limits.max_batch_tokens()
    {
        return None;
    }
    let decodes = plan.rows.iter().filter(|row| row.tokens == 1).count() as u64;
    let keys = plan.rows.iter().filter(|row| row.tokens == 1);
    let keys = keys.map(|row| state.sequences[row.slot].len() as u64).sum();
    let token_time = token_time(keys, decodes, &state.conditions);
    let cost = time.saturating_sub(predictor.predict(plan.shape));
    let [part, of] = LEAST_GAIN;
    Some(i128::from(tokens) * i128::from(token_time) - (i128::from(cost) << 16) * part / of)
}
