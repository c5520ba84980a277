//! Disjoint lists of pages in two arrays.
//!
//! Invariant: every change takes constant time, and only a new list allocates.

use crate::Page;

/// Doubly linked lists. A page is in at most one of them.
pub(super) struct PageLists {
    /// The next entry, indexed by page, then by list. Each list is a ring that its own entry
    /// closes: the next entry after it is the list's first page.
    next: Vec<u32>,
    /// The previous entry, indexed like `next`.
    previous: Vec<u32>,
    lens: Vec<usize>, // Indexed by list.
    pages: usize,
}

impl PageLists {
    /// Creates `lists` empty lists of the pages below `pages`.
    pub(super) fn new(pages: usize, lists: usize) -> PageLists {
        let alone: Vec<u32> = (0..(pages + lists) as u32).collect();
        PageLists {
            next: alone.clone(),
            previous: alone,
            lens: vec![0; lists],
            pages,
        }
    }

    pub(super) fn add_list(&mut self) {
        let end = self.next.len() as u32;
        self.next.push(end);
        self.previous.push(end);
        self.lens.push(0);
    }

    pub(super) fn len(&self, list: usize) -> usize {
        self.lens[list]
    }

    /// Returns the pages of a list, first to last.
    pub(super) fn iter(&self, list: usize) -> impl Iterator<Item = Page> + Clone + '_ {
        let end = self.pages + list;
        let next = |entry: usize| self.next[entry] as usize;
        std::iter::successors(Some(next(end)), move |&entry| Some(next(entry)))
            .take_while(move |&entry| entry != end)
            .map(|entry| Page::new(entry as u32))
    }

    /// Adds `page`, which must be in no list.
    pub(super) fn push_last(&mut self, list: usize, page: Page) {
        let end = self.pages + list;
        let last = self.previous[end] as usize;
        self.link(last, page.index());
        self.link(page.index(), end);
        self.lens[list] += 1;
    }

    /// Removes `page`, which must be in this list.
    pub(super) fn remove(&mut self, list: usize, page: Page) {
        let page = page.index();
        self.link(self.previous[page] as usize, self.next[page] as usize);
        self.lens[list] -= 1;
    }

    fn link(&mut self, previous: usize, next: usize) {
        self.next[previous] = next as u32;
        self.previous[next] = previous as u32;
    }
}
