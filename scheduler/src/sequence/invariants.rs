//! Asserts the invariants of one sequence, M6 and M9. Only tests call this.

use super::{Sequence, pages_for};
use crate::PAGE_TOKENS;
use crate::pages::{PagePool, PageTables, PageUse};

impl Sequence {
    /// Adds this sequence to the uses of its pages.
    pub(crate) fn add_uses(&self, uses: &mut [PageUse], tables: &PageTables) {
        for (index, page) in tables.get(&self.kv.table).iter().enumerate() {
            let page = &mut uses[page.index()];
            page.users += 1;
            if index >= self.kv.table.published {
                page.writer = Some(self.id);
            }
        }
        if let Some(copy) = self.kv.copy {
            uses[copy.from.index()].users += 1;
        }
    }

    /// M9: the page table covers what is computed, and no more than what is known. A step's rows
    /// are checked against it. M6: the sequence's tokens, all of them computed, find exactly its
    /// tree pages.
    pub(crate) fn check(&self, pool: &PagePool, tables: &PageTables) {
        let (id, kv) = (self.id, &self.kv);
        assert!(kv.computed < self.tokens.len(), "{id:?} has work");
        assert!(self.output_left() > 0, "{id:?}");
        assert!(kv.table.len >= pages_for(kv.computed), "M9: {id:?}");
        let end = self.with_whole_blocks(self.tokens.len());
        assert!(kv.table.len <= pages_for(end), "M9: {id:?}");
        let published = kv.table.published;
        assert_eq!(published, kv.computed / PAGE_TOKENS, "M6: {id:?}");
        if let Some(copy) = kv.copy {
            let wanted = &self.reusable_tokens()[kv.computed..][..copy.tokens];
            assert!(pool.tree().tokens(copy.from).starts_with(wanted), "{id:?}");
            assert_eq!(kv.computed % PAGE_TOKENS, 0, "{id:?}");
        }
        if !self.is_running {
            assert_eq!(kv.table.len, 0, "{id:?} waits and holds pages");
        }
        let found = self.pages_in_tree(&self.tokens[..kv.computed], pool);
        let in_tree = &tables.get(&kv.table)[..published];
        assert!(found.eq(in_tree.iter().copied()), "M6: {id:?}");
    }
}
