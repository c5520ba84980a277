//! Prefetching the pages of keys and values while attention computes with others.
//!
//! Lines are prefetched in the order of memory, which helps the hardware's own prefetching.

use super::CACHE_LINE;
use super::registers::prefetch;

/// Prefetches the values of P pages while the keys of these pages are multiplied, as many lines of
/// each page in a step.
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

/// Which of the later keys to prefetch while the values of a page are added up in some dimensions.
///
/// All later keys are prefetched once when all dimensions of all pages are added up.
pub(super) struct KeyPrefetch<'a> {
    next: &'a [&'a [u8]],
    pages: usize,
    steps_a_page: usize,
}

impl<'a> KeyPrefetch<'a> {
    /// `next` are the later pages. The values of `pages` pages are added up in `passes` parts of
    /// their dimensions.
    #[inline(always)]
    pub(super) fn new(next: &'a [&'a [u8]], pages: usize, passes: usize) -> KeyPrefetch<'a> {
        KeyPrefetch {
            next,
            pages,
            steps_a_page: passes,
        }
    }

    /// Returns the first of the `bytes` bytes of keys to prefetch in a pass at a page. After the
    /// last one, these are keys of the page itself, which begin at `own`.
    #[inline(always)]
    pub(super) fn address(
        &self,
        pass: usize,
        page: usize,
        bytes: usize,
        own: *const u8,
    ) -> *const u8 {
        let step = pass * self.pages + page;
        let keys = (self.next.get(step / self.steps_a_page)).map_or(own, |next| next.as_ptr());
        keys.wrapping_add(step % self.steps_a_page * bytes)
    }
}

/// Prefetches whole pages, a few cache lines at a time.
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
