//! A copy of what the cache holds, made from its changes alone.

use std::collections::HashMap;

use crate::Page;
use crate::pages::{CacheChange, StoredPage};

/// The cached whole pages, as far as the changes tell.
#[derive(Default)]
pub(super) struct CacheMirror(HashMap<Page, StoredPage>);

impl CacheMirror {
    /// Follows changes. Each must be possible after those before.
    pub(super) fn follow(&mut self, changes: Vec<CacheChange>) {
        for change in changes {
            match change {
                CacheChange::Stored(stored) => {
                    let parent = stored.parent.map(|parent| self.0.get(&parent));
                    if let Some(parent) = parent {
                        let parent = parent.expect("a page is stored after its parent");
                        assert!(parent.tenant.is_none() || parent.tenant == stored.tenant);
                    }
                    let before = self.0.insert(stored.page, stored);
                    assert_eq!(before, None, "a page is stored once");
                }
                CacheChange::Removed(page) => {
                    assert!(self.0.remove(&page).is_some(), "{page:?} was never stored");
                    let is_child = |stored: &StoredPage| stored.parent == Some(page);
                    assert!(!self.0.values().any(is_child), "{page:?} has children");
                }
            }
        }
    }

    /// Returns what the mirror knows of a page.
    pub(super) fn get(&self, page: Page) -> Option<StoredPage> {
        self.0.get(&page).copied()
    }
}
