//! Prefetching the values of pages while their keys are multiplied.

use super::CACHE_LINE;
use super::registers::prefetch;

/// Prefetches the values of P pages while the keys of these pages are multiplied, as many lines of
/// each page in a step.
///
/// The lines are prefetched in the order of memory, which helps the hardware's own prefetching.
pub(super) struct ValuePrefetch<const P: usize> {
    pages: [*const u8; P],
    page: usize,
    steps_a_page: usize,
    steps_left: usize, // Of the current page.
    line: *const u8,
}

impl<const P: usize> ValuePrefetch<P> {
    /// `pages` are the first values of each page. There are `steps` steps.
    #[inline(always)]
    pub(super) fn new(pages: [*const u8; P], steps: usize) -> ValuePrefetch<P> {
        ValuePrefetch {
            pages,
            page: 0,
            steps_a_page: steps / P,
            steps_left: steps / P,
            line: pages[0],
        }
    }

    /// Prefetches P times `lines` cache lines.
    #[inline(always)]
    pub(super) fn step(&mut self, lines: usize) {
        if P > 1 && self.steps_left == 0 {
            self.page = (self.page + 1) % P;
            (self.steps_left, self.line) = (self.steps_a_page, self.pages[self.page]);
        }
        self.steps_left = self.steps_left.wrapping_sub(1);
        for _ in 0..P * lines {
            prefetch(self.line);
            self.line = self.line.wrapping_add(CACHE_LINE);
        }
    }
}
