//! Prefetching: asking for memory before it is needed.

/// Bytes that one step of a queue prefetches: six cache lines. That leaves the
/// processor enough outstanding requests for the weights that the product itself reads.
const STEP_BYTES: usize = 6 * 64;

/// Prefetches the cache lines of `values`. This helps if the processor cannot predict their
/// addresses. `values` must begin at a cache line, or its last line may be missed.
#[inline(always)]
pub fn prefetch<T>(values: &[T]) {
    const { assert!(size_of::<T>() > 0 && 64 % size_of::<T>() == 0) };
    #[cfg(target_arch = "x86_64")]
    for line in values.chunks(64 / size_of::<T>()) {
        crate::x86_64::registers::prefetch(line.as_ptr());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

/// Memory that a later product reads, in pieces of any size. A product that is limited by
/// multiplication, not by memory, prefetches it a few cache lines at a time.
pub struct PrefetchQueue<'p, 'm> {
    pieces: Option<&'p mut dyn Iterator<Item = &'m [u8]>>, // `None` once it has ended.
    piece: &'m [u8], // The part of the current piece that is not prefetched yet.
}

impl<'p, 'm> PrefetchQueue<'p, 'm> {
    /// Queues `pieces` in their order. A product that ends early leaves the rest.
    pub fn new(pieces: &'p mut dyn Iterator<Item = &'m [u8]>) -> PrefetchQueue<'p, 'm> {
        PrefetchQueue {
            pieces: Some(pieces),
            piece: &[],
        }
    }

    /// Returns a queue without any memory.
    pub fn empty() -> PrefetchQueue<'p, 'm> {
        PrefetchQueue {
            pieces: None,
            piece: &[],
        }
    }

    /// Prefetches the next few cache lines.
    #[cfg_attr(not(any(test, target_arch = "x86_64")), expect(dead_code))]
    #[inline(always)]
    pub(crate) fn step(&mut self) {
        if let Some((now, later)) = self.piece.split_first_chunk::<STEP_BYTES>() {
            prefetch(now);
            self.piece = later;
        } else if self.pieces.is_some() {
            self.finish_piece();
        }
    }

    /// Prefetches the rest of the current piece and takes the next one.
    #[cold]
    fn finish_piece(&mut self) {
        prefetch(self.piece);
        let next = self.pieces.as_mut().and_then(|pieces| pieces.next());
        if next.is_none() {
            self.pieces = None;
        }
        self.piece = next.unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_prefetches_every_piece_to_its_end() {
        let memory = [0; 3 * STEP_BYTES];
        let sizes = [2 * STEP_BYTES + 1, 0, STEP_BYTES - 1, STEP_BYTES];
        let mut taken = 0;
        let mut pieces = sizes.iter().map(|size| {
            taken += 1;
            &memory[..*size]
        });
        let mut queue = PrefetchQueue::new(&mut pieces);
        let mut remaining = Vec::new();
        while queue.pieces.is_some() {
            queue.step();
            remaining.push(queue.piece.len());
        }
        let expected = [
            2 * STEP_BYTES + 1,
            STEP_BYTES + 1,
            1,
            0,
            STEP_BYTES - 1,
            STEP_BYTES,
            0,
            0,
        ];
        assert_eq!(remaining, expected);
        queue.step();
        assert!(queue.pieces.is_none() && queue.piece.is_empty());
        assert_eq!(taken, sizes.len());
    }
}
