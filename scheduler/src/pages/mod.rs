//! The pages of KV memory: which page is free, which belongs to a sequence, which is cached.
//!
//! Invariant: every page is free, private to one sequence, or in the prefix tree.
//!
//! Invariant: a page's pin count is the number of page tables that contain it and pending copies
//! that read it, plus one if the page is public. Only private pages are written.
//!
//! Invariant: the cold pages are exactly the unpinned tree pages, and a parent is pinned or hotter
//! than its child. So the coldest page, of all tenants or of one, is always a leaf, and eviction
//! can free as many pages as are cold.

mod changes;
mod children;
mod cold;
mod holdings;
mod invariants;
mod lists;
mod page;
mod prefix;
mod public;
mod tables;
#[cfg(test)]
mod tests;

use std::hash::{BuildHasher, RandomState};

use changes::ChangeLog;
pub use changes::{CacheChange, StoredPage};
use cold::ColdPages;
use holdings::Holdings;
pub(crate) use holdings::PageQuota;
pub(crate) use invariants::PageUse;
pub use page::{PAGE_TOKENS, Page};
pub(crate) use prefix::{Behind, common_prefix};
use prefix::{Edge, Owner, PrefixTree};
pub(crate) use tables::{PageTable, PageTables};

use crate::slabs::{PageState, SlabPool};
use crate::{PublicPrefix, SequenceId, Snapshot, StateLimits, TenantId, TokenId};

/// The holder of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Free,
    /// The only sequence that reads and writes the page.
    Private(SequenceId),
    /// The prefix tree: the page is cached, and sequences may read it.
    Tree,
}

/// All pages, and the prefix tree over the cached pages.
pub(crate) struct PagePool<S = RandomState> {
    holders: Vec<Holder>, // Indexed by page.
    pins: Vec<u32>,       // Indexed by page.
    free: Vec<Page>,
    cold: ColdPages,
    tree: PrefixTree<S>,
    holdings: Holdings,
    evictions: u64,
    changes: ChangeLog,
    /// The states of sequences, and those of pages in the tree.
    pub(crate) slabs: SlabPool,
}

impl PagePool {
    /// Creates a pool of free pages. Tenant 0 exists, with the default quota.
    pub(crate) fn new(pages: u32) -> PagePool {
        PagePool::with_hasher(pages, RandomState::new())
    }

    /// Adds slabs of states, all of them free.
    pub(crate) fn with_slabs(self, limits: Option<StateLimits>) -> PagePool {
        let slabs = SlabPool::new(limits, self.holders.len());
        PagePool { slabs, ..self }
    }
}

impl<S: BuildHasher + Clone> PagePool<S> {
    pub(crate) fn with_hasher(pages: u32, hasher: S) -> PagePool<S> {
        let count = pages as usize;
        let mut pool = PagePool {
            holders: vec![Holder::Free; count],
            pins: vec![0; count],
            free: (0..pages).rev().map(Page::new).collect(),
            cold: ColdPages::new(count),
            tree: PrefixTree::new(count, hasher),
            holdings: Holdings::new(count),
            evictions: 0,
            changes: ChangeLog::default(),
            slabs: SlabPool::new(None, count),
        };
        pool.set_tenant(TenantId(0), PageQuota::default());
        pool
    }

    /// Sets a tenant's quota. If the tenant holds more than the new cap, the pool evicts its pages
    /// when it next takes one.
    pub(crate) fn set_tenant(&mut self, tenant: TenantId, quota: PageQuota) {
        while self.holdings.tenants() <= tenant.index() {
            self.holdings.add_tenant();
            self.cold.add_tenant();
        }
        self.slabs.set_weight(tenant, quota.weight);
        self.holdings.set(tenant, quota);
    }

    /// Declares a prefix. Its whole pages, once published, stay for all tenants that may use them.
    pub(crate) fn declare_public(&mut self, tokens: &[TokenId]) -> PublicPrefix {
        self.tree.public.declare(tokens)
    }

    /// Returns the number of pages of all declared prefixes, published or not.
    pub(crate) fn reserved(&self) -> u32 {
        self.tree.public.len() as u32
    }

    /// Returns the cached pages by their prefixes.
    pub(crate) fn tree(&self) -> &PrefixTree<S> {
        &self.tree
    }

    /// Returns `snapshot` with the number of pages of each kind, and of evictions.
    pub(crate) fn add_counts(&self, snapshot: Snapshot) -> Snapshot {
        let (free, tree) = (self.free.len(), self.tree.len());
        Snapshot {
            free,
            private: self.holders.len() - free - tree,
            tree,
            pinned: tree - self.cold.len(),
            evictions: self.evictions,
            slabs: self.slabs.counts(),
            ..snapshot
        }
    }

    /// Returns the number of pages that count against a tenant: its private and its cached pages.
    pub(crate) fn held(&self, tenant: TenantId) -> u32 {
        self.holdings.held(tenant)
    }

    /// Returns the number of a tenant's pages that are not cold.
    pub(crate) fn in_use(&self, tenant: TenantId) -> u32 {
        self.held(tenant) - self.cold.len_of(tenant) as u32
    }

    /// Returns the free pages.
    pub(crate) fn free(&self) -> &[Page] {
        &self.free
    }

    /// Returns the number of pages that are free or can be evicted.
    pub(crate) fn available_to_all(&self) -> usize {
        self.free.len() + self.cold.len()
    }

    /// Returns how many pages [`PagePool::take`] can give a tenant now.
    pub(crate) fn available(&self, tenant: TenantId) -> usize {
        self.available_to_all().min(self.remaining_cap(tenant))
    }

    /// Returns how many more pages a tenant may use under its cap, whether or not pages are free.
    pub(crate) fn remaining_cap(&self, tenant: TenantId) -> usize {
        self.cap(tenant).saturating_sub(self.in_use(tenant)) as usize
    }

    /// Returns the number of pages that a tenant may hold.
    pub(crate) fn cap(&self, tenant: TenantId) -> u32 {
        self.holdings.quota(tenant).max
    }

    /// Returns how many more pages a tenant may use within its guarantee.
    pub(crate) fn guaranteed_left(&self, tenant: TenantId) -> usize {
        let guaranteed = self.holdings.quota(tenant).guaranteed;
        guaranteed.saturating_sub(self.in_use(tenant)) as usize
    }

    /// Returns whether a tenant uses more pages than it is guaranteed. Only such a tenant gives
    /// pages to others.
    pub(crate) fn exceeds_guarantee(&self, tenant: TenantId) -> bool {
        self.in_use(tenant) > self.holdings.quota(tenant).guaranteed
    }

    /// Returns the number of guaranteed pages that the tenants other than `except` do not use.
    pub(crate) fn unmet_guarantees(&self, except: TenantId) -> usize {
        let others = self.holdings.guaranteed().iter();
        let others = others.filter(|&&tenant| tenant != except);
        others.map(|&tenant| self.guaranteed_left(tenant)).sum()
    }

    /// Returns whether the page has exactly one pin, whose removal makes it free or cold.
    pub(crate) fn is_exclusive(&self, page: Page) -> bool {
        self.pins[page.index()] == 1
    }

    pub(crate) fn is_pinned(&self, page: Page) -> bool {
        self.pins[page.index()] > 0
    }

    /// Gives a page to `sequence`. Evicts a cached page if no page is free or the tenant is at its
    /// cap. Returns `None`, and evicts nothing, if all pages are in use or the tenant uses as many
    /// as its cap allows.
    pub(crate) fn take(&mut self, sequence: SequenceId, tenant: TenantId) -> Option<Page> {
        if self.available(tenant) == 0 {
            return None;
        }
        while self.held(tenant) >= self.cap(tenant) {
            self.evict(self.cold.coldest_of(tenant));
        }
        if self.free.is_empty() {
            self.evict(self.least_wanted(tenant));
        }
        let page = self.free.pop();
        let page = page.expect("M7: an eviction freed a page");
        let holder = &mut self.holders[page.index()];
        assert_eq!(*holder, Holder::Free, "{page:?} was on the free list");
        *holder = Holder::Private(sequence);
        self.pins[page.index()] = 1;
        self.holdings.charge(page, Some(tenant));
        Some(page)
    }

    /// Returns the page to evict for a tenant: its own coldest page if it holds more than its
    /// share, otherwise the coldest page that is not within another tenant's guarantee. If there is
    /// none, the coldest page of all.
    fn least_wanted(&self, tenant: TenantId) -> Option<Page> {
        let own = self.cold.coldest_of(tenant);
        let own = own.filter(|_| self.holdings.is_over_share(tenant));
        own.or_else(|| self.coldest_unguaranteed(tenant))
            .or_else(|| self.cold.coldest())
    }

    /// Returns the coldest page of `tenant` or of a tenant that holds more than it is guaranteed.
    /// This page is also the coldest page of its payer, so it is a leaf.
    fn coldest_unguaranteed(&self, tenant: TenantId) -> Option<Page> {
        if self.holdings.guaranteed().is_empty() {
            return None;
        }
        self.cold.iter().find(|&page| {
            let payer = self.payer(page);
            payer == tenant || self.held(payer) > self.holdings.quota(payer).guaranteed
        })
    }

    fn evict(&mut self, page: Option<Page>) {
        self.forget(page.expect("M7: a page can be evicted"));
        self.evictions += 1;
    }

    /// Drops every unpinned cached page.
    pub(crate) fn forget_unpinned(&mut self) {
        while let Some(page) = self.cold.coldest() {
            self.forget(page);
        }
    }

    /// Removes a cold leaf from the tree and frees its page.
    fn forget(&mut self, page: Page) {
        self.cold.remove(page, self.payer(page));
        if self.changes.is_watched() && self.whole(page).is_some() {
            self.changes.record(|| CacheChange::Removed(page));
        }
        self.tree.remove(page);
        self.slabs.forget(page);
        self.set_free(page);
    }

    fn set_free(&mut self, page: Page) {
        self.holdings.charge(page, None);
        self.holders[page.index()] = Holder::Free;
        self.free.push(page);
    }

    fn payer(&self, page: Page) -> TenantId {
        let payer = self.holdings.payer(page);
        payer.expect("only free and public pages have no payer")
    }

    /// Pins a cached page for a page table or a pending copy. Its parent must be pinned.
    pub(crate) fn pin(&mut self, page: Page) {
        assert_eq!(self.holders[page.index()], Holder::Tree, "{page:?}");
        self.assert_parent_is_pinned(page);
        if !self.is_pinned(page) {
            self.cold.remove(page, self.payer(page));
        }
        self.pins[page.index()] += 1;
        self.tree.touch(page);
    }

    /// Removes the pin of a pending copy. The page's parent must still be pinned.
    pub(crate) fn unpin(&mut self, page: Page) {
        assert_eq!(self.holders[page.index()], Holder::Tree, "{page:?}");
        self.release(page);
    }

    /// Puts a full, computed page of `sequence` into the tree. If an equal page is there already,
    /// frees this page and pins the equal one. Returns the page that is in the tree.
    pub(crate) fn publish(&mut self, sequence: SequenceId, page: Page, edge: &Edge<'_>) -> Page {
        assert_eq!(self.holders[page.index()], Holder::Private(sequence));
        if let Some(equal) = self.tree.insert(page, edge) {
            self.pin(equal);
            self.release(page);
            return equal;
        }
        self.holders[page.index()] = Holder::Tree;
        self.assert_parent_is_pinned(page);
        let tenant = match edge.owner {
            Owner::Tenant(tenant) => {
                assert_eq!(tenant, self.payer(page), "{page:?}");
                Some(tenant)
            }
            Owner::Public => {
                self.pins[page.index()] += 1;
                self.holdings.charge(page, None);
                None
            }
        };
        let (parent, tokens) = (edge.parent, *edge.tokens);
        self.changes.record(|| {
            CacheChange::Stored(StoredPage {
                page,
                parent,
                tenant,
                tokens,
            })
        });
        page
    }

    /// Takes the last page of a sequence that ends. The page holds fewer than [`PAGE_TOKENS`]
    /// `tokens` after `parent`, which must still be pinned.
    ///
    /// The page enters the tree as a partial leaf, so that other sequences can copy it. If a page
    /// of the tenant there already begins with `tokens`, that page counts as just used instead, and
    /// this page becomes free. Returns the page that begins with the tokens.
    pub(crate) fn offer_tail(
        &mut self,
        sequence: SequenceId,
        page: Page,
        parent: Option<Page>,
        tenant: TenantId,
        tokens: &[TokenId],
    ) -> Page {
        assert_eq!(self.holders[page.index()], Holder::Private(sequence));
        assert_eq!(tenant, self.payer(page), "{page:?}");
        assert!(
            (1..PAGE_TOKENS).contains(&tokens.len()),
            "a tail is part of a page"
        );
        if let Some(covering) = self.tree.covering(tenant, parent, tokens) {
            self.release(page);
            self.pin(covering);
            self.release(covering);
            covering
        } else {
            self.holders[page.index()] = Holder::Tree;
            self.tree.insert_partial(page, tenant, parent, tokens);
            self.release(page);
            page
        }
    }

    /// Returns the page after `parent` that shares first tokens with `tokens` and has a state which
    /// has seen only such tokens: the state that has seen the most of them.
    pub(crate) fn state_after(
        &self,
        tenant: TenantId,
        public: &[PublicPrefix],
        parent: Option<Page>,
        tokens: &[TokenId],
    ) -> Option<(Page, PageState)> {
        if !self.slabs.is_used() {
            return None;
        }
        let pages = self.tree.candidates(tenant, public, parent);
        let fitting = pages.filter_map(|page| {
            let shared = common_prefix(self.tree.tokens(page), tokens);
            let state = self.slabs.state_of(page)?;
            (state.tokens <= shared).then_some((page, state))
        });
        fitting.max_by_key(|(_, state)| state.tokens)
    }

    /// Releases all pages of a page table. Releases the last page first, so that children are
    /// colder than their parents.
    pub(crate) fn release_table(&mut self, pages: &[Page]) {
        for &page in pages.iter().rev() {
            self.release(page);
        }
    }

    /// Removes released pages, which may hold wrong keys and values, from the tree, and all pages
    /// after them. Pages that running sequences use stay.
    pub(crate) fn discard(&mut self, pages: &[Page]) {
        for &page in pages.iter().rev() {
            let is_cached = self.holders[page.index()] == Holder::Tree;
            while is_cached && !self.is_pinned(page) {
                let last = self.last_descendant(page);
                self.forget(last);
                if last == page {
                    break;
                }
            }
        }
    }

    fn last_descendant(&self, page: Page) -> Page {
        let payer = self.payer(page);
        let next = |page: &Page| self.tree.children(payer, Some(*page)).next();
        let line = std::iter::successors(Some(page), next);
        line.last().expect("the page itself")
    }

    /// Removes one pin from `page`, and frees the page or makes it cold if that was the last pin.
    fn release(&mut self, page: Page) {
        let pins = &mut self.pins[page.index()];
        assert!(*pins > 0, "{page:?} is not pinned");
        *pins -= 1;
        let is_unused = *pins == 0;
        match self.holders[page.index()] {
            Holder::Free => panic!("{page:?} is pinned and free"),
            Holder::Private(_) => self.set_free(page),
            Holder::Tree if is_unused => {
                self.assert_parent_is_pinned(page);
                self.cold.push_hottest(page, self.payer(page));
            }
            Holder::Tree => {}
        }
    }

    /// Asserts that pages are pinned from the root down and released in reverse order. This keeps
    /// children colder than their parents.
    fn assert_parent_is_pinned(&self, page: Page) {
        let parent = self.tree.edge(page).and_then(|edge| edge.parent);
        let is_pinned = parent.is_none_or(|parent| self.is_pinned(parent));
        assert!(is_pinned, "the parent of {page:?} is not pinned");
    }
}
