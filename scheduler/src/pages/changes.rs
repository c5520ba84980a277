//! What the prefix tree gains and loses, for callers that tell others what is cached.
//!
//! Invariant: a page is stored after its parent and removed before it.

use super::{Owner, PagePool};
use crate::{PAGE_TOKENS, Page, TenantId, TokenId};

/// A change of the cached whole pages. Partial leaves, which only speed up similar prompts, are not
/// reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheChange {
    /// The page is cached now.
    Stored(StoredPage),
    /// The page is no longer cached.
    Removed(Page),
}

/// A whole page that is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredPage {
    /// The page of KV memory. It stands for this prefix until it is removed.
    pub page: Page,
    /// The page before, or `None` if this page begins a prompt.
    pub parent: Option<Page>,
    /// The tenant that may find the page, or `None` if it belongs to a public prefix.
    pub tenant: Option<TenantId>,
    /// The tokens of the page. They follow the tokens of the parent.
    pub tokens: [TokenId; PAGE_TOKENS],
}

/// The changes that the caller has not collected yet.
#[derive(Default)]
pub(super) struct ChangeLog(Option<Vec<CacheChange>>);

impl ChangeLog {
    /// Returns whether changes are recorded.
    pub(super) fn is_watched(&self) -> bool {
        self.0.is_some()
    }

    /// Adds a change, if changes are recorded.
    pub(super) fn record(&mut self, change: impl FnOnce() -> CacheChange) {
        if let Some(changes) = &mut self.0 {
            changes.push(change());
        }
    }
}

impl<S: std::hash::BuildHasher + Clone> PagePool<S> {
    /// Begins to record changes. The pages that are cached already count as stored now.
    pub(crate) fn watch(&mut self) {
        let mut stored: Vec<CacheChange> = Vec::new();
        let mut is_recorded = vec![false; self.holders.len()];
        for page in (0..self.holders.len() as u32).map(Page::new) {
            let mut line = Vec::new();
            let mut next = Some(page).filter(|page| self.whole(*page).is_some());
            while let Some(page) = next.filter(|page| !is_recorded[page.index()]) {
                is_recorded[page.index()] = true;
                let change = self.whole(page).expect("a parent is a whole page");
                line.push(CacheChange::Stored(change));
                next = change.parent;
            }
            stored.extend(line.into_iter().rev());
        }
        self.changes = ChangeLog(Some(stored));
    }

    /// Removes and returns the changes since the last call, oldest first. There are none without
    /// [`PagePool::watch`].
    pub(crate) fn drain_changes(&mut self) -> Vec<CacheChange> {
        let changes = self.changes.0.as_mut();
        changes.map(std::mem::take).unwrap_or_default()
    }

    /// Returns a page of the tree if it is whole.
    pub(super) fn whole(&self, page: Page) -> Option<StoredPage> {
        let edge = self.tree.edge(page)?;
        (self.tree.tokens(page).len() == PAGE_TOKENS).then_some(StoredPage {
            page,
            parent: edge.parent,
            tenant: match edge.owner {
                Owner::Public => None,
                Owner::Tenant(tenant) => Some(tenant),
            },
            tokens: *edge.tokens,
        })
    }
}
