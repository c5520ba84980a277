//! The fake slabs, which hold what a real state depends on: a hash of all tokens that it has seen.

use std::collections::BTreeMap;

use sterna_random::mix;
use sterna_scheduler::{Batch, Limits, Row, StateLimits, StateSlab};

use crate::coverage::Coverage;

/// All slabs. Each has, by the positions at which it can be continued, the chain of the tokens
/// before.
pub(crate) struct FakeSlabs {
    limits: Option<StateLimits>,
    slabs: Vec<BTreeMap<usize, u64>>,
}

impl FakeSlabs {
    pub(crate) fn new(limits: &Limits) -> FakeSlabs {
        let states = limits.states;
        let count = states.map_or(0, |states| states.slabs as usize);
        FakeSlabs {
            limits: states,
            slabs: vec![BTreeMap::new(); count],
        }
    }

    /// M11: each row reads a state of exactly the tokens before it, and no row writes what another
    /// one reads or writes. `before` is the chain of the tokens before each row.
    pub(crate) fn check_batch(&self, batch: &Batch, before: &[u64], coverage: &mut Coverage) {
        let Some(limits) = self.limits else {
            assert!(batch.rows().iter().all(|row| row.states.is_none()));
            return;
        };
        let mut written = Vec::new();
        for (row, before) in batch.rows().iter().zip(before) {
            let states = row.states.expect("M11: a row has states");
            let start = row.start as usize;
            match states.from {
                None => assert_eq!(start, 0, "M11: {row:?} has no state to continue"),
                Some(from) => {
                    let found = self.slabs[from.index()].get(&start);
                    assert_eq!(found, Some(before), "M11: {row:?} continues another state");
                }
            }
            let is_in_place = states.from == Some(states.to);
            let is_short = row.len() <= limits.in_place_tokens as usize;
            assert!(
                is_short || !is_in_place,
                "M11: {row:?} is long and in place"
            );
            written.push(states.to);
            for kept in states.keep.into_iter().flatten() {
                let position = kept.position as usize;
                assert!(position > start && position < row.end(), "M11: {row:?}");
                written.push(kept.slab);
                coverage.kept_states += 1;
            }
            coverage.states_in_place += u64::from(is_in_place);
            let continues_own = is_in_place || states.from.is_none();
            coverage.states_elsewhere += u64::from(!continues_own);
        }
        let all = written.clone();
        written.sort_unstable();
        written.dedup();
        assert_eq!(written.len(), all.len(), "M11: a slab is written twice");
        for row in batch.rows() {
            let states = row.states.expect("M11: a row has states");
            let reads = states.from.filter(|from| *from != states.to);
            let is_written = reads.is_some_and(|from| written.binary_search(&from).is_ok());
            assert!(!is_written, "M11: {row:?} reads what a row writes");
        }
    }

    /// Writes the states of a computed row. `chains` are those after each of its tokens, and
    /// `before` is the chain before the row.
    pub(crate) fn write(&mut self, row: &Row, before: u64, chains: &[u64]) {
        let (Some(limits), Some(states)) = (self.limits, row.states) else {
            return;
        };
        let (start, end) = (row.start as usize, row.end());
        let at = |position: usize| {
            let chain = position.checked_sub(start + 1).map(|index| chains[index]);
            (position, chain.unwrap_or(before))
        };
        let is_short = row.len() <= limits.in_place_tokens as usize;
        let first = if is_short { start } else { end - 1 };
        self.slabs[states.to.index()] = (first..=end).map(at).collect();
        for kept in states.keep.into_iter().flatten() {
            let position = kept.position as usize;
            self.slabs[kept.slab.index()] = (position - 1..=position).map(at).collect();
        }
    }

    /// Erases what a failed row has written.
    pub(crate) fn erase_row(&mut self, row: &Row) {
        let Some(states) = row.states else {
            return;
        };
        let kept = states.keep.into_iter().flatten().map(|kept| kept.slab);
        let written: Vec<StateSlab> = std::iter::once(states.to).chain(kept).collect();
        written
            .iter()
            .for_each(|slab| self.slabs[slab.index()].clear());
    }
}

/// Gives a part of the worlds states. It draws no random numbers, so that seeds keep their worlds.
pub(crate) fn some_states(limits: &Limits) -> Option<StateLimits> {
    let chance = mix(u64::from(limits.step_tokens) << 32 | u64::from(limits.prefill_chunk));
    let beyond = [0, 0, 1, 4, 16][(chance >> 8) as usize % 5];
    chance.is_multiple_of(3).then(|| StateLimits {
        slabs: limits.max_running + 1 + beyond,
        in_place_tokens: 1 + (chance >> 32) as u32 % 4,
        trial_interval: 16 * (1 + (chance >> 16) as u32 % 4),
    })
}
