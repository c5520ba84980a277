//! The tokens of blocks that passes have replaced, until their block is final.
//!
//! A block is final when all of its tokens are known, or when the output ends in it. Tokens behind
//! the end are dropped.

use std::collections::{BTreeMap, HashMap};

use sterna_scheduler::SequenceId;

use super::sampling_params::TokenOutput;

/// The tokens of blocks that are not final yet, by sequence and position.
#[derive(Default)]
pub(super) struct UnmaskedTokens(HashMap<SequenceId, BTreeMap<usize, TokenOutput>>);

impl UnmaskedTokens {
    /// Adds the token at a position.
    pub(super) fn add(&mut self, id: SequenceId, position: usize, output: TokenOutput) {
        self.0.entry(id).or_default().insert(position, output);
    }

    /// Calls `tell` with each token that is final, in the order of positions. `known` returns the
    /// number of final tokens of a sequence, the prompt included, and whether the sequence is over.
    pub(super) fn take_final(
        &mut self,
        known: impl Fn(SequenceId) -> (usize, bool),
        mut tell: impl FnMut(SequenceId, TokenOutput),
    ) {
        self.0.retain(|&id, tokens| {
            let (end, is_over) = known(id);
            let rest = tokens.split_off(&end);
            for output in std::mem::replace(tokens, rest).into_values() {
                tell(id, output);
            }
            !is_over && !tokens.is_empty()
        });
    }
}
