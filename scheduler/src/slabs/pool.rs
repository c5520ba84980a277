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

use super::{StateLimits, StateSlab};
use crate::Page;

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

/// All slabs.
pub(crate) struct SlabPool {
    limits: Option<StateLimits>,
    holders: Vec<SlabHolder>, // By slab.
    pins: Vec<u32>,           // By slab.
    used_at: Vec<u64>,        // By slab: when it was last made or pinned.
    free: Vec<StateSlab>,
    states: Vec<Option<PageState>>, // By page.
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
            used_at: vec![0; slabs as usize],
            free: (0..slabs).rev().map(StateSlab::new).collect(),
            states: vec![None; pages],
            clock: 0,
            evictions: 0,
        }
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

    pub(crate) fn free(&self) -> &[StateSlab] {
        &self.free
    }

    /// Returns how many slabs [`SlabPool::take`] can give now.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.evictable().count()
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

    /// Gives a slab to a sequence: a free one, or the snapshot that was used longest ago. Returns
    /// `None` if there is neither.
    pub(crate) fn take(&mut self) -> Option<StateSlab> {
        if self.free.is_empty() {
            let oldest = self
                .evictable()
                .min_by_key(|slab| self.used_at[slab.index()]);
            let SlabHolder::Page(page) = self.holders[oldest?.index()] else {
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

    /// Makes a sequence's slab the snapshot of a page in the tree. If the page has one already, the
    /// one that has seen more tokens stays.
    pub(crate) fn attach(&mut self, page: Page, state: PageState) {
        let slab = state.slab;
        assert_eq!(self.holders[slab.index()], SlabHolder::Sequence, "{slab:?}");
        if let Some(old) = self.states[page.index()] {
            if old.tokens >= state.tokens || self.pins[old.slab.index()] > 0 {
                self.touch(old.slab);
                return self.set_free(slab);
            }
            self.forget(page);
        }
        self.holders[slab.index()] = SlabHolder::Page(page);
        self.states[page.index()] = Some(state);
        self.touch(slab);
    }

    /// Returns the snapshot of a page.
    pub(crate) fn state_of(&self, page: Page) -> Option<PageState> {
        self.states.get(page.index()).copied().flatten()
    }

    /// Frees the snapshot of a page that leaves the tree, if it has one.
    pub(crate) fn forget(&mut self, page: Page) {
        let state = self.states.get_mut(page.index()).and_then(Option::take);
        if let Some(state) = state {
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
        self.used_at[slab.index()] = self.clock;
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
        for (index, pins) in self.pins.iter().enumerate() {
            let readers = pinned.iter().filter(|slab| slab.index() == index).count();
            assert_eq!(readers, *pins as usize, "M10: pins of slab {index}");
        }
    }
}
