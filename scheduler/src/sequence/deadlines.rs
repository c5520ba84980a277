//! The deadlines of requests.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Sequences;
use crate::{Micros, SequenceId};

/// A time at which a sequence ends if it has not ended, or has no token, before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Deadline {
    at: Micros,
    pub(crate) id: SequenceId,
    pub(crate) is_for_first_token: bool,
}

/// All deadlines, earliest first. Deadlines of ended sequences stay until they fill most of the
/// queue.
#[derive(Default)]
pub(crate) struct DeadlineQueue {
    heap: BinaryHeap<Reverse<Deadline>>,
}

impl DeadlineQueue {
    /// Adds a deadline if the request sets one, `within` this time from now.
    pub(crate) fn add(
        &mut self,
        now: Micros,
        within: Option<Micros>,
        id: SequenceId,
        is_for_first_token: bool,
    ) {
        self.heap.extend(within.map(|within| {
            Reverse(Deadline {
                at: now.saturating_add(within),
                id,
                is_for_first_token,
            })
        }));
    }

    /// Removes and returns the earliest deadline, if it has passed.
    pub(crate) fn pop_passed(&mut self, now: Micros) -> Option<Deadline> {
        let &Reverse(earliest) = self.heap.peek()?;
        if earliest.at > now {
            return None;
        }
        self.heap.pop();
        Some(earliest)
    }

    /// Removes the deadlines of ended sequences, once they are most of the queue.
    pub(crate) fn forget_ended(&mut self, alive: &Sequences) {
        if self.heap.len() > limit(alive) {
            self.heap
                .retain(|Reverse(deadline)| alive.get(deadline.id).is_some());
        }
    }

    /// Asserts that the queue forgets ended sequences.
    pub(crate) fn check(&self, alive: &Sequences) {
        assert!(
            self.heap.len() <= limit(alive),
            "the deadlines of ended sequences are forgotten"
        );
    }
}

/// Returns how many deadlines the queue keeps at most. A living sequence has at most two.
fn limit(alive: &Sequences) -> usize {
    4 * alive.len() + 64
}
