//! Random sequences of several tenants use the page pool and a slow reference; both must agree.
//!
//! `STERNA_SEED` sets the seed of the first world; each next world adds one. A world that fails
//! prints its seed.

use std::hash::{BuildHasher, Hasher, RandomState};

use sterna_random::Random;

use super::mirror::CacheMirror;
use super::reference::{EvictionCause, PageState, ReferencePool};
use crate::pages::{Behind, Holder, Owner, PagePool, PageQuota};
use crate::{PAGE_TOKENS, Page, PublicPrefix, SequenceId, TenantId, TokenId};

const TURNS: usize = 400;

#[test]
fn the_pool_agrees_with_the_reference() {
    let mut coverage = PoolCoverage::default();
    let first = first_seed();
    for seed in first..first + 600 {
        PoolWorld::new(seed, RandomState::new()).run(&mut coverage);
    }
    coverage.assert_enough();
}

#[test]
fn hash_collisions_change_no_result() {
    let first = first_seed();
    for seed in first..first + 50 {
        PoolWorld::new(seed, Colliding).run(&mut PoolCoverage::default());
    }
}

fn first_seed() -> u64 {
    sterna_random::seed_from_env().unwrap_or(1)
}

/// A hasher that gives all keys the same hash.
#[derive(Clone)]
struct Colliding;

impl BuildHasher for Colliding {
    type Hasher = Colliding;

    fn build_hasher(&self) -> Colliding {
        Colliding
    }
}

impl Hasher for Colliding {
    fn write(&mut self, _: &[u8]) {}

    fn finish(&self) -> u64 {
        0
    }
}

/// The number of times that the worlds met each difficult case.
#[derive(Debug, Default)]
struct PoolCoverage {
    found: usize,
    copied: usize,
    at_cap: usize,
    over_share: usize,
    nothing_free: usize,
    not_guaranteed: usize,
    refused_with_pages_free: usize,
    redirects: usize,
    published_public: usize,
    tails_kept: usize,
    tails_covered: usize,
    long_child_lists: usize,
}

impl PoolCoverage {
    fn assert_enough(&self) {
        let counts = [
            self.found,
            self.copied,
            self.at_cap,
            self.over_share,
            self.nothing_free,
            self.not_guaranteed,
            self.refused_with_pages_free,
            self.redirects,
            self.published_public,
            self.tails_kept,
            self.tails_covered,
            self.long_child_lists,
        ];
        let rarest = counts.into_iter().min();
        assert!(rarest > Some(300), "a case is too rare: {self:?}");
    }
}

/// A running sequence.
struct PoolSequence {
    id: SequenceId,
    tenant: TenantId,
    public: Vec<PublicPrefix>,
    tokens: Vec<TokenId>,
    table: Vec<Page>,
    in_tree: usize,
    source: Option<Page>, // The page that a pending copy reads.
}

impl PoolSequence {
    fn parent(&self) -> Option<Page> {
        self.in_tree.checked_sub(1).map(|last| self.table[last])
    }
}

struct PoolWorld<S> {
    seed: u64,
    random: Random,
    pool: PagePool<S>,
    reference: ReferencePool,
    tenants: usize,
    running: Vec<PoolSequence>,
    started: u32,
    mirror: Option<CacheMirror>, // From the turn in which the caller starts to record.
}

impl<S> Drop for PoolWorld<S> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("STERNA_SEED={}", self.seed);
        }
    }
}

impl<S: BuildHasher + Clone> PoolWorld<S> {
    fn new(seed: u64, hasher: S) -> PoolWorld<S> {
        let mut random = Random::new(seed);
        let pages = 4 + random.index(100);
        let mut world = PoolWorld {
            pool: PagePool::with_hasher(pages as u32, hasher),
            reference: ReferencePool::new(pages),
            tenants: 1 + random.index(4),
            running: Vec::new(),
            started: 0,
            mirror: None,
            seed,
            random,
        };
        world.reference.quotas = vec![PageQuota::default(); world.tenants];
        for tenant in 0..world.tenants {
            world.set_tenant(tenant);
        }
        for _ in 0..world.random.index(4) {
            let len = world.random.index(3 * PAGE_TOKENS);
            let tokens = world.tokens(len);
            let prefix = world.pool.declare_public(&tokens);
            assert_eq!(prefix.0 as usize, world.reference.declared.len());
            let whole = tokens.len() / PAGE_TOKENS * PAGE_TOKENS;
            world.reference.declared.push(tokens[..whole].to_vec());
        }
        world
    }

    fn run(&mut self, coverage: &mut PoolCoverage) {
        let watched_from = self.seed as usize % (TURNS / 2);
        for turn in 0..TURNS {
            if turn == watched_from {
                self.pool.watch();
                self.mirror = Some(CacheMirror::default());
            }
            match self.random.index(100) {
                0..24 => self.start(coverage),
                24..58 => self.grow(coverage),
                58..80 => self.publish(coverage),
                80..82 => self.complete_copy(),
                82..86 => self.preempt(),
                86..97 => self.end(coverage),
                97 => self.forget(),
                98 => self.exhaust(coverage),
                _ => {
                    let tenant = self.random.index(self.tenants);
                    self.set_tenant(tenant);
                }
            }
            self.check(coverage);
        }
    }

    /// Returns tokens whose pages are often equal, or equal up to some position.
    fn tokens(&mut self, len: usize) -> Vec<TokenId> {
        let mut tokens = Vec::new();
        while tokens.len() < len {
            let first = self.random.index(2) as TokenId;
            let is_mixed = self.random.percent(40);
            let turn = if is_mixed {
                self.random.index(PAGE_TOKENS)
            } else {
                PAGE_TOKENS
            };
            let then = self.random.index(4) as TokenId;
            let token = |at: usize| if at < turn { first } else { then };
            tokens.extend((0..PAGE_TOKENS).map(token));
        }
        tokens.truncate(len);
        tokens
    }

    fn prompt(&mut self) -> Vec<TokenId> {
        let limit = if self.random.percent(50) {
            5 * PAGE_TOKENS
        } else {
            PAGE_TOKENS + 4
        };
        let len = 1 + self.random.index(limit);
        let mut tokens = self.tokens(len);
        if self.random.percent(40) && !self.reference.declared.is_empty() {
            let index = self.random.index(self.reference.declared.len());
            let declared = &self.reference.declared[index];
            tokens.splice(0..0, declared.iter().copied());
        }
        tokens
    }

    fn set_tenant(&mut self, tenant: usize) {
        let quota = PageQuota {
            weight: 1 + self.random.index(3) as u32,
            guaranteed: if self.random.percent(40) {
                self.random.index(6) as u32
            } else {
                0
            },
            max: if self.random.percent(40) {
                1 + self.random.index(16) as u32
            } else {
                u32::MAX
            },
        };
        self.pool.set_tenant(TenantId(tenant as u32), quota);
        self.reference.quotas[tenant] = quota;
    }

    /// Starts a sequence with the cached pages of its prompt.
    fn start(&mut self, coverage: &mut PoolCoverage) {
        if self.running.len() >= 6 {
            return;
        }
        let tokens = self.prompt();
        let tenant = TenantId(self.random.index(self.tenants) as u32);
        let mut public = Vec::new();
        for prefix in 0..self.reference.declared.len() {
            if self.random.percent(60) {
                public.push(PublicPrefix(prefix as u32));
            }
        }
        let reusable = &tokens[..tokens.len() - 1];
        let found: Vec<Page> = self.pool.tree.find(tenant, &public, 0, reusable).collect();
        assert_eq!(found, self.reference.find(tenant, &public, reusable));
        coverage.found += found.len();
        for &page in &found {
            self.pin(page);
        }
        let parent = found.last().copied();
        let rest = &reusable[found.len() * PAGE_TOKENS..];
        let similar = self.pool.tree.similar(tenant, &public, parent, rest);
        let expected = self.reference.similar(tenant, &public, parent, rest);
        assert_eq!(
            similar.map(|(_, tokens)| tokens),
            expected.map(|(_, tokens)| tokens)
        );
        let is_public = |page| self.pool.tree.is_public(page);
        if let (Some((page, _)), Some((other, _))) = (similar, expected) {
            assert!(page == other || is_public(page) && is_public(other));
        }
        let source = similar
            .map(|(page, _)| page)
            .filter(|_| self.random.percent(60));
        if let Some(page) = source {
            self.pin(page);
            coverage.copied += 1;
        }
        self.started += 1;
        self.running.push(PoolSequence {
            id: SequenceId::new(self.started, 0),
            tenant,
            public,
            tokens,
            in_tree: found.len(),
            table: found,
            source,
        });
    }

    fn pin(&mut self, page: Page) {
        self.pool.pin(page);
        self.reference.pin(page);
    }

    /// Returns the index of a random running sequence that matches.
    fn pick(&mut self, matches: impl Fn(&PoolSequence) -> bool) -> Option<usize> {
        let matching: Vec<usize> = (0..self.running.len())
            .filter(|&index| matches(&self.running[index]))
            .collect();
        (!matching.is_empty()).then(|| matching[self.random.index(matching.len())])
    }

    /// Takes a page for a sequence.
    fn grow(&mut self, coverage: &mut PoolCoverage) {
        let needs_pages =
            |sequence: &PoolSequence| sequence.table.len() * PAGE_TOKENS < sequence.tokens.len();
        if let Some(index) = self.pick(needs_pages) {
            self.take(index, coverage);
        }
    }

    fn take(&mut self, index: usize, coverage: &mut PoolCoverage) -> Option<Page> {
        let sequence = &mut self.running[index];
        let victims = self.reference.victims(sequence.tenant);
        let evictions = self.pool.evictions;
        let page = self.pool.take(sequence.id, sequence.tenant);
        assert_eq!(page.is_some(), victims.is_some());
        if page.is_none() {
            coverage.refused_with_pages_free += usize::from(!self.pool.free.is_empty());
        }
        let page = page?;
        let victims = victims?;
        assert_eq!(self.pool.evictions - evictions, victims.len() as u64);
        for (page, cause) in victims {
            self.reference.evict(page);
            match cause {
                EvictionCause::AtCap => coverage.at_cap += 1,
                EvictionCause::OverShare => coverage.over_share += 1,
                EvictionCause::NothingFree => coverage.nothing_free += 1,
                EvictionCause::NotGuaranteed => coverage.not_guaranteed += 1,
            }
        }
        self.reference.give(page, sequence.id, sequence.tenant);
        sequence.table.push(page);
        Some(page)
    }

    /// Takes pages for a sequence until none is left, then stops it.
    fn exhaust(&mut self, coverage: &mut PoolCoverage) {
        let Some(index) = self.pick(|_| true) else {
            return;
        };
        let available = self.pool.available(self.running[index].tenant);
        let taken = std::iter::from_fn(|| self.take(index, coverage)).count();
        assert_eq!(taken, available);
        self.stop(index);
    }

    /// Publishes the next whole page of a sequence.
    fn publish(&mut self, coverage: &mut PoolCoverage) {
        let has_whole_page = |sequence: &PoolSequence| {
            let whole = sequence
                .table
                .len()
                .min(sequence.tokens.len() / PAGE_TOKENS);
            sequence.in_tree < whole
        };
        let Some(index) = self.pick(has_whole_page) else {
            return;
        };
        let sequence = &mut self.running[index];
        let (own, parent) = (sequence.table[sequence.in_tree], sequence.parent());
        let (pages, _) = sequence.tokens.as_chunks::<PAGE_TOKENS>();
        let tokens = pages[sequence.in_tree];
        let (tenant, public, tree) = (sequence.tenant, &sequence.public, &self.pool.tree);
        let edge = tree.edge_for(tenant, public, parent, &tokens, Behind::default());
        let owner = self
            .reference
            .owner(sequence.tenant, &sequence.public, parent, &tokens);
        assert_eq!(edge.owner, owner);
        let page = self.pool.publish(sequence.id, own, &edge);
        if let Some(equal) = self.reference.get(owner, parent, &tokens) {
            assert_eq!(page, equal);
            self.reference.pin(equal);
            self.reference.release(own);
            coverage.redirects += 1;
        } else {
            assert_eq!(page, own);
            self.reference.insert(own, owner, parent, &tokens);
            coverage.published_public += usize::from(owner == Owner::Public);
        }
        sequence.table[sequence.in_tree] = page;
        sequence.in_tree += 1;
    }

    /// Completes the pending copy of a sequence.
    fn complete_copy(&mut self) {
        if let Some(index) = self.pick(|sequence| sequence.source.is_some()) {
            self.unpin_source(index);
        }
    }

    fn unpin_source(&mut self, index: usize) {
        if let Some(page) = self.running[index].source.take() {
            self.pool.unpin(page);
            self.reference.release(page);
        }
    }

    /// Preempts or cancels a sequence.
    fn preempt(&mut self) {
        if let Some(index) = self.pick(|_| true) {
            self.stop(index);
        }
    }

    fn stop(&mut self, index: usize) {
        self.unpin_source(index);
        let sequence = self.running.remove(index);
        self.pool.release_table(&sequence.table);
        for &page in sequence.table.iter().rev() {
            self.reference.release(page);
        }
    }

    /// Ends a sequence that has computed some tokens of its first private page.
    fn end(&mut self, coverage: &mut PoolCoverage) {
        let Some(index) = self.pick(|sequence| sequence.in_tree < sequence.table.len()) else {
            return;
        };
        self.unpin_source(index);
        let sequence = &mut self.running[index];
        let known = sequence.tokens.get(sequence.in_tree * PAGE_TOKENS..);
        let known = known.filter(|known| !known.is_empty());
        if let Some(known) = known {
            let len = 1 + self.random.index(known.len().min(PAGE_TOKENS - 1));
            let (tail, parent) = (&known[..len], sequence.parent());
            let page = sequence.table.remove(sequence.in_tree);
            self.pool
                .offer_tail(sequence.id, page, parent, sequence.tenant, tail);
            let children = self.reference.children(sequence.tenant, parent);
            let tokens = |page| &self.reference.cached(page).unwrap().tokens;
            let mut scanned = children.into_iter().take(8);
            if let Some(covering) = scanned.find(|&page| tokens(page).starts_with(tail)) {
                self.reference.release(page);
                self.reference.pin(covering);
                self.reference.release(covering);
                coverage.tails_covered += 1;
            } else {
                let owner = Owner::Tenant(sequence.tenant);
                self.reference.insert(page, owner, parent, tail);
                self.reference.release(page);
                coverage.tails_kept += 1;
            }
        }
        self.stop(index);
    }

    fn forget(&mut self) {
        if self.random.percent(20) {
            self.pool.forget_unpinned();
            for page in self.reference.cold(None) {
                self.reference.evict(page);
            }
        }
    }

    fn check(&mut self, coverage: &mut PoolCoverage) {
        let mut pins = vec![0; self.reference.states.len()];
        for sequence in &self.running {
            for page in sequence.table.iter().chain(&sequence.source) {
                pins[page.index()] += 1;
            }
        }
        let changes = self.pool.drain_changes();
        match &mut self.mirror {
            Some(mirror) => mirror.follow(changes),
            None => assert!(changes.is_empty(), "none are recorded yet"),
        }
        for page in self.reference.pages() {
            if let Some(mirror) = &self.mirror {
                assert_eq!(mirror.get(page), self.pool.whole(page));
            }
            pins[page.index()] += u32::from(self.pool.tree.is_public(page));
            self.check_page(page);
        }
        assert_eq!(self.pool.pins, pins);
        assert_eq!(self.pool.pins, self.reference.pins);
        let holders = self.pool.holders.iter();
        let free = holders.clone().filter(|&&holder| holder == Holder::Free);
        assert_eq!(self.pool.free.len(), free.count());
        let tree = holders.filter(|&&holder| holder == Holder::Tree).count();
        assert_eq!(self.pool.tree.len(), tree);
        assert!(self.pool.cold.iter().eq(self.reference.cold(None)));
        assert_eq!(self.pool.cold.len(), self.reference.cold(None).len());
        for tenant in 0..self.tenants {
            self.check_tenant(TenantId(tenant as u32), coverage);
        }
    }

    fn check_page(&self, page: Page) {
        let holder = match self.reference.states[page.index()] {
            PageState::Free => Holder::Free,
            PageState::Private(sequence, _) => Holder::Private(sequence),
            PageState::Tree(_) => Holder::Tree,
        };
        assert_eq!(self.pool.holders[page.index()], holder, "{page:?}");
        assert_eq!(self.pool.holdings.payer(page), self.reference.payer(page));
        let edge = self.pool.tree.edge(page);
        let cached = self.reference.cached(page);
        assert_eq!(edge.is_some(), cached.is_some());
        if let (Some(edge), Some(cached)) = (edge, cached) {
            assert_eq!((edge.owner, edge.parent), (cached.owner, cached.parent));
            assert_eq!(self.pool.tree.tokens(page), cached.tokens);
            let is_whole = cached.tokens.len() == PAGE_TOKENS;
            let found = self.pool.tree.get(&edge);
            assert!(found == Some(page) || !is_whole && found != Some(page));
        }
    }

    fn check_tenant(&self, tenant: TenantId, coverage: &mut PoolCoverage) {
        let (pool, reference) = (&self.pool, &self.reference);
        assert_eq!(pool.held(tenant), reference.held(tenant));
        assert_eq!(pool.in_use(tenant), reference.in_use(tenant));
        assert!(pool.cold.iter_of(tenant).eq(reference.cold(Some(tenant))));
        let unmet = pool.unmet_guarantees(tenant);
        assert_eq!(unmet, reference.unmet_guarantees(tenant));
        let is_visible = |&page: &Page| {
            let payer = reference.payer(page);
            reference.cached(page).is_some() && payer.is_none_or(|payer| payer == tenant)
        };
        let parents = reference.pages().filter(is_visible).map(Some);
        for parent in parents.chain([None]) {
            let children = reference.children(tenant, parent);
            coverage.long_child_lists += usize::from(children.len() > 8);
            assert!(pool.tree.children(tenant, parent).eq(children));
        }
    }
}
