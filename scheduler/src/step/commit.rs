//! What a computed step changes: the lengths of sequences, finished requests, the prefix tree, and
//! charges.
//!
//! Invariant: only a commit makes tokens computed.
//!
//! Invariant: the charges of a step add up to its predicted time.

use super::plan::StepPlan;
use crate::state::SchedulerState;
use crate::{FinishReason, Row, Sampled, SequenceId, StepShape};

/// Charges each tenant for its rows: its part of what all rows share, and each row's attention
/// and sampling.
pub(super) fn charge_step(plan: &StepPlan, state: &mut SchedulerState) {
    let (predictor, queue) = (&state.conditions.predictor, &mut state.queue);
    let drafting = predictor.predict(plan.drafting);
    let total = predictor.predict(plan.shape) + drafting;
    let row_cost = predictor.row_cost(plan.shape);
    let draft_cost = drafting / plan.drafting.rows.max(1);
    let mut charged = 0;
    for (row, planned) in state.batch.rows().iter().zip(&plan.rows) {
        let mut cost = row_cost(row_shape(row, planned.tokens));
        if planned.draw_time > 0 {
            let sampling = u64::from(row.logits) * u64::from(planned.draw_time);
            cost += predictor.draw_time(sampling);
        }
        cost += u64::from(row.own_drafts) * draft_cost;
        let cost = cost.min(total - charged);
        charged += cost;
        queue.charge(planned.tenant, cost);
    }
    queue.charge(plan.rows[0].tenant, total - charged);
    queue.settle_charges();
}

/// Commits every row of the batch. The sequences in `failed` end, and nothing that the step
/// computed for them is kept.
pub(super) fn commit_rows(state: &mut SchedulerState, sampled: &[Sampled], failed: &[SequenceId]) {
    let mut entries = sampled;
    for index in 0..state.batch.rows().len() {
        let row = state.batch.rows()[index];
        let (own, rest) = entries.split_at(row.logits as usize);
        entries = rest;
        if failed.contains(&row.sequence) {
            state.finish(row.sequence, FinishReason::Error);
        } else {
            commit_row(state, &row, own);
        }
    }
}

/// Commits one row: its tokens are in its sequence's pages now, and the sequence continues with the
/// drawn tokens. A failed row ends its sequence.
fn commit_row(state: &mut SchedulerState, row: &Row, sampled: &[Sampled]) {
    let now = state.conditions.now;
    let (id, slot) = (row.sequence, row.sequence.slot());
    let tokens = state.batch.tokens(row);
    let sequence = &mut state.sequences[slot];
    if sequence.is_unmasking() {
        if sampled.is_empty() {
            return sequence.commit_restored_block();
        }
        let (replaced, drawn) = sequence.commit_pass(now, sampled);
        state.log.unmasked(replaced);
        if let Some(reason) = drawn.ending {
            state.finish(id, reason);
        }
        return;
    }
    // The tokens after the scored ones are known, so nothing is drawn there.
    let first = row.logits_range().start;
    let scored = (sequence.len() - 1).saturating_sub(first);
    let (scores, sampled) = sampled.split_at(scored.min(sampled.len()));
    if scores.contains(&Sampled::Failed) {
        return state.finish(id, FinishReason::Error);
    }
    let drafts = &tokens[tokens.len() - sampled.len().saturating_sub(1)..];
    if sampled.contains(&Sampled::Failed) {
        sequence.draw(drafts, sampled); // The caller has seen the tokens before the failure.
        return state.finish(id, FinishReason::Error);
    }
    if sequence.commit_copy(&mut state.pool) {
        state.log.copied_page();
    }
    let drawn = sequence.commit_row(now, row.len(), drafts, sampled);
    let are_own = row.own_drafts > 0;
    let usual = &mut state.conditions.usual_acceptances;
    sequence.learn_acceptance(drafts.len(), are_own, &drawn, usual);
    state.log.drafted(drafts.len(), drawn.accepted, are_own);
    let redirected = sequence.publish(&mut state.pool, &mut state.batch.tables);
    state.log.redirected_pages(redirected);
    sequence.commit_states(row.start as usize, &mut state.pool, &state.batch.tables);
    if let Some(reason) = drawn.ending {
        state.finish(id, reason);
    }
}

/// Returns what one row adds to a step; `known` of its tokens are not drafts.
fn row_shape(row: &Row, known: usize) -> StepShape {
    let (start, drafts) = (row.start as usize, row.len() - known);
    if known > 1 {
        return StepShape::chunk(start, known, row.logits as usize);
    }
    let tokens = 1 + drafts as u64;
    StepShape {
        rows: tokens,
        decode_keys: tokens * (start + known) as u64,
        chunk_keys: 0,
        logits: u64::from(row.logits),
        sampling: 0,
    }
}
