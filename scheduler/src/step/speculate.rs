//! The drafts of a step: tokens computed along with the decodes where that should save time.

use super::plan::StepPlan;
use crate::conditions::Conditions;
use crate::sequence::{Sequence, Sequences};
use crate::{MAX_DRAFTED_TOKENS, Nanos, PAGE_TOKENS, StepShape};

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
    let decodes_only = StepShape {
        rows: decodes as u64,
        decode_keys: shape.decode_keys,
        chunk_keys: 0,
        logits: decodes as u64,
        sampling: 0,
    };
    let predict = |shape| conditions.predictor.predict(shape);
    let token_time = predict(decodes_only) / decodes as u64;
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
    let acceptance = sequence.pacing.acceptance;
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
