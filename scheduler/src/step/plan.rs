//! The contents of the next step while it is being planned.
//!
//! Invariant: the shapes are the sums over the rows and their drafts.

use super::draft;
use crate::batch::NewRow;
use crate::sequence::{BlockRow, Sequence, Sequences, pages_for};
use crate::{Batch, Nanos, StepShape, TenantId, TokenId};

/// The rows of a step, their drafts and their cost. The other files of this folder only read the
/// fields.
pub(super) struct StepPlan {
    pub(super) rows: Vec<PlannedRow>,
    pub(super) drafts: Vec<TokenId>, // Of all rows.
    pub(super) shape: StepShape,
    pub(super) drafting: StepShape, // Of the pass before the step that drafts.
    pub(super) budget: Nanos,       // How long the step may take.
    pub(super) scored: usize,       // Prompt tokens before the last one that need logits.
}

/// One sequence's part of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlannedRow {
    pub(super) slot: usize,
    pub(super) tenant: TenantId,
    pub(super) tokens: usize,  // Without drafts.
    pub(super) draw_time: u32, // Nanoseconds.
    logits: usize,             // Without drafts.
    first_draft: usize,        // In the plan's drafts.
    pub(super) drafts: usize,
    own_drafts: usize, // The last drafts, which the model drafts itself.
}

impl StepPlan {
    pub(super) fn with_capacity(rows: usize, drafts: usize) -> StepPlan {
        StepPlan {
            rows: Vec::with_capacity(rows),
            drafts: Vec::with_capacity(2 * drafts), // Some are replaced.
            shape: StepShape::default(),
            drafting: StepShape::default(),
            budget: Nanos::MAX,
            scored: 0,
        }
    }

    /// Removes everything and lifts the budget.
    pub(super) fn clear(&mut self) {
        self.rows.clear();
        self.drafts.clear();
        self.shape = StepShape::default();
        self.drafting = StepShape::default();
        self.budget = Nanos::MAX;
        self.scored = 0;
    }

    pub(super) fn set_budget(&mut self, budget: Nanos) {
        self.budget = budget;
    }

    /// Adds the next `tokens` tokens of a sequence, which have their pages.
    pub(super) fn add(&mut self, sequence: &Sequence, tokens: usize) {
        self.shape = self.shape.plus(sequence.shape_of(tokens));
        let logits = sequence.logits_of(tokens);
        self.scored += logits.saturating_sub(1);
        self.rows.push(PlannedRow {
            slot: sequence.id.slot(),
            tenant: sequence.tenant,
            tokens,
            draw_time: sequence.draw_time as u32, // At most MAX_DRAW_TIME.
            logits,
            first_draft: 0,
            drafts: 0,
            own_drafts: 0,
        });
    }

    /// Removes a sequence that loses its pages, if the step has it.
    pub(super) fn remove(&mut self, sequence: &Sequence) {
        let slot = sequence.id.slot();
        if let Some(index) = self.rows.iter().position(|row| row.slot == slot) {
            let row = self.rows.remove(index);
            self.shape = self.shape.minus(sequence.shape_of(row.tokens));
            self.scored -= row.logits.saturating_sub(1);
        }
    }

    /// Returns whether no row is a part of a prompt or of a block.
    pub(super) fn has_only_decodes(&self) -> bool {
        self.rows.iter().all(|row| row.tokens == 1)
    }

    /// Adds up to `limit` draft tokens to a decode.
    pub(super) fn add_drafts(&mut self, row: usize, sequence: &Sequence, limit: usize) {
        let first_draft = self.drafts.len();
        match sequence.forced() {
            Some(forced) => self.drafts.extend(forced.iter().take(limit)),
            None => draft::propose(sequence.tokens(), limit, &mut self.drafts),
        }
        let drafts = self.drafts.len() - first_draft;
        let row = &mut self.rows[row];
        (row.first_draft, row.drafts) = (first_draft, drafts);
        for _ in 0..drafts {
            self.shape = self.shape.plus(sequence.decode_shape());
        }
    }

    /// Adds `count` draft tokens to a decode that the model drafts itself. They replace those that
    /// were looked up.
    pub(super) fn add_own_drafts(
        &mut self,
        row: usize,
        sequence: &Sequence,
        count: usize,
        mask_token: TokenId,
    ) {
        let first_draft = self.drafts.len();
        self.drafts.resize(first_draft + count, mask_token);
        let row = &mut self.rows[row];
        for _ in 0..row.drafts {
            self.shape = self.shape.minus(sequence.decode_shape());
        }
        (row.first_draft, row.drafts, row.own_drafts) = (first_draft, count, count);
        for _ in 0..count {
            self.shape = self.shape.plus(sequence.decode_shape());
            self.drafting = self.drafting.plus(StepShape::decode(sequence.len()));
        }
    }

    /// Replaces the rows of `batch` by the rows of this plan.
    pub(super) fn fill(&self, batch: &mut Batch, sequences: &Sequences) {
        batch.clear_rows();
        for row in &self.rows {
            let sequence = &sequences[row.slot];
            if let Some(copy) = sequence.page_copy(&batch.tables) {
                batch.push_copy(copy);
            }
            let (tokens, table) = (sequence.tokens(), sequence.table());
            // A pass over a block has its mask tokens in the place of drafts.
            let BlockRow {
                before,
                ahead,
                behind_logits,
                block,
                tokens_behind,
            } = sequence.block_row();
            let start = sequence.start() + before;
            let end = start + row.tokens;
            let pages = pages_for(end + row.drafts + tokens_behind);
            assert!(pages <= table.len, "the plan secured its pages");
            let known = tokens.get(start..end - ahead.len());
            batch.push_planned(NewRow {
                sequence: sequence.id,
                start,
                known: known.unwrap_or_default(), // A part may have tokens ahead alone.
                drafts: match ahead {
                    [] => &self.drafts[row.first_draft..][..row.drafts],
                    _ => ahead,
                },
                first_page: table.first,
                page_count: pages,
                logits: row.logits + row.drafts,
                behind_logits,
                own_drafts: row.own_drafts,
                block,
                tokens_behind,
            });
            if let Some(states) = sequence.row_states() {
                batch.set_states(states);
            }
        }
    }
}
