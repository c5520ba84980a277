//! Asserts what must hold between two calls of the scheduler.

use super::SchedulerState;
use crate::pages::PageUse;

impl SchedulerState {
    /// Asserts every invariant. This takes time in proportion to all pages and all tokens.
    pub(crate) fn check(&self) {
        let limits = &self.conditions.limits;
        let tables = &self.batch.tables;
        let mut uses = vec![PageUse::default(); limits.pages as usize];
        for sequence in self.sequences.iter() {
            sequence.add_uses(&mut uses, tables);
            sequence.check(&self.pool, tables);
        }
        self.pool.check(&uses);
        let (mut owned, mut pinned) = (Vec::new(), Vec::new());
        for sequence in self.sequences.iter() {
            sequence.add_slabs(&mut owned, &mut pinned);
        }
        let tree = self.pool.tree();
        self.pool.slabs.check(&owned, &pinned, |page, tokens| {
            tree.edge(page).is_some() && tree.tokens(page).len() >= tokens
        });
        self.sequences.check();
        self.queue.check();
        self.deadlines.check(&self.sequences);
        self.check_lists(limits.max_running as usize);
    }

    /// Every sequence waits or runs, in the order of arrival. S12: at most `max_running` run.
    fn check_lists(&self, max_running: usize) {
        let running = self.sequences.running();
        assert!(running.len() <= max_running, "S12");
        for waiting in self.queue.iter() {
            assert!(!self.sequences[waiting.slot].is_running);
        }
        let listed = self.queue.len() + running.len();
        assert_eq!(listed, self.sequences.len());

        let open = self.sequences.iter_running().map(|s| s.table().first);
        let free = self.batch.tables.free().iter().copied();
        let mut tables: Vec<usize> = open.chain(free).collect();
        tables.sort_unstable();
        tables.dedup();
        assert_eq!(
            tables.len(),
            max_running,
            "each table belongs to one sequence, or is free"
        );
    }
}
