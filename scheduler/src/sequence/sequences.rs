//! All sequences that are alive, and the order of the running ones.
//!
//! Invariant: the running sequences stand in the order of their band and arrival. The first running
//! sequence is the leader.

use std::ops::{Index, IndexMut};

use slab::Slab;

use super::Sequence;
use crate::SequenceId;

/// All sequences that are alive, by slot.
pub(crate) struct Sequences {
    slab: Slab<Sequence>,
    running: Vec<usize>, // Slots.
    arrivals: u64,
}

impl Sequences {
    pub(crate) fn with_capacity(max_running: usize) -> Sequences {
        Sequences {
            slab: Slab::with_capacity(max_running),
            running: Vec::with_capacity(max_running),
            arrivals: 0,
        }
    }

    /// Returns how many sequences are alive.
    pub(crate) fn len(&self) -> usize {
        self.slab.len()
    }

    /// Returns how many sequences were ever added.
    pub(crate) fn arrivals(&self) -> u64 {
        self.arrivals
    }

    /// Returns all sequences that are alive, by slot.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.slab.iter().map(|(_, sequence)| sequence)
    }

    /// Returns the slots of the running sequences, in their order.
    pub(crate) fn running(&self) -> &[usize] {
        &self.running
    }

    /// Returns the running sequences, in their order.
    pub(crate) fn iter_running(&self) -> impl DoubleEndedIterator<Item = &Sequence> {
        self.running.iter().map(|&slot| &self.slab[slot])
    }

    /// Returns a sequence if it is alive.
    pub(crate) fn get(&self, id: SequenceId) -> Option<&Sequence> {
        let sequence = self.slab.get(id.slot())?;
        (sequence.id == id).then_some(sequence)
    }

    /// Adds the sequence that `create` makes of its id and arrival.
    pub(crate) fn add(&mut self, create: impl FnOnce(SequenceId, u64) -> Sequence) -> &Sequence {
        let arrival = self.arrivals;
        self.arrivals += 1;
        let entry = self.slab.vacant_entry();
        let id = SequenceId::new(entry.key() as u32, arrival as u32);
        entry.insert(create(id, arrival))
    }

    pub(crate) fn remove(&mut self, slot: usize) -> Sequence {
        self.slab.remove(slot)
    }

    /// Adds a sequence to the running order.
    pub(crate) fn begin_running(&mut self, slot: usize) {
        self.running.insert(self.place(slot), slot);
    }

    /// Removes a sequence from the running order.
    pub(crate) fn stop_running(&mut self, slot: usize) {
        self.running.remove(self.place(slot));
    }

    /// Returns how many running sequences come before the one in `slot`.
    pub(crate) fn place(&self, slot: usize) -> usize {
        let rank = self.slab[slot].rank();
        self.running
            .partition_point(|&other| self.slab[other].rank() < rank)
    }

    /// Asserts that each sequence is in its slot, and that the running order is strict.
    pub(crate) fn check(&self) {
        for (slot, sequence) in &self.slab {
            assert_eq!(slot, sequence.id.slot());
        }
        assert!(self.iter_running().all(|sequence| sequence.is_running));
        let ranks = self.iter_running().map(Sequence::rank);
        assert!(ranks.is_sorted_by(|a, b| a < b));
    }
}

impl Index<usize> for Sequences {
    type Output = Sequence;

    fn index(&self, slot: usize) -> &Sequence {
        &self.slab[slot]
    }
}

impl IndexMut<usize> for Sequences {
    fn index_mut(&mut self, slot: usize) -> &mut Sequence {
        &mut self.slab[slot]
    }
}
