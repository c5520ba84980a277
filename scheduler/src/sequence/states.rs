//! The states of a sequence: from which snapshot it starts, which slabs its rows read and write,
//! and which states stay for later sequences.
//!
//! Invariant: a step changes no owner; only its commit does. So a step may be dropped or computed
//! again.

use super::Sequence;
use crate::pages::{PagePool, PageTables};
use crate::slabs::{PageState, Worth};
use crate::{KeptState, PAGE_TOKENS, Page, RowStates, StateSlab};

/// The slabs of a sequence.
#[derive(Debug, Default)]
pub(crate) struct SequenceStates {
    /// The state at the start of the next row. `None` before the first commit.
    own: Option<StateSlab>,
    /// The snapshot that the first row reads. It is pinned.
    snapshot: Option<StateSlab>,
    planned: Option<PlannedStates>,
    /// A position, after whole pages, whose state other sequences want.
    wanted: Option<usize>,
}

/// The slabs that the planned row takes.
#[derive(Clone, Copy, Debug)]
struct PlannedStates {
    to: StateSlab,
    keep: [Option<(KeptState, Worth)>; 2],
    /// Why the state at the row's start stays as a snapshot, if it does.
    keeps_start: Option<Worth>,
}

impl PlannedStates {
    fn kept(&self) -> impl Iterator<Item = (KeptState, Worth)> {
        self.keep.into_iter().flatten()
    }
}

/// The deepest state that the cache has for a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CachedState {
    /// The whole pages before it.
    pub(super) pages: usize,
    pub(super) slab: StateSlab,
    /// The page to copy, and how many of its tokens the state has seen.
    pub(super) copy: Option<(Page, usize)>,
}

impl Sequence {
    /// Returns the deepest state on the path of the sequence's tokens. A state inside a page needs
    /// a copy of that page.
    pub(super) fn cached_state(&self, pool: &PagePool, may_copy: bool) -> Option<CachedState> {
        let tokens = self.reusable_tokens();
        let (mut best, mut pages, mut parent) = (None, 0, None);
        let found = |pages: usize, page: Page, state: PageState| {
            let is_whole = state.tokens == PAGE_TOKENS;
            (is_whole || may_copy).then(|| CachedState {
                pages: pages + usize::from(is_whole),
                slab: state.slab,
                copy: (!is_whole).then_some((page, state.tokens)),
            })
        };
        for page in self.pages_in_tree(tokens, pool) {
            let state = pool.slabs.state_of(page);
            best = state.and_then(|state| found(pages, page, state)).or(best);
            (pages, parent) = (pages + 1, Some(page));
        }
        // As for copies of pages without states: a page of the tenant's own, beside a public one,
        // may hold all of them.
        let wanted = &tokens[pages * PAGE_TOKENS..];
        let wanted = &wanted[..wanted.len().min(PAGE_TOKENS - 1)];
        let inside = pool.state_after(self.tenant, &self.kv.public, parent, wanted);
        inside
            .and_then(|(page, state)| found(pages, page, state))
            .or(best)
    }

    /// Takes the cached state: the snapshot is pinned until the first row is committed. `depth` is
    /// the number of cached pages on the sequence's path.
    pub(super) fn begin_states(
        &mut self,
        pool: &mut PagePool,
        state: Option<CachedState>,
        depth: usize,
    ) {
        self.states = SequenceStates::default();
        if let Some(state) = state {
            pool.slabs.pin(state.slab);
            self.states.snapshot = Some(state.slab);
        }
        // The pages of two prompts diverge here, and no state does: the next one should find one.
        let reused = state.map_or(0, |state| state.pages);
        self.states.wanted = (depth > reused).then_some(depth * PAGE_TOKENS);
    }

    /// Gives back all slabs, except a state that `offer_state` has given away.
    pub(super) fn end_states(&mut self, pool: &mut PagePool) {
        self.drop_planned_states(pool);
        let states = std::mem::take(&mut self.states);
        states
            .own
            .into_iter()
            .for_each(|slab| pool.slabs.release(slab));
        states
            .snapshot
            .into_iter()
            .for_each(|slab| pool.slabs.unpin(slab));
    }

    /// Gives the state at the start of the next row to the page that ends there, if that page is
    /// in the tree.
    pub(super) fn offer_state(&mut self, page: Option<Page>, pool: &mut PagePool) {
        let position = self.kv.computed;
        let Some((page, slab)) = page.zip(self.states.own.take()) else {
            return;
        };
        let tokens = (position - 1) % PAGE_TOKENS + 1;
        let state = PageState { slab, tokens };
        pool.slabs.attach(page, state, self.tenant, Worth::Likely);
    }

    /// Returns whether the next row of `tokens` tokens needs a slab that it does not have.
    pub(crate) fn lacks_slab_for(&self, tokens: usize, pool: &PagePool) -> bool {
        let is_in_place = || self.states.own.is_some() && tokens <= pool.slabs.in_place_tokens();
        pool.slabs.is_used() && (!is_in_place() || self.worth_of(self.start(), pool).is_some())
    }

    /// Takes the slabs of the next row. `spare` is how many slabs must stay for other sequences.
    /// Returns whether the row can be computed.
    pub(crate) fn take_slabs(&mut self, tokens: usize, pool: &mut PagePool, spare: usize) -> bool {
        if !pool.slabs.is_used() {
            return true;
        }
        self.drop_planned_states(pool);
        if !self.lacks_slab_for(tokens, pool) {
            return true;
        }
        let start = self.start();
        let is_in_place = self.states.own.is_some() && tokens <= pool.slabs.in_place_tokens();
        if is_in_place && !self.may_spend_slab(start, pool, spare) {
            return true; // The state at the start is not worth the last slabs.
        }
        let keeps_start = self.states.own.and_then(|_| self.worth_of(start, pool));
        let Some(to) = pool.slabs.take() else {
            return is_in_place;
        };
        let mut keep = [None; 2];
        let mut places = keep.iter_mut();
        for position in self.positions_to_keep(start + 1..start + tokens, pool) {
            if !self.may_spend_slab(position, pool, spare) {
                continue;
            }
            let Some(place) = places.next() else {
                break;
            };
            let position_of = |slab| KeptState {
                position: position as u32,
                slab,
            };
            let kept = pool.slabs.take().map(position_of);
            *place = kept.zip(self.worth_of(position, pool));
        }
        self.states.planned = Some(PlannedStates {
            to,
            keep,
            keeps_start,
        });
        true
    }

    /// Returns the positions in a range whose states are worth a slab, those that are likely to be
    /// wanted first. Of the positions on trial, only the last one is in the list.
    fn positions_to_keep(
        &self,
        range: std::ops::Range<usize>,
        pool: &PagePool,
    ) -> impl Iterator<Item = usize> + use<> {
        let border = self.last_border();
        let wanted = self.states.wanted.filter(|_| self.states.wanted != border);
        let interval = pool.slabs.trial_interval();
        let last = range.end.saturating_sub(1) / interval * interval;
        let on_trial = (self.worth_of(last, pool) == Some(Worth::OnTrial)).then_some(last);
        let positions = [border, wanted, on_trial].into_iter().flatten();
        positions.filter(move |position| range.contains(position))
    }

    /// Returns whether the state at a position is worth a slab that other sequences may want.
    fn may_spend_slab(&self, position: usize, pool: &PagePool, spare: usize) -> bool {
        let available = match self.worth_of(position, pool) {
            Some(Worth::Likely) => pool.slabs.available(),
            Some(Worth::OnTrial) => pool.slabs.available_on_trial(),
            None => 0,
        };
        available > spare
    }

    /// Returns why the state at a position is kept, `None` if it is not.
    fn worth_of(&self, position: usize, pool: &PagePool) -> Option<Worth> {
        if self.is_wanted(position) {
            return Some(Worth::Likely);
        }
        let is_on_trial = position.is_multiple_of(pool.slabs.trial_interval());
        (is_on_trial && position > 0).then_some(Worth::OnTrial)
    }

    /// Returns the position after the last whole page of a prompt that leaves a token to compute.
    /// Later prompts often share it.
    fn last_border(&self) -> Option<usize> {
        let border = (self.prompt_len - 1) / PAGE_TOKENS * PAGE_TOKENS;
        (border > 0).then_some(border)
    }

    fn is_wanted(&self, position: usize) -> bool {
        position > 0 && [self.last_border(), self.states.wanted].contains(&Some(position))
    }

    /// Asks for the state at a position that the sequence may keep, after whole pages.
    pub(crate) fn ask_for_state(&mut self, position: usize) {
        if self.last_border() != Some(position) {
            self.states.wanted = Some(position);
        }
    }

    /// Returns whether the sequence will pass a position and keep the state there, or can be asked
    /// to.
    pub(crate) fn may_keep(&self, position: usize) -> bool {
        let is_free = self
            .states
            .wanted
            .is_none_or(|wanted| wanted <= self.start());
        self.start() < position && (is_free || self.is_wanted(position))
    }

    /// Returns what the planned row reads and writes.
    pub(crate) fn row_states(&self) -> Option<RowStates> {
        let SequenceStates {
            own,
            snapshot,
            planned,
            ..
        } = &self.states;
        let from = own.or(*snapshot);
        let to = planned.map(|planned| planned.to).or(from)?;
        Some(RowStates {
            from,
            to,
            keep: planned.map_or([None; 2], |planned| {
                planned.keep.map(|kept| kept.map(|(kept, _)| kept))
            }),
        })
    }

    /// Gives back the slabs of a planned row that is not committed.
    pub(crate) fn drop_planned_states(&mut self, pool: &mut PagePool) {
        if let Some(planned) = self.states.planned.take() {
            let kept = planned.kept().map(|(kept, _)| kept.slab);
            std::iter::once(planned.to)
                .chain(kept)
                .for_each(|slab| pool.slabs.release(slab));
        }
    }

    /// Commits the slabs of a computed row that began at `start`. Its whole pages are in the tree.
    pub(crate) fn commit_states(&mut self, start: usize, pool: &mut PagePool, tables: &PageTables) {
        if let Some(planned) = self.states.planned {
            self.states.planned = None;
            self.commit_planned(&planned, start, pool, tables);
        }
    }

    fn commit_planned(
        &mut self,
        planned: &PlannedStates,
        start: usize,
        pool: &mut PagePool,
        tables: &PageTables,
    ) {
        let (pages, tenant) = (tables.get(&self.kv.table), self.tenant);
        let mut attach = |position: usize, slab, worth| {
            let state = PageState {
                slab,
                tokens: PAGE_TOKENS,
            };
            let page = pages[position / PAGE_TOKENS - 1];
            pool.slabs.attach(page, state, tenant, worth);
        };
        for (kept, worth) in planned.kept() {
            attach(kept.position as usize, kept.slab, worth);
        }
        if let Some(old) = self.states.own.replace(planned.to) {
            match planned.keeps_start {
                Some(worth) => attach(start, old, worth),
                None => pool.slabs.release(old),
            }
        }
        if let Some(snapshot) = self.states.snapshot.take() {
            pool.slabs.unpin(snapshot);
        }
    }

    /// Adds the slabs that the sequence owns, and the snapshot that it has pinned.
    pub(crate) fn add_slabs(&self, owned: &mut Vec<StateSlab>, pinned: &mut Vec<StateSlab>) {
        let states = &self.states;
        owned.extend(states.own);
        if let Some(planned) = states.planned {
            owned.push(planned.to);
            owned.extend(planned.kept().map(|(kept, _)| kept.slab));
        }
        pinned.extend(states.snapshot);
    }
}
