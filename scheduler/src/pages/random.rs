//! Random sequences of several tenants over the pages, beside a reference that does the same the slow way.
//!
//! `STERNA_SEED` sets the first world's seed, each next world adding one. A world that fails prints its own.

use std::hash::{BuildHasher, Hasher, RandomState};

use super::holdings::PageQuota;
use super::prefix::Owner;
use super::reference::{EvictionCause, PageState, ReferencePool};
use super::{Holder, PagePool};
use crate::{PAGE_TOKENS, Page, PublicPrefix, SequenceId, TenantId, TokenId};

const TURNS: usize = 400;

#[test]
fn pages_do_what_the_reference_does() {
    let mut seen = Seen::default();
    let first = first_seed();
    for seed in first..first + 600 {
        PoolWorld::new(seed, RandomState::new()).run(&mut seen);
    }
    seen.assert_enough();
}

#[test]
fn equal_hashes_change_nothing() {
    let first = first_seed();
    for seed in first..first + 50 {
        PoolWorld::new(seed, AllEqual).run(&mut Seen::default());
    }
}

fn first_seed() -> u64 {
    let number = |text: String| text.parse().unwrap();
    std::env::var("STERNA_SEED").map_or(1, number)
}

/// A hasher to which all keys are one.
#[derive(Clone)]
struct AllEqual;

impl BuildHasher for AllEqual {
    type Hasher = AllEqual;

    fn build_hasher(&self) -> AllEqual {
        AllEqual
    }
}

impl Hasher for AllEqual {
    fn write(&mut self, _: &[u8]) {}

    fn finish(&self) -> u64 {
        0
    }
}

/// How often the difficult cases came up.
#[derive(Debug, Default)]
struct Seen {
    found: usize,
    copied: usize,
    at_cap: usize,
    over_share: usize,
    nothing_free: usize,
    refused_with_pages_free: usize,
    redirects: usize,
    published_public: usize,
    tails_kept: usize,
    tails_covered: usize,
    many_children: usize,
}

impl Seen {
    fn assert_enough(&self) {
        let counts = [
            self.found,
            self.copied,
            self.at_cap,
            self.over_share,
            self.nothing_free,
            self.refused_with_pages_free,
            self.redirects,
            self.published_public,
            self.tails_kept,
            self.tails_covered,
            self.many_children,
        ];
        let rarest = counts.into_iter().min();
        assert!(rarest > Some(300), "too little came up: {self:?}");
    }
}

/// SplitMix64; prints its seed when the test fails.
struct Rng {
    seed: u64,
    state: u64,
}

impl Rng {
    fn below(&mut self, bound: usize) -> usize {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.state;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % bound as u64) as usize
    }

    fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }
}

impl Drop for Rng {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("STERNA_SEED={}", self.seed);
        }
    }
}

struct PoolSequence {
    id: SequenceId,
    tenant: TenantId,
    public: Vec<PublicPrefix>,
    tokens: Vec<TokenId>,
    table: Vec<Page>,
    in_tree: usize,
    source: Option<Page>, // Of a copy that is to be made.
}

impl PoolSequence {
    fn parent(&self) -> Option<Page> {
        self.in_tree.checked_sub(1).map(|last| self.table[last])
    }
}

struct PoolWorld<S> {
    rng: Rng,
    pool: PagePool<S>,
    reference: ReferencePool,
    tenants: usize,
    live: Vec<PoolSequence>,
    started: u32,
}

impl<S: BuildHasher + Clone> PoolWorld<S> {
    fn new(seed: u64, hasher: S) -> PoolWorld<S> {
        let mut rng = Rng { seed, state: seed };
        let pages = 4 + rng.below(100);
        let mut world = PoolWorld {
            pool: PagePool::with_hasher(pages as u32, hasher),
            reference: ReferencePool::new(pages),
            tenants: 1 + rng.below(4),
            live: Vec::new(),
            started: 0,
            rng,
        };
        world.reference.quotas = vec![PageQuota::default(); world.tenants];
        for tenant in 0..world.tenants {
            world.set_tenant(tenant);
        }
        for _ in 0..world.rng.below(4) {
            let len = world.rng.below(3 * PAGE_TOKENS);
            let tokens = world.tokens(len);
            let prefix = world.pool.declare_public(&tokens);
            assert_eq!(prefix.0 as usize, world.reference.declared.len());
            let whole = tokens.len() / PAGE_TOKENS * PAGE_TOKENS;
            world.reference.declared.push(tokens[..whole].to_vec());
        }
        world
    }

    fn run(&mut self, seen: &mut Seen) {
        for _ in 0..TURNS {
            match self.rng.below(100) {
                0..24 => self.start(seen),
                24..58 => self.grow(seen),
                58..80 => self.publish(seen),
                80..82 => self.copied(),
                82..86 => self.release(),
                86..97 => self.end(seen),
                97 => self.forget(),
                98 => self.exhaust(seen),
                _ => {
                    let tenant = self.rng.below(self.tenants);
                    self.set_tenant(tenant);
                }
            }
            self.check(seen);
        }
    }

    /// Tokens of which whole pages are often equal, and others part of the way.
    fn tokens(&mut self, len: usize) -> Vec<TokenId> {
        let mut tokens = Vec::new();
        while tokens.len() < len {
            let first = self.rng.below(2) as TokenId;
            let is_mixed = self.rng.percent(40);
            let turn = if is_mixed {
                self.rng.below(PAGE_TOKENS)
            } else {
                PAGE_TOKENS
            };
            let then = self.rng.below(4) as TokenId;
            let token = |at: usize| if at < turn { first } else { then };
            tokens.extend((0..PAGE_TOKENS).map(token));
        }
        tokens.truncate(len);
        tokens
    }

    fn prompt(&mut self) -> Vec<TokenId> {
        let most = if self.rng.percent(50) {
            5 * PAGE_TOKENS
        } else {
            PAGE_TOKENS + 4
        };
        let len = 1 + self.rng.below(most);
        let mut tokens = self.tokens(len);
        if self.rng.percent(40) && !self.reference.declared.is_empty() {
            let which = self.rng.below(self.reference.declared.len());
            let declared = &self.reference.declared[which];
            tokens.splice(0..0, declared.iter().copied());
        }
        tokens
    }

    fn set_tenant(&mut self, tenant: usize) {
        let quota = PageQuota {
            weight: 1 + self.rng.below(3) as u32,
            guaranteed: if self.rng.percent(40) {
                self.rng.below(6) as u32
            } else {
                0
            },
            max: if self.rng.percent(40) {
                1 + self.rng.below(16) as u32
            } else {
                u32::MAX
            },
        };
        self.pool.set_tenant(TenantId(tenant as u32), quota);
        self.reference.quotas[tenant] = quota;
    }

    /// A new sequence takes what is cached of its prompt.
    fn start(&mut self, seen: &mut Seen) {
        if self.live.len() >= 6 {
            return;
        }
        let tokens = self.prompt();
        let tenant = TenantId(self.rng.below(self.tenants) as u32);
        let mut public = Vec::new();
        for prefix in 0..self.reference.declared.len() {
            if self.rng.percent(60) {
                public.push(PublicPrefix(prefix as u32));
            }
        }
        let reusable = &tokens[..tokens.len() - 1];
        let found: Vec<Page> = self.pool.find(tenant, &public, reusable).collect();
        assert_eq!(found, self.reference.find(tenant, &public, reusable));
        seen.found += found.len();
        for &page in &found {
            self.pin(page);
        }
        let parent = found.last().copied();
        let rest = &reusable[found.len() * PAGE_TOKENS..];
        let similar = self.pool.similar(tenant, &public, parent, rest);
        let expected = self.reference.similar(tenant, &public, parent, rest);
        assert_eq!(
            similar.map(|(_, tokens)| tokens),
            expected.map(|(_, tokens)| tokens)
        );
        let is_tie = |page| self.pool.tree.is_public(page);
        if let (Some((page, _)), Some((other, _))) = (similar, expected) {
            assert!(page == other || is_tie(page) && is_tie(other));
        }
        let source = similar
            .map(|(page, _)| page)
            .filter(|_| self.rng.percent(60));
        if let Some(page) = source {
            self.pin(page);
            seen.copied += 1;
        }
        self.started += 1;
        self.live.push(PoolSequence {
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

    fn any(&mut self, is_apt: impl Fn(&PoolSequence) -> bool) -> Option<usize> {
        let apt: Vec<usize> = (0..self.live.len())
            .filter(|&at| is_apt(&self.live[at]))
            .collect();
        (!apt.is_empty()).then(|| apt[self.rng.below(apt.len())])
    }

    /// Takes a page for a sequence.
    fn grow(&mut self, seen: &mut Seen) {
        let needs_pages = |live: &PoolSequence| live.table.len() * PAGE_TOKENS < live.tokens.len();
        if let Some(at) = self.any(needs_pages) {
            self.take(at, seen);
        }
    }

    fn take(&mut self, at: usize, seen: &mut Seen) -> Option<Page> {
        let live = &mut self.live[at];
        let victims = self.reference.victims(live.tenant);
        let evictions = self.pool.evictions;
        let page = self.pool.take(live.id, live.tenant);
        assert_eq!(page.is_some(), victims.is_some());
        if page.is_none() {
            seen.refused_with_pages_free += usize::from(!self.pool.free.is_empty());
        }
        let page = page?;
        let victims = victims?;
        assert_eq!(self.pool.evictions - evictions, victims.len() as u64);
        for (page, cause) in victims {
            self.reference.evict(page);
            match cause {
                EvictionCause::AtCap => seen.at_cap += 1,
                EvictionCause::OverShare => seen.over_share += 1,
                EvictionCause::NothingFree => seen.nothing_free += 1,
            }
        }
        self.reference.give(page, live.id, live.tenant);
        live.table.push(page);
        Some(page)
    }

    /// A sequence takes pages for as long as there are any.
    fn exhaust(&mut self, seen: &mut Seen) {
        let Some(at) = self.any(|_| true) else {
            return;
        };
        let available = self.pool.available(self.live[at].tenant);
        let taken = std::iter::from_fn(|| self.take(at, seen)).count();
        assert_eq!(taken, available);
        self.stop(at);
    }

    /// A sequence has computed its next whole page.
    fn publish(&mut self, seen: &mut Seen) {
        let has_whole_page = |live: &PoolSequence| {
            let whole = live.table.len().min(live.tokens.len() / PAGE_TOKENS);
            live.in_tree < whole
        };
        let Some(at) = self.any(has_whole_page) else {
            return;
        };
        let live = &mut self.live[at];
        let (own, parent) = (live.table[live.in_tree], live.parent());
        let (pages, _) = live.tokens.as_chunks::<PAGE_TOKENS>();
        let tokens = pages[live.in_tree];
        let edge = self.pool.edge(live.tenant, &live.public, parent, tokens);
        let owner = self
            .reference
            .owner(live.tenant, &live.public, parent, &tokens);
        assert_eq!(edge.owner, owner);
        let page = self.pool.publish(live.id, own, edge);
        if let Some(equal) = self.reference.get(owner, parent, &tokens) {
            assert_eq!(page, equal);
            self.reference.pin(equal);
            self.reference.release(own);
            seen.redirects += 1;
        } else {
            assert_eq!(page, own);
            self.reference.insert(own, owner, parent, &tokens);
            seen.published_public += usize::from(owner == Owner::Public);
        }
        live.table[live.in_tree] = page;
        live.in_tree += 1;
    }

    /// The copy of a sequence is made.
    fn copied(&mut self) {
        if let Some(at) = self.any(|live| live.source.is_some()) {
            self.unpin_source(at);
        }
    }

    fn unpin_source(&mut self, at: usize) {
        if let Some(page) = self.live[at].source.take() {
            self.pool.unpin(page);
            self.reference.release(page);
        }
    }

    /// A sequence is preempted or cancelled.
    fn release(&mut self) {
        if let Some(at) = self.any(|_| true) {
            self.stop(at);
        }
    }

    fn stop(&mut self, at: usize) {
        self.unpin_source(at);
        let live = self.live.remove(at);
        self.pool.release_table(&live.table);
        for &page in live.table.iter().rev() {
            self.reference.release(page);
        }
    }

    /// A sequence ends with some tokens of its first private page computed.
    fn end(&mut self, seen: &mut Seen) {
        let Some(at) = self.any(|live| live.in_tree < live.table.len()) else {
            return;
        };
        self.unpin_source(at);
        let live = &mut self.live[at];
        let known = live.tokens.get(live.in_tree * PAGE_TOKENS..);
        let known = known.filter(|known| !known.is_empty());
        if let Some(known) = known {
            let len = 1 + self.rng.below(known.len().min(PAGE_TOKENS - 1));
            let (tail, parent) = (&known[..len], live.parent());
            let page = live.table.remove(live.in_tree);
            self.pool
                .offer_tail(live.id, page, parent, live.tenant, tail);
            let children = self.reference.children(live.tenant, parent);
            let tokens = |page| &self.reference.cached(page).unwrap().tokens;
            let mut scanned = children.into_iter().take(8);
            if let Some(covering) = scanned.find(|&page| tokens(page).starts_with(tail)) {
                self.reference.release(page);
                self.reference.pin(covering);
                self.reference.release(covering);
                seen.tails_covered += 1;
            } else {
                let owner = Owner::Tenant(live.tenant);
                self.reference.insert(page, owner, parent, tail);
                self.reference.release(page);
                seen.tails_kept += 1;
            }
        }
        self.stop(at);
    }

    fn forget(&mut self) {
        if self.rng.percent(20) {
            self.pool.forget_unpinned();
            for page in self.reference.cold(None) {
                self.reference.evict(page);
            }
        }
    }

    fn check(&mut self, seen: &mut Seen) {
        let mut pins = vec![0; self.reference.states.len()];
        for live in &self.live {
            for page in live.table.iter().chain(&live.source) {
                pins[page.index()] += 1;
            }
        }
        for page in self.reference.pages() {
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
            self.check_tenant(TenantId(tenant as u32), seen);
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
            let found = self.pool.tree.get(edge);
            assert!(found == Some(page) || !is_whole && found != Some(page));
        }
    }

    fn check_tenant(&self, tenant: TenantId, seen: &mut Seen) {
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
            seen.many_children += usize::from(children.len() > 8);
            assert!(pool.tree.children(tenant, parent).eq(children));
        }
    }
}
