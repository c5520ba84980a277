//! An index of whole pages by the hash of their edge: linked lists in arrays, one list per bucket.
//!
//! The edges themselves are not here, so that a lookup reads little memory. The caller compares the
//! edges of the pages that it gets. Nothing here allocates after the start.

use crate::Page;

const NONE: u32 = u32::MAX;

/// Lists of pages, one per bucket of hashes.
pub(super) struct EdgeIndex {
    first: Vec<u32>, // Indexed by the low bits of the hash.
    next: Vec<u32>,  // Indexed by page.
}

impl EdgeIndex {
    pub(super) fn new(pages: usize) -> EdgeIndex {
        EdgeIndex {
            first: vec![NONE; pages.next_power_of_two()],
            next: vec![NONE; pages],
        }
    }

    fn bucket(&self, hash: u64) -> usize {
        hash as usize & (self.first.len() - 1)
    }

    /// Returns the pages in the bucket of this hash.
    pub(super) fn of(&self, hash: u64) -> impl Iterator<Item = Page> + '_ {
        let page = |index: u32| (index != NONE).then(|| Page::new(index));
        std::iter::successors(page(self.first[self.bucket(hash)]), move |before| {
            page(self.next[before.index()])
        })
    }

    /// Adds `page`, which must be in no list.
    pub(super) fn insert(&mut self, hash: u64, page: Page) {
        let bucket = self.bucket(hash);
        self.next[page.index()] = self.first[bucket];
        self.first[bucket] = page.index() as u32;
    }

    /// Removes `page`, which must be in the bucket of this hash.
    pub(super) fn remove(&mut self, hash: u64, page: Page) {
        let after = self.next[page.index()];
        let before = self
            .of(hash)
            .find(|before| self.next[before.index()] == page.index() as u32);
        match before {
            Some(before) => self.next[before.index()] = after,
            None => {
                let bucket = self.bucket(hash);
                assert_eq!(
                    self.first[bucket],
                    page.index() as u32,
                    "{page:?} is not in this bucket"
                );
                self.first[bucket] = after;
            }
        }
    }
}
