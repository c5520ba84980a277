//! Prefetching later keys while the values of a span are added up.

/// Which of the later keys to prefetch while the values of a page are added up in some dimensions.
///
/// All later keys are prefetched once when all dimensions of all pages are added up. They are
/// prefetched in the order of memory, which helps the hardware's own prefetching.
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
