//! Who holds each page of KV memory.
//!
//! Invariant: every page is free, private to one sequence, or in the prefix tree.
//! Invariant: a page's pins are the page tables that contain it; only private pages are ever written.
//! Invariant: the cold list is exactly the unpinned tree pages, and a parent is pinned or hotter than its child. So the
//! coldest page is always a leaf, and the length of the list is what eviction can yield.

use crate::prefix::{Edge, PrefixTree};
use crate::{SequenceId, TenantId, TokenId};

/// Tokens in a page.
pub const PAGE_TOKENS: usize = 16;

/// One page of KV memory: an index into the caller's store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Page(u32);

impl Page {
    /// The page at `index`; for batches that are built by hand.
    pub fn new(index: u32) -> Page {
        Page(index)
    }

    /// Where the page is in the store.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Who may write a page, or read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    Free,
    Private(SequenceId),
    Tree,
}

/// All pages, and the tree over those that are cached.
pub(crate) struct PagePool {
    pub(crate) holders: Vec<Holder>, // Indexed by page.
    pub(crate) pins: Vec<u32>,       // Indexed by page.
    pub(crate) free: Vec<Page>,
    pub(crate) cold: ColdList,
    pub(crate) tree: PrefixTree,
    evictions: u64,
}

impl PagePool {
    pub(crate) fn new(pages: u32) -> PagePool {
        let count = pages as usize;
        PagePool {
            holders: vec![Holder::Free; count],
            pins: vec![0; count],
            free: (0..pages).rev().map(Page).collect(),
            cold: ColdList::new(count),
            tree: PrefixTree::new(count),
            evictions: 0,
        }
    }

    /// Pages that [`PagePool::take`] can give, in a row.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.cold.len()
    }

    pub(crate) fn evictions(&self) -> u64 {
        self.evictions
    }

    /// The cached pages that begin `tokens`, first to last. Pins nothing.
    pub(crate) fn find<'a>(
        &'a self,
        tenant: TenantId,
        tokens: &'a [TokenId],
    ) -> impl Iterator<Item = Page> + 'a {
        self.tree.find(tenant, tokens)
    }

    pub(crate) fn is_pinned(&self, page: Page) -> bool {
        self.pins[page.index()] > 0
    }

    /// Gives a page to `sequence` alone, the coldest cached one if none is free; `None` when every page is in use.
    pub(crate) fn take(&mut self, sequence: SequenceId) -> Option<Page> {
        if self.free.is_empty() {
            self.evict()?;
        }
        let page = self.free.pop()?;
        let holder = &mut self.holders[page.index()];
        assert_eq!(*holder, Holder::Free, "{page:?} was on the free list");
        *holder = Holder::Private(sequence);
        self.pins[page.index()] = 1;
        Some(page)
    }

    /// Drops the coldest page that nobody uses from the tree.
    fn evict(&mut self) -> Option<()> {
        let page = self.cold.pop_coldest()?;
        self.forget(page);
        self.evictions += 1;
        Some(())
    }

    /// Drops every cached page that nobody uses.
    pub(crate) fn forget_unpinned(&mut self) {
        while let Some(page) = self.cold.pop_coldest() {
            self.forget(page);
        }
    }

    fn forget(&mut self, page: Page) {
        self.tree.remove(page);
        self.holders[page.index()] = Holder::Free;
        self.free.push(page);
    }

    /// One more page table contains this cached page.
    pub(crate) fn pin(&mut self, page: Page) {
        assert_eq!(self.holders[page.index()], Holder::Tree, "{page:?}");
        if self.pins[page.index()] == 0 {
            self.cold.remove(page);
        }
        self.pins[page.index()] += 1;
    }

    /// Puts a full, computed page of `sequence` into the tree. Returns the page that now stands in its place: when an
    /// equal one is there already, that one, and the copy becomes free.
    pub(crate) fn publish(&mut self, sequence: SequenceId, page: Page, edge: Edge) -> Page {
        assert_eq!(self.holders[page.index()], Holder::Private(sequence));
        if let Some(equal) = self.tree.get(&edge) {
            self.pin(equal);
            self.release(page);
            return equal;
        }
        self.tree.insert(page, edge);
        self.holders[page.index()] = Holder::Tree;
        page
    }

    /// Gives back a whole page table. The last page goes first, so that children end up colder than their parents.
    pub(crate) fn release_table(&mut self, pages: &[Page]) {
        for &page in pages.iter().rev() {
            self.release(page);
        }
    }

    /// One page table fewer contains `page`.
    fn release(&mut self, page: Page) {
        let pins = &mut self.pins[page.index()];
        assert!(*pins > 0, "{page:?} is in no page table");
        *pins -= 1;
        match self.holders[page.index()] {
            Holder::Free => panic!("{page:?} was in use and free"),
            Holder::Private(_) => {
                self.holders[page.index()] = Holder::Free;
                self.free.push(page);
            }
            Holder::Tree if *pins == 0 => self.cold.push_hottest(page),
            Holder::Tree => {}
        }
    }
}

/// Pages from the least to the most recently used: a list through two arrays, so that every change takes constant time.
pub(crate) struct ColdList {
    hotter: Vec<u32>, // Indexed by page; the last entry belongs to the list's ends.
    colder: Vec<u32>,
    len: usize,
}

impl ColdList {
    fn new(pages: usize) -> ColdList {
        let unlisted: Vec<u32> = (0..=pages as u32).collect();
        ColdList {
            hotter: unlisted.clone(),
            colder: unlisted,
            len: 0,
        }
    }

    /// Closes the list to a ring: hotter than it is the coldest page, colder the hottest.
    fn end(&self) -> usize {
        self.hotter.len() - 1
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// From the coldest to the hottest.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Page> + '_ {
        let next = |at: usize| self.hotter[at] as usize;
        std::iter::successors(Some(next(self.end())), move |&at| Some(next(at)))
            .take_while(|&at| at != self.end())
            .map(|at| Page(at as u32))
    }

    fn push_hottest(&mut self, page: Page) {
        let (end, page) = (self.end(), page.index());
        let before = self.colder[end] as usize;
        self.link(before, page);
        self.link(page, end);
        self.len += 1;
    }

    fn pop_coldest(&mut self) -> Option<Page> {
        let coldest = self.iter().next()?;
        self.remove(coldest);
        Some(coldest)
    }

    /// `page` must be on the list.
    fn remove(&mut self, page: Page) {
        let page = page.index();
        self.link(self.colder[page] as usize, self.hotter[page] as usize);
        self.len -= 1;
    }

    fn link(&mut self, colder: usize, hotter: usize) {
        self.hotter[colder] = hotter as u32;
        self.colder[hotter] = colder as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cold_list_keeps_the_order_of_pushes() {
        let mut list = ColdList::new(4);
        for page in [2, 0, 3] {
            list.push_hottest(Page(page));
        }
        list.remove(Page(0));
        list.push_hottest(Page(0));
        assert_eq!(list.iter().map(Page::index).collect::<Vec<_>>(), [2, 3, 0]);
        assert_eq!(list.pop_coldest(), Some(Page(2)));
        assert_eq!(list.len(), 2);
    }

    #[test]
    fn a_released_path_is_evicted_from_its_end() {
        let mut pool = PagePool::new(3);
        let sequence = SequenceId::new(0, 0);
        let mut table = Vec::new();
        for token in 0..3 {
            let edge = Edge {
                tenant: TenantId(0),
                parent: table.last().copied(),
                tokens: [token; PAGE_TOKENS],
            };
            let page = pool.take(sequence).unwrap();
            table.push(pool.publish(sequence, page, edge));
        }
        assert_eq!(pool.take(sequence), None, "all pages are in use");
        pool.release_table(&table);
        for &page in table.iter().rev() {
            assert_eq!(pool.take(sequence), Some(page));
        }
        assert_eq!(pool.evictions(), 3);
    }
}
