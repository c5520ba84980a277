//! How a request changes single logits before a draw: by biases, a minimum length and penalties.

use sterna_scheduler::TokenId;

use super::DrawContext;
use crate::fault::{self, Place};
use crate::model::LogitChange;

/// The changes of one draw, each of another token. The rest is memory, without meaning between
/// calls.
pub(in crate::engine) struct LogitChanges {
    changes: Vec<LogitChange>,
    /// The number of each token's change, from 1 on; 0 for a token without a change.
    number_of: Vec<u32>,
    /// The occurrences in the output of the token of each change.
    counts: Vec<u32>,
}

impl LogitChanges {
    /// Returns memory for the changes of `vocabulary` tokens.
    pub(in crate::engine) fn new(vocabulary: usize) -> LogitChanges {
        LogitChanges {
            changes: Vec::with_capacity(vocabulary),
            number_of: vec![0; vocabulary],
            counts: Vec::with_capacity(vocabulary),
        }
    }

    /// Returns the changes of a draw, except those of a grammar's mask.
    pub(in crate::engine) fn of(&mut self, context: &DrawContext<'_>) -> &[LogitChange] {
        let params = context.params;
        // Here and not at the end, so that a call that panicked leaves nothing behind.
        for change in self.changes.drain(..) {
            self.number_of[change.token as usize] = 0;
        }
        self.counts.clear();
        for &(token, bias) in &params.logit_bias {
            let number = self.number_of(token);
            self.changes[number].bias += bias;
            fault::pass(Place::BiasAdded);
        }
        for &token in context.forbidden {
            let number = self.number_of(token);
            self.changes[number].bias = f32::NEG_INFINITY;
            fault::pass(Place::StopTokensForbidden);
        }
        if params.repetition_penalty != 1.0 {
            for &token in context.history {
                let number = self.number_of(token);
                self.changes[number].penalty = params.repetition_penalty;
                fault::pass(Place::RepetitionPenalized);
            }
        }
        if params.frequency_penalty != 0.0 || params.presence_penalty != 0.0 {
            for &token in &context.history[context.prompt_tokens..] {
                let number = self.number_of(token);
                self.counts[number] += 1;
                self.changes[number].minus =
                    params.frequency_penalty * self.counts[number] as f32 + params.presence_penalty;
                fault::pass(Place::OutputPenalized);
            }
        }
        &self.changes
    }

    /// Returns the number of the token's change, from 0 on. Adds one that changes nothing if there
    /// is none.
    fn number_of(&mut self, token: TokenId) -> usize {
        let number = &mut self.number_of[token as usize];
        if *number == 0 {
            self.changes.push(LogitChange {
                token,
                bias: 0.0,
                penalty: 1.0,
                minus: 0.0,
            });
            self.counts.push(0);
            *number = self.changes.len() as u32;
        }
        *number as usize - 1
    }
}
