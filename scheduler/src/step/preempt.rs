//! Memory for those that run: a page for whoever is earlier, from whoever is later.
//!
//! Invariant: the leader, which is the earliest arrival in the highest band that runs, gets every page it asks for; so it
//! ends, and so in turn does everybody. The order among those that run is fixed when they are admitted.

use std::cmp::Reverse;

use crate::sequence::pages_for;
use crate::{Event, PAGE_TOKENS, Scheduler};

/// Times that a sequence may lose its pages while others could give theirs.
pub(crate) const MOST_PREEMPTIONS: u32 = 3;

impl Scheduler {
    /// Takes the pages for the next `tokens` tokens of a running sequence, and returns for how many there are pages now.
    /// While there are none at all, later sequences lose theirs; whoever comes last waits.
    pub(crate) fn secure_pages(&mut self, slot: usize, tokens: usize) -> usize {
        let sequence = &self.sequences[slot];
        let (start, tenant) = (sequence.start(), sequence.tenant);
        let needed = pages_for(start + tokens);
        if sequence.table.len < needed && self.pool.available(tenant) == 0 {
            self.preempt_for(slot);
        }
        let sequence = &mut self.sequences[slot];
        while sequence.table.len < needed {
            let Some(page) = self.pool.take(sequence.id, tenant) else {
                break;
            };
            self.batch.tables.push(&mut sequence.table, page);
        }
        tokens.min((sequence.table.len * PAGE_TOKENS).saturating_sub(start))
    }

    /// Preempts sequences that come after the one in `slot` until a page is available to it, or nobody can give one.
    fn preempt_for(&mut self, slot: usize) {
        while self.pool.available(self.sequences[slot].tenant) == 0 {
            let Some(victim) = self.victim_of(slot) else {
                return;
            };
            #[cfg(debug_assertions)]
            self.check_victim(slot, victim);
            self.preempt(victim);
        }
    }

    /// Who loses its pages: somebody whose end frees one, in the lowest band, of the tenant served most, with the least to
    /// compute again; nobody more than three times while there are others. A tenant at its own cap takes from itself.
    ///
    /// To the first of all, or of a tenant at its cap, the last: pages that several share come free with the last of them.
    fn victim_of(&self, slot: usize) -> Option<usize> {
        let tenant = self.sequences[slot].tenant;
        let at_cap = self.pool.in_use(tenant) >= self.pool.cap(tenant);
        let is_mine = |other: &usize| !at_cap || self.sequences[*other].tenant == tenant;
        let place = self.place(slot);
        let mut later = self.running[place + 1..].iter().copied().filter(is_mine);
        let giving = later
            .clone()
            .filter(|&other| self.exclusive_pages(other) > 0);
        let best = giving.min_by_key(|&other| {
            let sequence = &self.sequences[other];
            let served = self.queue.tenants[sequence.tenant].virtual_time;
            (
                sequence.preempted >= MOST_PREEMPTIONS,
                Reverse(sequence.band),
                Reverse(served),
                self.exclusive_pages(other),
                Reverse(sequence.arrival),
            )
        });
        let is_first = !self.running[..place].iter().any(is_mine);
        best.or_else(|| later.next_back().filter(|_| is_first))
    }

    /// Pages of a sequence that no other page table contains: what its end would free, and what it would compute again.
    pub(crate) fn exclusive_pages(&self, slot: usize) -> usize {
        let pages = self.batch.tables.get(&self.sequences[slot].table);
        pages
            .iter()
            .filter(|&&page| self.pool.is_exclusive(page))
            .count()
    }

    fn preempt(&mut self, slot: usize) {
        self.drop_share(slot);
        let sequence = &mut self.sequences[slot];
        sequence.preempted += 1;
        let (id, tenant) = (sequence.id, sequence.tenant);
        let waiting = sequence.as_waiting();
        self.queue.insert(tenant, waiting); // First, so that its tenant stays active.
        self.stop_running(slot);
        self.preemptions += 1;
        self.events.push(Event::Preempted { id });
    }
}
