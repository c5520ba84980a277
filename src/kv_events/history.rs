//! The last batches, for readers that missed some.

use std::collections::VecDeque;

use bytes::Bytes;

/// The largest number of batches that are kept.
const MAX_BATCHES: usize = 10_000;
/// The largest size of all kept batches together, in bytes.
const MAX_BYTES: usize = 16 << 20;

/// The last batches, and the number of the next.
#[derive(Default)]
pub(super) struct History {
    batches: VecDeque<Bytes>,
    bytes: usize,
    next: u64,
}

impl History {
    /// Adds a batch. Returns its number. The first has the number 0.
    pub(super) fn add(&mut self, batch: Bytes) -> u64 {
        self.bytes += batch.len();
        self.batches.push_back(batch);
        while self.batches.len() > MAX_BATCHES || self.bytes > MAX_BYTES {
            let oldest = self.batches.pop_front().expect("it has batches");
            self.bytes -= oldest.len();
        }
        self.next += 1;
        self.next - 1
    }

    /// Returns the kept batches from a number on.
    pub(super) fn since(&self, number: u64) -> impl Iterator<Item = (u64, Bytes)> {
        let first = self.next - self.batches.len() as u64;
        let skipped = number.saturating_sub(first).min(self.batches.len() as u64);
        let numbered = (first..).zip(&self.batches);
        let kept = numbered.skip(skipped as usize);
        kept.map(|(number, batch)| (number, batch.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_batches_are_dropped() {
        let mut history = History::default();
        let numbers = |history: &History, from| {
            let batches = history.since(from).map(|(number, _)| number);
            batches.collect::<Vec<_>>()
        };
        assert!(numbers(&history, 0).is_empty());
        for number in 0..MAX_BATCHES as u64 + 5 {
            assert_eq!(history.add(Bytes::from_static(b"x")), number);
        }
        assert_eq!(numbers(&history, 0).len(), MAX_BATCHES);
        assert_eq!(numbers(&history, 0)[0], 5);
        let last = MAX_BATCHES as u64 + 4;
        assert_eq!(numbers(&history, last - 1), [last - 1, last]);
        assert!(numbers(&history, last + 9).is_empty());
        history.add(vec![0; MAX_BYTES].into());
        assert_eq!(numbers(&history, 0), [last + 1]);
    }
}
