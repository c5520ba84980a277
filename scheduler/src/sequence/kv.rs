//! The pages of a sequence: which ones it finds in the cache, takes, publishes and gives back.

use super::{PendingCopy, Sequence, pages_for};
use crate::pages::{PagePool, PageTables};
use crate::{Band, Micros, PAGE_TOKENS, Page, PageCopy};

impl Sequence {
    /// Returns the pages that the cache holds for the tokens, first to last.
    pub(crate) fn cached_pages<'a>(
        &'a self,
        pool: &'a PagePool,
    ) -> impl Iterator<Item = Page> + 'a {
        let tokens = self.reusable_tokens();
        pool.tree().find(self.tenant, &self.kv.public, tokens)
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
        let mut table = tables.open();
        for page in self.cached_pages(pool) {
            tables.push(&mut table, page);
        }
        for &page in tables.get(&table) {
            pool.pin(page);
        }
        table.mark_published(table.len);
        self.kv.computed = table.len * PAGE_TOKENS;
        self.kv.table = table;
        self.begin_copy(pool, tables);
    }

    /// Finds a cached page that begins with the next tokens, if its copy still fits in memory.
    fn begin_copy(&mut self, pool: &mut PagePool, tables: &PageTables) {
        let wanted = &self.reusable_tokens()[self.kv.computed..];
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
        let revived = usize::from(!pool.is_pinned(from));
        let missing = pages_for(self.tokens.len()).saturating_sub(self.kv.table.len);
        if missing + revived <= pool.available(self.tenant) {
            pool.pin(from);
            self.kv.copy = Some(PendingCopy { from, tokens });
        }
    }

    /// Stops running and gives back all pages.
    pub(crate) fn stop_running(&mut self, pool: &mut PagePool, tables: &mut PageTables) {
        if let Some(copy) = self.kv.copy.take() {
            pool.unpin(copy.from);
        }
        pool.release_table(tables.get(&self.kv.table));
        tables.close(std::mem::take(&mut self.kv.table));
        self.kv.computed = 0;
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

    /// Notes that the sequence lost its pages to an earlier sequence, and stops running.
    pub(crate) fn preempt(&mut self, pool: &mut PagePool, tables: &mut PageTables) {
        self.record.times_preempted += 1;
        self.stop_running(pool, tables);
    }

    /// Returns whether the table does not cover the next `tokens` tokens yet.
    pub(crate) fn lacks_pages_for(&self, tokens: usize) -> bool {
        self.kv.table.len < pages_for(self.start() + tokens)
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
        let (whole_pages, _) = self.tokens[..self.kv.computed].as_chunks::<PAGE_TOKENS>();
        let pages = tables.get_mut(&self.kv.table);
        let published = self.kv.table.published;
        let mut redirected = 0;
        for (index, &tokens) in whole_pages.iter().enumerate().skip(published) {
            let parent = index.checked_sub(1).map(|parent| pages[parent]);
            let edge = pool
                .tree()
                .edge_for(self.tenant, &self.kv.public, parent, tokens);
            let own = pages[index];
            pages[index] = pool.publish(self.id, own, edge);
            redirected += u64::from(pages[index] != own);
        }
        self.kv.table.mark_published(whole_pages.len());
        redirected
    }

    /// Moves the partly filled last page of a sequence that ends into the prefix tree, so that
    /// requests with the same beginning can copy it.
    pub(crate) fn offer_tail(&mut self, pool: &mut PagePool, tables: &PageTables) {
        let published = self.kv.table.published;
        let tail = &self.tokens[published * PAGE_TOKENS..self.kv.computed];
        if tail.is_empty() {
            return;
        }
        let (kept, rest) = tables.get(&self.kv.table).split_at(published);
        let (&page, unused) = rest.split_first().expect("computed tokens have a page");
        pool.release_table(unused);
        self.kv.table.truncate(published);
        pool.offer_tail(self.id, page, kept.last().copied(), self.tenant, tail);
    }
}
