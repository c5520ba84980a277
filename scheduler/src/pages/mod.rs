//! Who holds each page of KV memory.
//!
//! Invariant: every page is free, private to one sequence, or in the prefix tree.
//! Invariant: a page's pins are the page tables that contain it, the pending copies from it, and one more for good when it
//! is public; only private pages are ever written.
//! Invariant: the cold pages are exactly the unpinned tree pages, and a parent is pinned or hotter than its child. So the
//! coldest page, of all or of one tenant, is always a leaf, and the number of cold pages is what eviction can yield.

mod children;
mod cold;
mod edges;
mod holdings;
mod prefix;
mod public;
#[cfg(test)]
mod random;
#[cfg(test)]
mod reference;
mod tables;

use std::hash::{BuildHasher, RandomState};

use cold::ColdPages;
use holdings::Holdings;
pub(crate) use holdings::PageQuota;
pub(crate) use prefix::Owner;
use prefix::{Edge, PrefixTree};
pub(crate) use tables::{PageTable, PageTables};

use crate::{PublicPrefix, SequenceId, TenantId, TokenId};

/// Tokens in a page. Larger ones would share less of a prefix and give little for it: with no page beside another of its sequence,
/// attention takes 0.3 ms of a step of 38 longer at 4 streams, 1.6 of 227 at 32, and at 1 and 16 nothing that shows (2B shape, 256 keys each,
/// two Zen 4 cores; the third decile of the steps of three runs each, in turn).
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

/// How many pages there are of each kind, and how many were evicted so far.
pub(crate) struct PageCounts {
    pub(crate) free: usize,
    pub(crate) private: usize,
    pub(crate) tree: usize,
    pub(crate) pinned: usize,
    pub(crate) evictions: u64,
}

/// All pages, and the tree over those that are cached.
pub(crate) struct PagePool<S = RandomState> {
    pub(crate) holders: Vec<Holder>, // Indexed by page.
    pub(crate) pins: Vec<u32>,       // Likewise.
    pub(crate) free: Vec<Page>,
    pub(crate) cold: ColdPages,
    pub(crate) tree: PrefixTree<S>,
    pub(crate) holdings: Holdings,
    evictions: u64,
}

impl PagePool {
    /// All pages free. Tenant 0 exists, with the default share.
    pub(crate) fn new(pages: u32) -> PagePool {
        PagePool::with_hasher(pages, RandomState::new())
    }
}

impl<S: BuildHasher + Clone> PagePool<S> {
    pub(crate) fn with_hasher(pages: u32, hasher: S) -> PagePool<S> {
        let count = pages as usize;
        let mut pool = PagePool {
            holders: vec![Holder::Free; count],
            pins: vec![0; count],
            free: (0..pages).rev().map(Page).collect(),
            cold: ColdPages::new(count),
            tree: PrefixTree::new(count, hasher),
            holdings: Holdings::new(count),
            evictions: 0,
        };
        pool.set_tenant(TenantId(0), PageQuota::default());
        pool
    }

    /// Sets what a tenant may have from now on. A cap below what it holds takes effect as it takes and gives back.
    pub(crate) fn set_tenant(&mut self, tenant: TenantId, quota: PageQuota) {
        while self.holdings.tenants() <= tenant.index() {
            self.holdings.add_tenant();
            self.cold.add_tenant();
        }
        self.holdings.set(tenant, quota);
    }

    /// Declares a prefix whose whole pages, once published, stay for all tenants that may use it.
    pub(crate) fn declare_public(&mut self, tokens: &[TokenId]) -> PublicPrefix {
        self.tree.declare(tokens)
    }

    /// Pages of all declared prefixes, published or not.
    pub(crate) fn reserved(&self) -> u32 {
        self.tree.declared() as u32
    }

    /// How many prefixes were declared.
    pub(crate) fn prefixes(&self) -> u32 {
        self.tree.prefixes()
    }

    /// Tokens of which `tokens` begin like one of the prefixes named; whole pages.
    pub(crate) fn public_tokens(&self, public: &[PublicPrefix], tokens: &[TokenId]) -> usize {
        self.tree.public_pages(public, tokens) * PAGE_TOKENS
    }

    /// How many pages there are of each kind.
    pub(crate) fn counts(&self) -> PageCounts {
        let (free, tree) = (self.free.len(), self.tree.len());
        PageCounts {
            free,
            private: self.holders.len() - free - tree,
            tree,
            pinned: tree - self.cold.len(),
            evictions: self.evictions,
        }
    }

    /// Pages that count against a tenant: private ones, and cached ones whether anybody uses them or not.
    pub(crate) fn held(&self, tenant: TenantId) -> u32 {
        self.holdings.held(tenant)
    }

    /// Those of them that sequences use.
    pub(crate) fn in_use(&self, tenant: TenantId) -> u32 {
        self.held(tenant) - self.cold.len_of(tenant) as u32
    }

    /// Pages that are free or can be evicted.
    pub(crate) fn available_to_all(&self) -> usize {
        self.free.len() + self.cold.len()
    }

    /// Pages that [`PagePool::take`] can give a tenant, in a row.
    pub(crate) fn available(&self, tenant: TenantId) -> usize {
        self.available_to_all().min(self.room(tenant))
    }

    /// Pages that a tenant may use more than it does, whether there are any or not.
    pub(crate) fn room(&self, tenant: TenantId) -> usize {
        self.cap(tenant).saturating_sub(self.in_use(tenant)) as usize
    }

    /// Pages that a tenant may hold.
    pub(crate) fn cap(&self, tenant: TenantId) -> u32 {
        self.holdings.quota(tenant).max
    }

    /// Pages that other tenants are guaranteed and do not use.
    pub(crate) fn unmet_guarantees(&self, except: TenantId) -> usize {
        let others = self.holdings.guarantees();
        let others = others.filter(|&(tenant, _)| tenant != except);
        let unmet = |(tenant, pages): (TenantId, u32)| pages.saturating_sub(self.in_use(tenant));
        others.map(|guarantee| unmet(guarantee) as usize).sum()
    }

    /// The cached pages that begin `tokens`, first to last: those of the public prefixes named, then the tenant's own.
    /// Pins nothing.
    pub(crate) fn find<'a>(
        &'a self,
        tenant: TenantId,
        public: &'a [PublicPrefix],
        tokens: &'a [TokenId],
    ) -> impl Iterator<Item = Page> + 'a {
        self.tree.find(tenant, public, tokens)
    }

    /// The cached page after `parent` that begins most like `tokens`, and how many tokens they have in common, at least
    /// one: what to copy when no whole page is found. Pins nothing.
    pub(crate) fn similar(
        &self,
        tenant: TenantId,
        public: &[PublicPrefix],
        parent: Option<Page>,
        tokens: &[TokenId],
    ) -> Option<(Page, usize)> {
        self.tree.similar(tenant, public, parent, tokens)
    }

    /// Where a page of these tokens belongs, after `parent`: among the public pages when it goes on with a prefix that is
    /// named, else among the tenant's own.
    pub(crate) fn edge(
        &self,
        tenant: TenantId,
        public: &[PublicPrefix],
        parent: Option<Page>,
        tokens: [TokenId; PAGE_TOKENS],
    ) -> Edge {
        self.tree.edge_for(tenant, public, parent, tokens)
    }

    /// Whether a single page table contains this page and nothing else uses it.
    pub(crate) fn is_exclusive(&self, page: Page) -> bool {
        self.pins[page.index()] == 1
    }

    pub(crate) fn is_pinned(&self, page: Page) -> bool {
        self.pins[page.index()] > 0
    }

    /// Gives a page to `sequence` alone, a cached one if none is free; `None` when every page is in use, or as many as
    /// the tenant may hold. Evicts only to give.
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
        let page = page.expect("M7: what is evicted for a page is enough for it");
        let holder = &mut self.holders[page.index()];
        assert_eq!(*holder, Holder::Free, "{page:?} was on the free list");
        *holder = Holder::Private(sequence);
        self.pins[page.index()] = 1;
        self.holdings.charge(page, Some(tenant));
        Some(page)
    }

    /// What is evicted for a tenant: its own coldest page when it holds more than its share, else the coldest of all.
    fn least_wanted(&self, tenant: TenantId) -> Option<Page> {
        let own = self.cold.coldest_of(tenant);
        let own = own.filter(|_| self.holdings.is_over_share(tenant));
        own.or_else(|| self.cold.coldest())
    }

    fn evict(&mut self, page: Option<Page>) {
        self.forget(page.expect("M7: a cold page was available"));
        self.evictions += 1;
    }

    /// Drops every cached page that nobody uses.
    pub(crate) fn forget_unpinned(&mut self) {
        while let Some(page) = self.cold.coldest() {
            self.forget(page);
        }
    }

    /// Drops a cold leaf from the tree.
    fn forget(&mut self, page: Page) {
        self.cold.remove(page, self.payer(page));
        self.tree.remove(page);
        self.set_free(page);
    }

    fn set_free(&mut self, page: Page) {
        self.holdings.charge(page, None);
        self.holders[page.index()] = Holder::Free;
        self.free.push(page);
    }

    fn payer(&self, page: Page) -> TenantId {
        let payer = self.holdings.payer(page);
        payer.expect("only free and public pages count against nobody")
    }

    /// One more page table contains this cached page, or one more copy is to be made from it. Its parent must be pinned.
    pub(crate) fn pin(&mut self, page: Page) {
        assert_eq!(self.holders[page.index()], Holder::Tree, "{page:?}");
        self.assert_parent_is_pinned(page);
        if !self.is_pinned(page) {
            self.cold.remove(page, self.payer(page));
        }
        self.pins[page.index()] += 1;
        self.tree.touch(page);
    }

    /// A copy from this cached page is made, or given up. Its parent must be pinned still.
    pub(crate) fn unpin(&mut self, page: Page) {
        assert_eq!(self.holders[page.index()], Holder::Tree, "{page:?}");
        self.release(page);
    }

    /// Puts a full, computed page of `sequence` into the tree. Returns the page that now stands in its place: when an
    /// equal one is there already, that one, and the copy becomes free.
    pub(crate) fn publish(&mut self, sequence: SequenceId, page: Page, edge: Edge) -> Page {
        assert_eq!(self.holders[page.index()], Holder::Private(sequence));
        if let Some(equal) = self.tree.insert(page, edge) {
            self.pin(equal);
            self.release(page);
            return equal;
        }
        self.holders[page.index()] = Holder::Tree;
        self.assert_parent_is_pinned(page);
        match edge.owner {
            Owner::Tenant(tenant) => assert_eq!(tenant, self.payer(page), "{page:?}"),
            Owner::Public => {
                self.pins[page.index()] += 1;
                self.holdings.charge(page, None);
            }
        }
        page
    }

    /// Takes back the last page of a sequence that has ended, which holds these `tokens` after `parent`, fewer than a
    /// page: others may copy them from now on. When the tenant has a page there that begins with them, that one is as
    /// recently used as this one would be, and this one becomes free. `parent` must be pinned still.
    pub(crate) fn offer_tail(
        &mut self,
        sequence: SequenceId,
        page: Page,
        parent: Option<Page>,
        tenant: TenantId,
        tokens: &[TokenId],
    ) {
        assert_eq!(self.holders[page.index()], Holder::Private(sequence));
        assert_eq!(tenant, self.payer(page), "{page:?}");
        assert!((1..PAGE_TOKENS).contains(&tokens.len()), "part of a page");
        if let Some(covering) = self.tree.covering(tenant, parent, tokens) {
            self.release(page);
            self.pin(covering);
            self.release(covering);
        } else {
            self.holders[page.index()] = Holder::Tree;
            self.tree.insert_partial(page, tenant, parent, tokens);
            self.release(page);
        }
    }

    /// Gives back a whole page table. The last page goes first, so that children end up colder than their parents.
    pub(crate) fn release_table(&mut self, pages: &[Page]) {
        for &page in pages.iter().rev() {
            self.release(page);
        }
    }

    /// One page table, or one copy, fewer uses `page`.
    fn release(&mut self, page: Page) {
        let pins = &mut self.pins[page.index()];
        assert!(*pins > 0, "{page:?} is in no page table");
        *pins -= 1;
        let is_unused = *pins == 0;
        match self.holders[page.index()] {
            Holder::Free => panic!("{page:?} was in use and free"),
            Holder::Private(_) => self.set_free(page),
            Holder::Tree if is_unused => {
                self.assert_parent_is_pinned(page);
                self.cold.push_hottest(page, self.payer(page));
            }
            Holder::Tree => {}
        }
    }

    /// Pages are pinned from the root down and released up to it: this is what keeps children colder than their parents.
    fn assert_parent_is_pinned(&self, page: Page) {
        let parent = self.tree.edge(page).and_then(|edge| edge.parent);
        let is_pinned = parent.is_none_or(|parent| self.is_pinned(parent));
        assert!(is_pinned, "the parent of {page:?} is in no page table");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence() -> SequenceId {
        SequenceId::new(0, 0)
    }

    /// Takes and publishes a page for each token, each under the one before.
    fn publish_path(
        pool: &mut PagePool,
        tenant: TenantId,
        public: &[PublicPrefix],
        path: &[TokenId],
    ) -> Vec<Page> {
        let mut table: Vec<Page> = Vec::new();
        for &token in path {
            let page = pool.take(sequence(), tenant).unwrap();
            let parent = table.last().copied();
            let edge = pool.edge(tenant, public, parent, [token; PAGE_TOKENS]);
            table.push(pool.publish(sequence(), page, edge));
        }
        table
    }

    #[test]
    fn a_released_path_is_evicted_from_its_end() {
        let mut pool = PagePool::new(3);
        let tenant = TenantId(0);
        let table = publish_path(&mut pool, tenant, &[], &[0, 1, 2]);
        assert_eq!(pool.take(sequence(), tenant), None, "all pages are in use");
        pool.release_table(&table);
        for &page in table.iter().rev() {
            assert_eq!(pool.take(sequence(), tenant), Some(page));
        }
        assert_eq!(pool.evictions, 3);
    }

    #[test]
    fn a_tenant_at_its_cap_recycles_its_own_pages() {
        let mut pool = PagePool::new(8);
        let (capped, other) = (TenantId(0), TenantId(1));
        pool.set_tenant(other, PageQuota::default());
        let max = |max| PageQuota {
            max,
            ..PageQuota::default()
        };
        pool.set_tenant(capped, max(2));
        let table = publish_path(&mut pool, other, &[], &[7]);
        pool.release_table(&table);
        let table = publish_path(&mut pool, capped, &[], &[0, 1]);
        assert_eq!(pool.take(sequence(), capped), None, "free pages or not");
        pool.release_table(&table);
        assert_eq!(pool.available(capped), 2);
        assert_eq!(pool.take(sequence(), capped), Some(table[1]));
        assert_eq!((pool.held(capped), pool.in_use(capped)), (2, 1));
        pool.set_tenant(capped, max(1));
        assert_eq!(pool.take(sequence(), capped), None);
        assert_eq!(pool.held(capped), 2, "nothing is evicted in vain");
        assert_eq!(pool.held(other), 1);
    }

    #[test]
    fn a_tenant_over_its_share_evicts_its_own_pages() {
        let mut pool = PagePool::new(12);
        let (modest, thrasher) = (TenantId(0), TenantId(1));
        pool.set_tenant(thrasher, PageQuota::default());
        let kept = publish_path(&mut pool, modest, &[], &[0, 1, 2, 3]);
        pool.release_table(&kept);
        for token in 0..40 {
            let table = publish_path(&mut pool, thrasher, &[], &[token]);
            pool.release_table(&table);
        }
        let tokens = [0, 1, 2, 3].map(|token| [token; PAGE_TOKENS]).concat();
        assert!(pool.find(modest, &[], &tokens).eq(kept.iter().copied()));
        assert_eq!(pool.held(thrasher), 8);
    }

    #[test]
    fn public_pages_are_shared_and_stay() {
        let mut pool = PagePool::new(8);
        let (first, second, stranger) = (TenantId(0), TenantId(1), TenantId(2));
        pool.set_tenant(stranger, PageQuota::default());
        let tokens = [0, 1, 2].map(|token| [token; PAGE_TOKENS]).concat();
        let public = [pool.declare_public(&tokens[..40])];
        assert_eq!(pool.reserved(), 2);
        for tenant in [first, second] {
            let table = publish_path(&mut pool, tenant, &public, &[0, 1, 2]);
            assert_eq!((pool.held(tenant), pool.in_use(tenant)), (1, 1));
            pool.release_table(&table);
            assert_eq!(pool.find(tenant, &public, &tokens).count(), 3);
            assert_eq!(pool.find(tenant, &[], &tokens).count(), 0);
        }
        let similar = pool.similar(stranger, &public, None, &[0, 0, 9]);
        assert_eq!(similar.map(|(_, tokens)| tokens), Some(2));
        assert_eq!(pool.similar(stranger, &[], None, &[0, 0, 9]), None);
        pool.forget_unpinned();
        assert_eq!(pool.tree.len(), 2);
        assert_eq!(pool.find(stranger, &public, &tokens).count(), 2);
    }

    #[test]
    fn a_tail_is_copied_from_until_a_longer_one_stands_there() {
        let mut pool = PagePool::new(4);
        let tenant = TenantId(0);
        let mut offer = |tokens: &[TokenId]| {
            let page = pool.take(sequence(), tenant).unwrap();
            pool.offer_tail(sequence(), page, None, tenant, tokens);
            pool.tree.len()
        };
        assert_eq!(offer(&[1, 2, 3]), 1);
        assert_eq!(offer(&[1, 2]), 1, "covered");
        assert_eq!(offer(&[1, 2, 3, 4]), 2);
        let (page, shared) = pool.similar(tenant, &[], None, &[1, 2, 3, 5]).unwrap();
        assert_eq!((pool.tree.tokens(page).len(), shared), (4, 3));
        pool.pin(page);
        pool.forget_unpinned();
        assert!(pool.is_pinned(page));
        pool.unpin(page);
        pool.forget_unpinned();
        assert_eq!((pool.free.len(), pool.held(tenant)), (4, 0));
    }

    #[test]
    fn only_the_most_recently_used_children_are_compared() {
        let mut pool = PagePool::new(9);
        let tenant = TenantId(0);
        let mut children = Vec::new();
        for token in 0..9 {
            let table = publish_path(&mut pool, tenant, &[], &[token]);
            pool.release_table(&table);
            children.extend(table);
        }
        assert_eq!(pool.similar(tenant, &[], None, &[0]), None, "the ninth");
        let similar = pool.similar(tenant, &[], None, &[1]);
        assert_eq!(similar, Some((children[1], 1)), "the eighth");
        pool.pin(children[0]);
        pool.unpin(children[0]);
        let similar = pool.similar(tenant, &[], None, &[0]);
        assert_eq!(similar, Some((children[0], 1)), "the first now");
        assert_eq!(pool.similar(tenant, &[], None, &[1]), None);
    }

    #[test]
    fn what_is_guaranteed_and_not_used_is_unmet() {
        let mut pool = PagePool::new(8);
        let (mine, yours) = (TenantId(0), TenantId(1));
        let guaranteed = |guaranteed| PageQuota {
            guaranteed,
            ..PageQuota::default()
        };
        pool.set_tenant(yours, guaranteed(3));
        let table = publish_path(&mut pool, yours, &[], &[0, 1]);
        assert_eq!(pool.unmet_guarantees(mine), 1);
        pool.release_table(&table);
        assert_eq!(pool.unmet_guarantees(mine), 3, "cached is not in use");
        assert_eq!(pool.unmet_guarantees(yours), 0);
        pool.set_tenant(yours, guaranteed(0));
        assert_eq!(pool.unmet_guarantees(mine), 0);
    }
}
