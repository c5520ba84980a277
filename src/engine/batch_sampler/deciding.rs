//! Which logits decide the draws of a step, before its forward pass.

use sterna_scheduler::{Batch, Row, SequenceId, TokenId};

use super::{Continuation, scored_of, with_drafts};
use crate::engine::sampler::{self, LogitChanges};
use crate::model::WantedLogits;

/// Finds the logits that decide the draws of a step.
pub(in crate::engine) struct DecidingLogits {
    wanted: WantedLogits,
    changes: LogitChanges,
    history: Vec<TokenId>, // The known tokens of a row, then its draft tokens.
}

impl DecidingLogits {
    pub(in crate::engine) fn new(vocabulary: usize) -> DecidingLogits {
        DecidingLogits {
            wanted: WantedLogits::with_capacity(vocabulary),
            changes: LogitChanges::new(vocabulary),
            history: Vec::new(),
        }
    }

    /// Returns the logits of each row that decide the draws of `batch`; all if one of the draws may
    /// need all of a row.
    pub(in crate::engine) fn of<'a>(
        &mut self,
        batch: &Batch,
        continuation: impl Fn(SequenceId) -> Continuation<'a>,
    ) -> &WantedLogits {
        self.wanted.clear();
        for row in batch.rows().iter().filter(|row| row.logits > 0) {
            if self.add(batch, row, &continuation(row.sequence)).is_none() {
                self.wanted.clear();
                break;
            }
        }
        &self.wanted
    }

    /// Adds the logits of a batch row, unless its draws may need all.
    fn add(&mut self, batch: &Batch, row: &Row, sequence: &Continuation<'_>) -> Option<()> {
        let (params, known) = (sequence.params, sequence.known.len());
        // The tokens of a block are scored too.
        if row.block != 0 || params.pooling.is_some() || scored_of(row, known) > 0 {
            return None;
        }
        let drafts = &batch.tokens(row)[row.len() + 1 - row.logits as usize..];
        let tokens = with_drafts(sequence.known, drafts, &mut self.history);
        for place in 0..row.logits as usize {
            let context = sequence.context(&tokens[..known + place]).ok()?;
            let deciding = sampler::deciding(&context)?;
            self.wanted.push(deciding, self.changes.of(&context));
        }
        Some(())
    }
}
