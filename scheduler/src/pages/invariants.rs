//! Asserts the invariants of the page pool, M1 to M5. Only tests call this.

use super::prefix::Owner;
use super::{Holder, Page, PagePool};
use crate::{PAGE_TOKENS, SequenceId, TenantId};

/// How the sequences use one page.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PageUse {
    pub(crate) users: u32, // Page tables that contain it, and pending copies from it.
    pub(crate) writer: Option<SequenceId>, // The sequence that has it as a private page.
}

impl PagePool {
    /// Asserts that the pool agrees with the sequences, and every invariant of its own. `uses` is
    /// indexed by page.
    pub(crate) fn check(&self, uses: &[PageUse]) {
        self.check_holders(uses);
        self.check_pins(uses);
        self.check_cold_list();
        self.check_tree();
        self.check_holdings();
    }

    fn pages(&self) -> impl Iterator<Item = Page> + use<> {
        (0..self.holders.len() as u32).map(Page::new)
    }

    /// M1: every page is free, private to one living sequence, or in the tree.
    fn check_holders(&self, uses: &[PageUse]) {
        let mut on_free_list = vec![false; self.holders.len()];
        for page in &self.free {
            let seen = std::mem::replace(&mut on_free_list[page.index()], true);
            assert!(!seen, "M1: {page:?} is free twice");
        }
        for page in self.pages() {
            let holder = self.holders[page.index()];
            let is_free = holder == Holder::Free;
            assert_eq!(on_free_list[page.index()], is_free, "M1: {page:?}");
            let is_in_tree = holder == Holder::Tree;
            assert_eq!(self.tree.edge(page).is_some(), is_in_tree, "M1: {page:?}");
            let writer = match holder {
                Holder::Private(id) => Some(id),
                Holder::Free | Holder::Tree => None,
            };
            assert_eq!(writer, uses[page.index()].writer, "M1: {page:?}");
        }
    }

    /// M2: a page's pins are the page tables that contain it, the pending copies from it, and one
    /// more if it is public. M3: a private page is in one table.
    fn check_pins(&self, uses: &[PageUse]) {
        for page in self.pages() {
            let PageUse { users, writer } = uses[page.index()];
            assert!(
                writer.is_none() || users == 1,
                "M3: {page:?} is private and has {users} users"
            );
            let pins = users + u32::from(self.tree.is_public(page));
            assert_eq!(pins, self.pins[page.index()], "M2: pins of {page:?}");
        }
    }

    /// M4: the cold list has each unpinned tree page once, children before their parents.
    fn check_cold_list(&self) {
        let mut seen = vec![false; self.holders.len()];
        for page in self.cold.iter() {
            assert!(!seen[page.index()], "M4: {page:?} is cold twice");
            seen[page.index()] = true;
            if let Some(parent) = self.tree.edge(page).and_then(|edge| edge.parent) {
                let is_colder = seen[parent.index()];
                assert!(!is_colder, "M4: {parent:?} is colder than its child");
            }
        }
        for page in self.pages() {
            let is_cold = self.holders[page.index()] == Holder::Tree && !self.is_pinned(page);
            assert_eq!(seen[page.index()], is_cold, "M4: {page:?} on the cold list");
        }
        let listed = seen.iter().filter(|&&seen| seen).count();
        assert_eq!(listed, self.cold.len(), "M4");
    }

    /// M5: the parent of a tree page is a whole page of the same owner or public, and pinned if its
    /// child is.
    fn check_tree(&self) {
        let mut count = 0;
        for page in self.pages() {
            let Some(edge) = self.tree.edge(page) else {
                continue;
            };
            count += 1;
            if self.tree.tokens(page).len() == PAGE_TOKENS {
                assert_eq!(self.tree.get(&edge), Some(page), "{page:?} is found");
            }
            if let Some(parent) = edge.parent {
                let above = self.tree.edge(parent);
                let above = above.unwrap_or_else(|| panic!("M5: {parent:?} has a child"));
                let is_open = above.owner == edge.owner || above.owner == Owner::Public;
                assert!(is_open, "M5: {page:?} is below a page of another tenant");
                let whole = self.tree.tokens(parent).len();
                assert_eq!(whole, PAGE_TOKENS, "M5: {parent:?}");
                let is_held = self.is_pinned(parent) || !self.is_pinned(page);
                assert!(is_held, "M5: {page:?} is pinned and its parent is not");
            }
        }
        assert_eq!(count, self.tree.len());
    }

    /// Each tenant's pages are counted, and the cold ones stand in the order of all.
    fn check_holdings(&self) {
        for tenant in (0..self.holdings.tenants() as u32).map(TenantId) {
            let is_own = |page: &Page| self.holdings.payer(*page) == Some(tenant);
            let held = self.pages().filter(is_own).count();
            assert_eq!(held, self.held(tenant) as usize, "{tenant:?}");
            let cold = self.cold.iter().filter(is_own);
            let same_order = cold.eq(self.cold.iter_of(tenant));
            assert!(same_order, "the cold pages of {tenant:?} and of all");
        }
    }
}
