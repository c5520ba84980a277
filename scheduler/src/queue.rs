//! Who is next: first come, first served.
//!
//! Invariant: waiting sequences stand in the order of their arrival, also those that have run and lost their pages.
//! Whatever decides between tenants belongs here; pages and budgets do not.

use std::collections::VecDeque;

/// The sequences that wait.
#[derive(Default)]
pub(crate) struct Queue {
    waiting: VecDeque<Waiting>,
}

#[derive(Clone, Copy)]
struct Waiting {
    arrival: u64,
    slot: usize,
}

impl Queue {
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The slot of the sequence that `place` others come before.
    pub(crate) fn get(&self, place: usize) -> Option<usize> {
        self.waiting.get(place).map(|waiting| waiting.slot)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.waiting.iter().map(|waiting| waiting.slot)
    }

    /// A preempted sequence goes back to where its arrival puts it, which is near the front.
    pub(crate) fn insert(&mut self, arrival: u64, slot: usize) {
        let place = self.waiting.partition_point(|w| w.arrival < arrival);
        self.waiting.insert(place, Waiting { arrival, slot });
    }

    pub(crate) fn remove(&mut self, arrival: u64) {
        let place = self.waiting.binary_search_by_key(&arrival, |w| w.arrival);
        let place = place.expect("a queued sequence is in the queue");
        self.waiting.remove(place);
    }
}
