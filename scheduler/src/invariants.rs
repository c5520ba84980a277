//! Everything that must hold between two calls, asserted in one place.

#[cfg(debug_assertions)]
use crate::admission::LONG_PATIENCE;
use crate::pages::{Holder, Owner};
use crate::sequence::{Sequence, State, pages_for};
#[cfg(debug_assertions)]
use crate::step::MOST_PREEMPTIONS;
use crate::{PAGE_TOKENS, Page, Scheduler};

impl Scheduler {
    /// Asserts every invariant. Takes time in proportion to all pages and all tokens: for tests.
    ///
    /// # Panics
    /// If one does not hold, which is a bug in this crate.
    pub fn check(&self) {
        self.check_partition();
        self.check_pins();
        self.check_cold_list();
        self.check_holdings();
        self.check_tree();
        self.check_lists();
        assert!(
            self.deadlines.len() <= self.most_deadlines(),
            "the dead are forgotten"
        );
        for (slot, sequence) in &self.sequences {
            assert_eq!(slot, sequence.id.slot());
            self.check_sequence(sequence);
        }
    }

    /// S6: whoever gives its pages to the sequence in `slot` comes after it, so the leader never does; and one that has lost
    /// them three times does so again only when nobody else could give a page who has lost them less often.
    #[cfg(debug_assertions)]
    pub(crate) fn check_victim(&self, slot: usize, victim: usize) {
        let rank = |slot: usize| (self.sequences[slot].band, self.sequences[slot].arrival);
        let id = self.sequences[victim].id;
        assert!(rank(victim) > rank(slot), "S6: {id:?} is earlier");
        assert_ne!(self.running[0], victim, "S6: {id:?} leads");
        if self.sequences[victim].preempted < MOST_PREEMPTIONS {
            return;
        }
        let tenant = self.sequences[slot].tenant;
        let takes_from_all = self.pool.room(tenant) > 0;
        let could_give = |&other: &usize| {
            let sequence = &self.sequences[other];
            rank(other) > rank(slot)
                && (takes_from_all || sequence.tenant == tenant)
                && sequence.preempted < MOST_PREEMPTIONS
                && self.exclusive_pages(other) > 0
        };
        let spared = self.running.iter().find(|other| could_give(other));
        assert_eq!(spared, None, "S6: {id:?} again, and not this one");
    }

    /// S11: nobody who waits is passed more than `LONG_PATIENCE` times, but while its own tenant has all that it may have.
    #[cfg(debug_assertions)]
    pub(crate) fn check_patience(&mut self, slot: usize) {
        self.find_prefix(slot);
        let sequence = &self.sequences[slot];
        let has_own_room = self.needed_pages(slot) <= self.pool.room(sequence.tenant);
        assert!(
            sequence.passed <= LONG_PATIENCE || !has_own_room,
            "S11: {:?} is passed for ever",
            sequence.id
        );
    }

    fn pages(&self) -> impl Iterator<Item = Page> {
        (0..self.limits.pages).map(Page::new)
    }

    /// M1: every page is free, private to one living sequence, or in the tree.
    fn check_partition(&self) {
        let pool = &self.pool;
        let mut on_free_list = vec![false; self.limits.pages as usize];
        for page in &pool.free {
            let seen = std::mem::replace(&mut on_free_list[page.index()], true);
            assert!(!seen, "M1: {page:?} is free twice");
        }
        for page in self.pages() {
            let holder = pool.holders[page.index()];
            let is_free = holder == Holder::Free;
            assert_eq!(on_free_list[page.index()], is_free, "M1: {page:?}");
            let is_in_tree = holder == Holder::Tree;
            assert_eq!(pool.tree.edge(page).is_some(), is_in_tree, "M1: {page:?}");
            if let Holder::Private(id) = holder {
                let table = &self.sequence(id).table;
                let own = &self.batch.tables.get(table)[table.in_tree..];
                assert!(own.contains(&page), "M1: {page:?}");
            }
        }
    }

    /// M2: a page's pins are the page tables that contain it, the copies to be made from it, and one more if it is public.
    /// M3: a private page is in one table.
    fn check_pins(&self) {
        let mut users = vec![0; self.limits.pages as usize];
        for (_, sequence) in &self.sequences {
            let copied = sequence.copy.iter().map(|copy| &copy.from);
            for page in self.batch.tables.get(&sequence.table).iter().chain(copied) {
                users[page.index()] += 1;
            }
        }
        for page in self.pages() {
            if let Holder::Private(_) = self.pool.holders[page.index()] {
                assert_eq!(users[page.index()], 1, "M3: {page:?} is private");
            }
            users[page.index()] += u32::from(self.pool.tree.is_public(page));
        }
        assert_eq!(users, self.pool.pins, "M2: page tables and pins");
    }

    /// Each tenant's pages are counted, and no more than it may hold but for what it held when its cap was lowered.
    fn check_holdings(&self) {
        for (tenant, _) in self.queue.tenants.iter() {
            let is_mine = |page: &Page| self.pool.holdings.payer(*page) == Some(tenant);
            let held = self.pages().filter(is_mine).count();
            assert_eq!(held, self.pool.held(tenant) as usize, "{tenant:?}");
            let cold = self.pool.cold.iter_of(tenant);
            assert!(cold.clone().all(|page| is_mine(&page)), "{tenant:?}");
            let all = self.pool.cold.iter().filter(is_mine);
            assert!(all.eq(cold), "{tenant:?} has its pages in the order of all");
        }
    }

    /// M4: the cold list is the unpinned tree pages, each once, children before their parents.
    fn check_cold_list(&self) {
        let pool = &self.pool;
        let mut seen = vec![false; self.limits.pages as usize];
        for page in pool.cold.iter() {
            assert_eq!(
                pool.holders[page.index()],
                Holder::Tree,
                "M4: {page:?} is cold"
            );
            assert!(!pool.is_pinned(page), "M4: {page:?} is cold and pinned");
            assert!(!seen[page.index()], "M4: {page:?} is cold twice");
            seen[page.index()] = true;
            if let Some(parent) = pool.tree.edge(page).and_then(|edge| edge.parent) {
                assert!(
                    !seen[parent.index()],
                    "M4: {parent:?} is colder than its child"
                );
            }
        }
        for page in self.pages() {
            let is_cold = pool.holders[page.index()] == Holder::Tree && !pool.is_pinned(page);
            assert_eq!(seen[page.index()], is_cold, "M4: {page:?} on the cold list");
        }
        let listed = seen.iter().filter(|&&seen| seen).count();
        assert_eq!(listed, pool.cold.len(), "M4");
    }

    /// M5: the parent of a tree page is a whole page of the same owner or public, and pinned if its child is.
    fn check_tree(&self) {
        let pool = &self.pool;
        let mut count = 0;
        for page in self.pages() {
            let Some(edge) = pool.tree.edge(page) else {
                continue;
            };
            count += 1;
            if pool.tree.tokens(page).len() == PAGE_TOKENS {
                assert_eq!(pool.tree.get(edge), Some(page), "{page:?} is found");
            }
            if let Some(parent) = edge.parent {
                let above = pool.tree.edge(parent);
                let above = above.unwrap_or_else(|| panic!("M5: {parent:?} has a child"));
                let is_open = above.owner == edge.owner || above.owner == Owner::Public;
                assert!(is_open, "M5: {page:?} is below another tenant's");
                let whole = pool.tree.tokens(parent).len();
                assert_eq!(whole, PAGE_TOKENS, "M5: {parent:?}");
                assert!(
                    pool.is_pinned(parent) || !pool.is_pinned(page),
                    "M5: {page:?}"
                );
            }
        }
        assert_eq!(count, pool.tree.len());
    }

    /// Every sequence waits or runs, in the order of arrival, and S12: no more run than may.
    fn check_lists(&self) {
        self.queue.check();
        let all = self
            .queue
            .iter()
            .map(|waiting| waiting.slot)
            .chain(self.running.iter().copied());
        assert_eq!(all.count(), self.sequences.len());
        assert!(
            self.running.len() <= self.limits.max_running as usize,
            "S12"
        );
        let open = self.running.iter();
        let open = open.map(|&slot| self.sequences[slot].table.first);
        let mut tables: Vec<usize> = open
            .chain(self.batch.tables.free().iter().copied())
            .collect();
        tables.sort_unstable();
        tables.dedup();
        let most = self.limits.max_running as usize;
        assert_eq!(tables.len(), most, "each table is one sequence's, or free");
        let rank = |&slot: &usize| (self.sequences[slot].band, self.sequences[slot].arrival);
        assert!(self.running.iter().map(rank).is_sorted_by(|a, b| a < b));
        for waiting in self.queue.iter() {
            assert_eq!(self.sequences[waiting.slot].state, State::Queued);
        }
        for &slot in &self.running {
            assert_eq!(self.sequences[slot].state, State::Running);
        }
    }

    /// M9: the page table covers what is computed, and no more than what is known (a step's rows are checked against it);
    /// M6: its tree pages are found by exactly the sequence's tokens, all of them computed.
    fn check_sequence(&self, sequence: &Sequence) {
        let (id, table) = (sequence.id, &sequence.table);
        assert!(sequence.computed < sequence.tokens.len(), "{id:?} has work");
        assert!(
            sequence.output_len() < sequence.output_rules.max_new_tokens,
            "{id:?}"
        );
        assert!(table.len >= pages_for(sequence.computed), "M9: {id:?}");
        assert!(table.len <= pages_for(sequence.tokens.len()), "M9: {id:?}");
        assert_eq!(table.in_tree, sequence.computed / PAGE_TOKENS, "M6: {id:?}");
        if let Some(copy) = sequence.copy {
            let wanted = &sequence.reusable_tokens()[sequence.computed..][..copy.tokens];
            assert!(
                self.pool.tree.tokens(copy.from).starts_with(wanted),
                "{id:?}"
            );
            assert_eq!(sequence.computed % PAGE_TOKENS, 0, "{id:?}");
        }
        if sequence.state == State::Queued {
            assert_eq!(table.len, 0, "{id:?} waits and holds pages");
        }
        let known = &sequence.tokens[..table.in_tree * PAGE_TOKENS];
        let found = self.pool.find(sequence.tenant, &sequence.public, known);
        let (in_tree, private) = self.batch.tables.get(table).split_at(table.in_tree);
        assert!(found.eq(in_tree.iter().copied()), "M6: {id:?}");
        for page in private {
            assert_eq!(self.pool.holders[page.index()], Holder::Private(id));
        }
    }
}
