//! Drafts of a step: computed along with the decodes, where that costs less than it should gain.

use super::draft::{self, MAX_DRAFTED_TOKENS};
use super::plan::Share;
use crate::{Nanos, PAGE_TOKENS, Scheduler, StepShape};

/// Decodes in a step, beyond which none drafts: rows are hardly free then, and looking for drafts takes its time too.
const MOST_DRAFTING: usize = 16;

impl Scheduler {
    /// Guesses tokens for decodes where computing them along costs less than they should gain: a guess that is right saves
    /// a part of a later step. Past the knee of the cost nothing is gained.
    pub(crate) fn plan_drafts(&mut self) {
        let decodes = self.shares.iter().filter(|share| share.tokens == 1);
        let decodes = decodes.take(MOST_DRAFTING + 1).count();
        if self.policy.max_draft == 0 || !(1..=MOST_DRAFTING).contains(&decodes) {
            return;
        }
        let decodes_only = StepShape {
            rows: decodes as u64,
            decode_keys: self.shape.decode_keys,
            chunk_keys: 0,
            logits: decodes as u64,
        };
        let a_token = self.cost.predict(decodes_only) / decodes as u64;
        let one_more = self.shape.plus(StepShape::decode(1));
        if self.cost.predict(one_more) - self.cost.predict(self.shape) >= a_token {
            return; // Not even a guess that is sure to be right would be worth it.
        }
        for index in 0..self.shares.len() {
            let share = self.shares[index];
            let sequence = &self.sequences[share.slot];
            if share.tokens != 1 || sequence.is_prefill() {
                continue;
            }
            let room = sequence.table.len * PAGE_TOKENS - sequence.tokens.len();
            let rows = self.limits.max_batch_tokens() - self.shape.rows as usize;
            let most = (self.policy.max_draft as usize)
                .min(sequence.output_left() - 1)
                .min(room)
                .min(rows)
                .min(MAX_DRAFTED_TOKENS - self.drafts.len());
            let worthwhile = self.worthwhile_drafts(share.slot, most, a_token);
            if worthwhile == 0 {
                continue;
            }
            let first_draft = self.drafts.len();
            draft::propose(&sequence.tokens, worthwhile, &mut self.drafts);
            let drafts = self.drafts.len() - first_draft;
            self.shares[index] = Share {
                first_draft,
                drafts,
                ..share
            };
            for _ in 0..drafts {
                let one = StepShape::decode(self.sequences[share.slot].tokens.len());
                self.shape = self.shape.plus(one);
            }
        }
    }

    /// How many drafts of a sequence are each worth their cost, if a decoded token costs `a_token`.
    fn worthwhile_drafts(&self, slot: usize, most: usize, a_token: Nanos) -> usize {
        let sequence = &self.sequences[slot];
        let one = StepShape::decode(sequence.tokens.len());
        let gain = |drafts: usize| u64::from(sequence.acceptance.expected(drafts as u32)) * a_token;
        let mut shape = self.shape;
        for count in 0..most {
            let next = shape.plus(one);
            let cost = self.cost.predict(next) - self.cost.predict(shape);
            if self.predict(next) > self.budget || gain(count + 1) - gain(count) <= cost << 16 {
                return count;
            }
            shape = next;
        }
        most
    }
}
