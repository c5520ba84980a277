//! Prefetching the pages of a later span while a span is computed.

use super::CACHE_LINE;
use super::registers::prefetch;

/// Prefetches whole pages in the order of memory, a few cache lines at a time.
pub(super) struct LaterPages<'a> {
    page: &'a [u8], // The part of the current page that is not prefetched yet.
    pages: &'a [&'a [u8]],
}

impl<'a> LaterPages<'a> {
    #[inline(always)]
    pub(super) fn new(pages: &'a [&'a [u8]]) -> LaterPages<'a> {
        LaterPages { page: &[], pages }
    }

    /// Prefetches the next few cache lines.
    #[inline(always)]
    pub(super) fn step(&mut self, lines: usize) {
        for _ in 0..lines {
            if let Some((line, later)) = self.page.split_first_chunk::<CACHE_LINE>() {
                prefetch(line);
                self.page = later;
            } else if let Some((page, later)) = self.pages.split_first() {
                (self.page, self.pages) = (page, later);
            }
        }
    }
}
