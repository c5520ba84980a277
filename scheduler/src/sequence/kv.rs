//! The pages of a sequence: which ones it finds in the cache, takes, publishes and gives back.

use super::states::CachedState;
use super::{PendingCopy, Sequence, pages_for};
use crate::pages::{Behind, PagePool, PageTables};
use crate::{Band, Micros, PAGE_TOKENS, Page, PageCopy, TokenId};

impl Sequence {
    /// Returns the pages that the cache holds for the tokens, first to last. If sequences have
    /// states, these are the pages up to the deepest state.
    pub(crate) fn cached_pages<'a>(
        &'a self,
        pool: &'a PagePool,
    ) -> impl Iterator<Item = Page> + 'a {
        let limit = match pool.slabs.is_used() {
            true => self.cached_state(pool, true).map_or(0, |state| state.pages),
            false => usize::MAX,
        };
        self.known_pages(pool).take(limit)
    }

    /// Returns the pages that the tree holds for the tokens, first to last.
    fn known_pages<'a>(&'a self, pool: &'a PagePool) -> impl Iterator<Item = Page> + 'a {
        let tokens = self.reusable_tokens();
        let limit = match self.is_causal() {
            true => usize::MAX, // The same, and the tree need not be searched twice.
            false => self.reusable_pages(self.pages_in_tree(tokens, pool).count()),
        };
        self.pages_in_tree(tokens, pool).take(limit)
    }

    /// Returns the pages that the tree holds for these first tokens of the sequence.
    pub(super) fn pages_in_tree<'a>(
        &'a self,
        tokens: &'a [TokenId],
        pool: &'a PagePool,
    ) -> impl Iterator<Item = Page> + 'a {
        let block = self.attended_block();
        let tree = pool.tree();
        tree.find(self.tenant, &self.kv.public, block, tokens)
    }

    /// Begins to run with the pages that the cache holds for its tokens.
    pub(crate) fn begin_running(
        &mut self,
        now: Micros,
        band: Band,
        pool: &mut PagePool,
        tables: &mut PageTables,
    ) {
        self.is_running = true;
        self.band = band;
        self.record.times_bypassed = 0;
        self.pacing.last_token_at = now;
        self.pacing.paused_steps = 0;
        // Room for all tokens that can ever come, so that decoding never allocates.
        self.tokens
            .reserve_exact(self.max_len() - self.tokens.len());
        if pool.slabs.is_used() {
            return self.begin_with_state(pool, tables);
        }
        self.open_table(usize::MAX, pool, tables);
        self.begin_copy(pool, tables);
    }

    /// Takes the first cached pages of the tokens, at most `limit`.
    fn open_table(&mut self, limit: usize, pool: &mut PagePool, tables: &mut PageTables) {
        let mut table = tables.open();
        for page in self.known_pages(pool).take(limit) {
            tables.push(&mut table, page);
        }
        for &page in tables.get(&table) {
            pool.pin(page);
        }
        table.mark_published(table.len);
        self.kv.computed = table.len * PAGE_TOKENS;
        self.kv.table = table;
    }

    /// Begins with the deepest cached state and the pages before it. If there is no room for the
    /// copy of a page, the state must be after whole pages.
    fn begin_with_state(&mut self, pool: &mut PagePool, tables: &mut PageTables) {
        let depth = self.known_pages(pool).count();
        let has_room = |state: &CachedState| match state.copy {
            Some((from, _)) => {
                let unpinned = self.known_pages(pool).take(state.pages);
                let revived = unpinned.filter(|page| !pool.is_pinned(*page)).count();
                self.has_room_for_copy(from, state.pages, revived, pool)
            }
            None => true,
        };
        let state = self.cached_state(pool, true).filter(has_room);
        let state = state.or_else(|| self.cached_state(pool, false));
        self.begin_states(pool, state, depth);
        let pages = state.map_or(0, |state| state.pages);
        self.open_table(pages, pool, tables);
        if let Some((from, tokens)) = state.and_then(|state| state.copy) {
            self.copy_from(from, tokens, pool);
        }
    }

    /// Begins a copy of the first `tokens` tokens of a cached page. The next commit ends it.
    fn copy_from(&mut self, from: Page, tokens: usize, pool: &mut PagePool) {
        pool.pin(from);
        self.kv.copy = Some(PendingCopy { from, tokens });
    }

    /// Returns whether a page can be pinned for a copy, beside the pages that the tokens after the
    /// first `cached` pages take, and beside `revived` cold pages that are pinned too.
    fn has_room_for_copy(
        &self,
        from: Page,
        cached: usize,
        revived: usize,
        pool: &PagePool,
    ) -> bool {
        let revived = revived + usize::from(!pool.is_pinned(from));
        let missing = pages_for(self.tokens.len()).saturating_sub(cached);
        missing + revived <= pool.available(self.tenant)
    }

    /// Finds a cached page that begins with the next tokens, if its copy still fits in memory.
    fn begin_copy(&mut self, pool: &mut PagePool, tables: &PageTables) {
        let wanted = &self.reusable_tokens()[self.kv.computed..];
        if self.is_diffused() {
            return; // A block begins where its known tokens do.
        }
        // No whole page of these tokens is shared on this path. A page of the tenant's own, beside
        // a public one, may still hold all of them. The sequence copies all except the last.
        let wanted = &wanted[..wanted.len().min(PAGE_TOKENS - 1)];
        let parent = tables.get(&self.kv.table).last().copied();
        let similar = pool
            .tree()
            .similar(self.tenant, &self.kv.public, parent, wanted);
        let Some((from, tokens)) = similar else {
            return;
        };
        if self.has_room_for_copy(from, self.kv.table.len, 0, pool) {
            self.copy_from(from, tokens, pool);
        }
    }

    /// Stops running and gives back all pages.
    pub(crate) fn stop_running(&mut self, pool: &mut PagePool, tables: &mut PageTables) {
        if let Some(copy) = self.kv.copy.take() {
            pool.unpin(copy.from);
        }
        self.end_states(pool);
        pool.release_table(tables.get(&self.kv.table));
        tables.close(std::mem::take(&mut self.kv.table));
        self.kv.computed = 0;
        self.lose_block_cache();
        self.is_running = false;
    }

    /// Stops running, and removes from the prefix tree all pages that the sequence has computed.
    pub(crate) fn stop_and_discard(&mut self, pool: &mut PagePool, tables: &mut PageTables) {
        let found = self.record.cached_tokens.unwrap_or(0) / PAGE_TOKENS;
        let own: Vec<Page> = tables
            .get(&self.kv.table)
            .iter()
            .skip(found)
            .copied()
            .collect();
        self.stop_running(pool, tables);
        pool.discard(&own);
    }

    /// Notes that the sequence lost its pages to an earlier sequence, and stops running. Its own
    /// state is lost: it would need the last page, which is the first page that others get.
    pub(crate) fn preempt(&mut self, pool: &mut PagePool, tables: &mut PageTables) {
        self.record.times_preempted += 1;
        self.stop_running(pool, tables);
    }

    /// Returns whether the table does not cover the next `tokens` tokens yet.
    pub(crate) fn lacks_pages_for(&self, tokens: usize) -> bool {
        self.kv.table.len < pages_for(self.start() + tokens)
    }

    /// Returns how many pages the next row must get to compute anything of the next `tokens`
    /// tokens: one, or all of a block that is computed as a whole.
    pub(crate) fn pages_of_row(&self, tokens: usize) -> usize {
        match self.row_block() {
            0 => 1,
            block => {
                let end = self.start() + block.min(tokens);
                pages_for(end).saturating_sub(self.kv.table.len).max(1)
            }
        }
    }

    /// Takes pages for the next `tokens` tokens, or as many pages as there are. Returns for how
    /// many tokens the table has pages now.
    pub(crate) fn take_pages(
        &mut self,
        tokens: usize,
        pool: &mut PagePool,
        tables: &mut PageTables,
    ) -> usize {
        let start = self.start();
        while self.lacks_pages_for(tokens) {
            let Some(page) = pool.take(self.id, self.tenant) else {
                break;
            };
            tables.push(&mut self.kv.table, page);
        }
        tokens.min((self.kv.table.len * PAGE_TOKENS).saturating_sub(start))
    }

    /// Returns the page that the next step copies for this sequence, and where to.
    pub(crate) fn page_copy(&self, tables: &PageTables) -> Option<PageCopy> {
        let copy = self.kv.copy?;
        Some(PageCopy {
            from: copy.from,
            to: tables.get(&self.kv.table)[self.kv.computed / PAGE_TOKENS],
        })
    }

    /// Commits the pending copy. Returns whether there was one.
    pub(crate) fn commit_copy(&mut self, pool: &mut PagePool) -> bool {
        let Some(copy) = self.kv.copy.take() else {
            return false;
        };
        pool.unpin(copy.from);
        self.kv.computed += copy.tokens;
        true
    }

    /// Moves the full, computed pages into the prefix tree, each under the page that now stands
    /// for its parent. Returns how many of these pages the tree had already; the sequence's page
    /// table then has the tree's pages instead.
    #[inline]
    pub(crate) fn publish(&mut self, pool: &mut PagePool, tables: &mut PageTables) -> u64 {
        let block = self.attended_block();
        let computed = &self.tokens[..self.kv.computed];
        let (whole_pages, _) = computed.as_chunks::<PAGE_TOKENS>();
        let pages = tables.get_mut(&self.kv.table);
        let published = self.kv.table.published;
        let mut redirected = 0;
        for (index, tokens) in whole_pages.iter().enumerate().skip(published) {
            let parent = index.checked_sub(1).map(|parent| pages[parent]);
            let behind = Behind::page(block, computed, (index + 1) * PAGE_TOKENS);
            let behind = behind.expect("whole blocks are computed");
            let (tenant, public) = (self.tenant, &self.kv.public);
            let tree = pool.tree();
            let edge = tree.edge_for(tenant, public, parent, tokens, behind);
            let own = pages[index];
            pages[index] = pool.publish(self.id, own, &edge);
            redirected += u64::from(pages[index] != own);
        }
        self.kv.table.mark_published(whole_pages.len());
        redirected
    }

    /// Moves the partly filled last page of a sequence that ends into the prefix tree, so that
    /// requests with the same beginning can copy it. The state at its end goes with it.
    pub(crate) fn offer_tail(&mut self, pool: &mut PagePool, tables: &PageTables) {
        let last = self.offer_last_page(pool, tables);
        self.offer_state(last, pool);
    }

    /// Returns the page in the tree that holds the last computed token.
    fn offer_last_page(&mut self, pool: &mut PagePool, tables: &PageTables) -> Option<Page> {
        if !self.is_causal() {
            return None; // A copy of it would begin inside a block.
        }
        let published = self.kv.table.published;
        let tail = &self.tokens[published * PAGE_TOKENS..self.kv.computed];
        if tail.is_empty() {
            let last = published.checked_sub(1)?;
            return Some(tables.get(&self.kv.table)[last]);
        }
        let (kept, rest) = tables.get(&self.kv.table).split_at(published);
        let (&page, unused) = rest.split_first().expect("computed tokens have a page");
        pool.release_table(unused);
        self.kv.table.truncate(published);
        let parent = kept.last().copied();
        Some(pool.offer_tail(self.id, page, parent, self.tenant, tail))
    }
}
