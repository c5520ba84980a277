//! The pool of slabs: which slab is free, which belongs to a sequence, and which is a snapshot.
//!
//! A snapshot is the state after some tokens of a page in the prefix tree. A sequence that begins
//! with the tokens up to there can start from the snapshot.
//!
//! Invariant: every slab is free, owned by one sequence, or the snapshot of one page in the tree. A
//! page has at most one snapshot, which leaves with the page.
//!
//! Invariant: only snapshots have pins, one for each sequence that is about to read it. A pinned
//! snapshot stays, and so does its page, which that sequence pins too.
//!
//! Invariant: a tenant's `held` is the number of snapshots that the tenant's sequences made.
//!
//! If no slab is free, a snapshot gives way: first those that were kept on trial and that no
//! sequence has read, then those of the tenant that holds the most for its weight, the one that was
//! used longest ago first. So a tenant's flood of prompts displaces the tenant's own snapshots.

use std::cmp::Ordering;

use super::{StateLimits, StateSlab};
use crate::{Page, TenantId};

/// The holder of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlabHolder {
    Free,
    Sequence,
    Page(Page),
}

/// A state that a page of the prefix tree has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageState {
    pub(crate) slab: StateSlab,
    /// How many tokens of the page the state has seen; at least one.
    pub(crate) tokens: usize,
}

/// Why a state is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Worth {
    /// A later sequence may want it. It gives way to all others until a sequence reads it.
    OnTrial,
    /// Later sequences are likely to want it.
    Likely,
}

/// When a snapshot was made or last read, and for whom.
#[derive(Clone, Copy, Debug)]
struct SnapshotUse {
    tenant: TenantId,
    worth: Worth,
    used_at: u64,
}

/// The part of a tenant in the snapshots.
#[derive(Clone, Copy, Debug)]
struct TenantPart {
    weight: u32, // At least 1.
    held: u32,
}

impl Default for TenantPart {
    fn default() -> TenantPart {
        TenantPart { weight: 1, held: 0 }
    }
}

/// All slabs.
pub(crate) struct SlabPool {
    limits: Option<StateLimits>,
    holders: Vec<SlabHolder>, // By slab.
    pins: Vec<u32>,           // By slab.
    uses: Vec<SnapshotUse>,   // By slab, of snapshots.
    free: Vec<StateSlab>,
    states: Vec<Option<PageState>>, // By page.
    tenants: Vec<TenantPart>,
    clock: u64,
    evictions: u64,
}

/// How many slabs are of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlabCounts {
    /// Slabs that hold nothing.
    pub free: usize,
    /// Slabs of running sequences.
    pub owned: usize,
    /// Snapshots in the prefix tree.
    pub cached: usize,
    /// Snapshots that gave way to others, since the start.
    pub evictions: u64,
}

impl SlabPool {
    pub(crate) fn new(limits: Option<StateLimits>, pages: usize) -> SlabPool {
        let slabs = limits.map_or(0, |limits| limits.slabs);
        let pages = if slabs > 0 { pages } else { 0 };
        SlabPool {
            limits,
            holders: vec![SlabHolder::Free; slabs as usize],
            pins: vec![0; slabs as usize],
            uses: vec![
                SnapshotUse {
                    tenant: TenantId::default(),
                    worth: Worth::OnTrial,
                    used_at: 0,
                };
                slabs as usize
            ],
            free: (0..slabs).rev().map(StateSlab::new).collect(),
            states: vec![None; pages],
            tenants: vec![TenantPart::default()], // Tenant 0 exists from the start.
            clock: 0,
            evictions: 0,
        }
    }

    /// Sets the weight of a tenant, which is at least 1.
    pub(crate) fn set_weight(&mut self, tenant: TenantId, weight: u32) {
        let tenants = self.tenants.len().max(tenant.index() + 1);
        self.tenants.resize(tenants, TenantPart::default());
        self.tenants[tenant.index()].weight = weight;
    }

    /// Returns whether sequences have states.
    pub(crate) fn is_used(&self) -> bool {
        self.limits.is_some()
    }

    /// Returns the largest number of tokens of a row that changes its slab in place. Without states
    /// there is no limit.
    pub(crate) fn in_place_tokens(&self) -> usize {
        self.limits
            .map_or(usize::MAX, |limits| limits.in_place_tokens as usize)
    }

    /// Returns after how many tokens of a sequence a state is kept on trial.
    pub(crate) fn trial_interval(&self) -> usize {
        self.limits
            .map_or(usize::MAX, |limits| limits.trial_interval as usize)
    }

    pub(crate) fn free(&self) -> &[StateSlab] {
        &self.free
    }

    /// Returns how many slabs [`SlabPool::take`] can give now.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.evictable().count()
    }

    /// Returns how many slabs [`SlabPool::take`] can give now without a snapshot that is likely to
    /// be wanted.
    pub(crate) fn available_on_trial(&self) -> usize {
        let on_trial = self
            .evictable()
            .filter(|slab| self.uses[slab.index()].worth == Worth::OnTrial);
        self.free.len() + on_trial.count()
    }

    pub(crate) fn counts(&self) -> SlabCounts {
        let of = |kind: fn(&SlabHolder) -> bool| self.holders.iter().filter(|h| kind(h)).count();
        SlabCounts {
            free: self.free.len(),
            owned: of(|holder| *holder == SlabHolder::Sequence),
            cached: of(|holder| matches!(holder, SlabHolder::Page(_))),
            evictions: self.evictions,
        }
    }

    fn evictable(&self) -> impl Iterator<Item = StateSlab> + '_ {
        let slabs = (0..self.holders.len()).filter(|&slab| {
            matches!(self.holders[slab], SlabHolder::Page(_)) && self.pins[slab] == 0
        });
        slabs.map(|slab| StateSlab::new(slab as u32))
    }

    /// Compares two snapshots. The less wanted one gives way first.
    fn compare(&self, a: StateSlab, b: StateSlab) -> Ordering {
        let [a, b] = [a, b].map(|slab| self.uses[slab.index()]);
        let is_likely = |snapshot: SnapshotUse| snapshot.worth == Worth::Likely;
        let part = |snapshot: SnapshotUse| self.tenants[snapshot.tenant.index()];
        let (part_a, part_b) = (part(a), part(b));
        // The tenant that holds more for its weight: held_a / weight_a > held_b / weight_b.
        let held_a = u64::from(part_a.held) * u64::from(part_b.weight);
        let held_b = u64::from(part_b.held) * u64::from(part_a.weight);
        is_likely(a)
            .cmp(&is_likely(b))
            .then(held_b.cmp(&held_a))
            .then(a.used_at.cmp(&b.used_at))
    }

    /// Gives a slab to a sequence: a free one, or the least wanted snapshot. Returns `None` if
    /// there is neither.
    pub(crate) fn take(&mut self) -> Option<StateSlab> {
        if self.free.is_empty() {
            let least = self.evictable().min_by(|a, b| self.compare(*a, *b));
            let SlabHolder::Page(page) = self.holders[least?.index()] else {
                panic!("a snapshot belongs to a page");
            };
            self.forget(page);
            self.evictions += 1;
        }
        let slab = self.free.pop()?;
        self.holders[slab.index()] = SlabHolder::Sequence;
        Some(slab)
    }

    /// Takes back a slab of a sequence.
    pub(crate) fn release(&mut self, slab: StateSlab) {
        assert_eq!(self.holders[slab.index()], SlabHolder::Sequence, "{slab:?}");
        self.set_free(slab);
    }

    fn set_free(&mut self, slab: StateSlab) {
        assert_eq!(self.pins[slab.index()], 0, "{slab:?} is about to be read");
        self.holders[slab.index()] = SlabHolder::Free;
        self.free.push(slab);
    }

    /// Makes the slab of a tenant's sequence the snapshot of a page in the tree. If the page has
    /// one already, the one that has seen more tokens stays.
    pub(crate) fn attach(&mut self, page: Page, state: PageState, tenant: TenantId, worth: Worth) {
        let slab = state.slab;
        assert_eq!(self.holders[slab.index()], SlabHolder::Sequence, "{slab:?}");
        if let Some(old) = self.states[page.index()] {
            if old.tokens >= state.tokens || self.pins[old.slab.index()] > 0 {
                if worth == Worth::Likely {
                    self.touch(old.slab);
                }
                return self.set_free(slab);
            }
            self.forget(page);
        }
        self.holders[slab.index()] = SlabHolder::Page(page);
        self.states[page.index()] = Some(state);
        self.tenants[tenant.index()].held += 1;
        self.touch(slab);
        let snapshot = &mut self.uses[slab.index()];
        (snapshot.tenant, snapshot.worth) = (tenant, worth);
    }

    /// Returns the snapshot of a page.
    pub(crate) fn state_of(&self, page: Page) -> Option<PageState> {
        self.states.get(page.index()).copied().flatten()
    }

    /// Frees the snapshot of a page that leaves the tree, if it has one.
    pub(crate) fn forget(&mut self, page: Page) {
        let state = self.states.get_mut(page.index()).and_then(Option::take);
        if let Some(state) = state {
            let tenant = self.uses[state.slab.index()].tenant;
            self.tenants[tenant.index()].held -= 1;
            self.set_free(state.slab);
        }
    }

    /// Pins a snapshot for a sequence that is about to read it.
    pub(crate) fn pin(&mut self, slab: StateSlab) {
        self.pins[slab.index()] += 1;
        self.touch(slab);
    }

    pub(crate) fn unpin(&mut self, slab: StateSlab) {
        let pins = &mut self.pins[slab.index()];
        *pins = pins.checked_sub(1).expect("a pinned snapshot");
    }

    fn touch(&mut self, slab: StateSlab) {
        self.clock += 1;
        let snapshot = &mut self.uses[slab.index()];
        (snapshot.worth, snapshot.used_at) = (Worth::Likely, self.clock);
    }

    /// Asserts the invariants. `owned` and `pinned` are the slabs of all sequences. `is_in_tree`
    /// says whether a page is in the tree with at least some number of tokens.
    pub(crate) fn check(
        &self,
        owned: &[StateSlab],
        pinned: &[StateSlab],
        is_in_tree: impl Fn(Page, usize) -> bool,
    ) {
        let mut holders = vec![SlabHolder::Free; self.holders.len()];
        for slab in owned {
            let before = std::mem::replace(&mut holders[slab.index()], SlabHolder::Sequence);
            assert_eq!(before, SlabHolder::Free, "M10: {slab:?} has two owners");
        }
        for (page, state) in (0..).map(Page::new).zip(&self.states) {
            if let Some(PageState { slab, tokens }) = *state {
                let holder = SlabHolder::Page(page);
                let before = std::mem::replace(&mut holders[slab.index()], holder);
                assert_eq!(before, SlabHolder::Free, "M10: {slab:?} has two owners");
                assert!(is_in_tree(page, tokens), "M10: {page:?} is not in the tree");
            }
        }
        assert_eq!(holders, self.holders, "M10");
        let is_free = |slab: &StateSlab| holders[slab.index()] == SlabHolder::Free;
        let free = holders.iter().filter(|holder| **holder == SlabHolder::Free);
        assert!(self.free.iter().all(is_free), "M10");
        assert_eq!(free.count(), self.free.len(), "M10");
        for (tenant, part) in (0..).map(TenantId).zip(&self.tenants) {
            let states = self.states.iter().flatten();
            let own = states.filter(|state| self.uses[state.slab.index()].tenant == tenant);
            assert_eq!(own.count(), part.held as usize, "M10: {tenant:?}");
        }
        for (index, pins) in self.pins.iter().enumerate() {
            let readers = pinned.iter().filter(|slab| slab.index() == index).count();
            assert_eq!(readers, *pins as usize, "M10: pins of slab {index}");
        }
    }
}
