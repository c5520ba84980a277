//! Which whole pages have which hash: lists through arrays, one for each of as many hashes as there are pages or more.
//!
//! The pages' edges are not here, so that a look-up reads little memory: whoever asks compares those of the pages it is
//! given. Nothing here allocates after the start.

use crate::Page;

const NONE: u32 = u32::MAX;

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

    fn place(&self, hash: u64) -> usize {
        hash as usize & (self.first.len() - 1)
    }

    /// Pages of this hash, and others that share its list.
    pub(super) fn of(&self, hash: u64) -> impl Iterator<Item = Page> + '_ {
        let page = |at: u32| (at != NONE).then(|| Page::new(at));
        std::iter::successors(page(self.first[self.place(hash)]), move |before| {
            page(self.next[before.index()])
        })
    }

    /// `page` must be on no list.
    pub(super) fn insert(&mut self, hash: u64, page: Page) {
        let place = self.place(hash);
        self.next[page.index()] = self.first[place];
        self.first[place] = page.index() as u32;
    }

    /// `page` must be on the list of this hash.
    pub(super) fn remove(&mut self, hash: u64, page: Page) {
        let after = self.next[page.index()];
        let before = self
            .of(hash)
            .find(|before| self.next[before.index()] == page.index() as u32);
        match before {
            Some(before) => self.next[before.index()] = after,
            None => {
                let place = self.place(hash);
                assert_eq!(
                    self.first[place],
                    page.index() as u32,
                    "{page:?} is not here"
                );
                self.first[place] = after;
            }
        }
    }
}
