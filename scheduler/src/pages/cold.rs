//! The unpinned cached pages in the order of their last use: a list of all pages, and one list per
//! tenant.
//!
//! Invariant: a tenant's list is the list of all pages without the pages of other tenants.

use super::lists::PageLists;
use crate::{Page, TenantId};

/// The pages that may be evicted.
pub(crate) struct ColdPages {
    all: PageLists,
    by_tenant: PageLists, // One list for each tenant.
}

impl ColdPages {
    pub(crate) fn new(pages: usize) -> ColdPages {
        ColdPages {
            all: PageLists::new(pages, 1),
            by_tenant: PageLists::new(pages, 0),
        }
    }

    pub(crate) fn add_tenant(&mut self) {
        self.by_tenant.add_list();
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len(0)
    }

    pub(crate) fn len_of(&self, tenant: TenantId) -> usize {
        self.by_tenant.len(tenant.index())
    }

    /// Returns all cold pages, from the coldest to the hottest.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Page> + Clone + '_ {
        self.all.iter(0)
    }

    /// Returns a tenant's cold pages, from the coldest to the hottest.
    pub(crate) fn iter_of(&self, tenant: TenantId) -> impl Iterator<Item = Page> + Clone + '_ {
        self.by_tenant.iter(tenant.index())
    }

    pub(crate) fn coldest(&self) -> Option<Page> {
        self.iter().next()
    }

    pub(crate) fn coldest_of(&self, tenant: TenantId) -> Option<Page> {
        self.iter_of(tenant).next()
    }

    pub(crate) fn push_hottest(&mut self, page: Page, tenant: TenantId) {
        self.all.push_last(0, page);
        self.by_tenant.push_last(tenant.index(), page);
    }

    /// Removes `page`, which must be a cold page of this tenant.
    pub(crate) fn remove(&mut self, page: Page, tenant: TenantId) {
        self.all.remove(0, page);
        self.by_tenant.remove(tenant.index(), page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_lists_keep_the_order_of_pushes() {
        let (even, odd) = (TenantId(0), TenantId(1));
        let mut cold = ColdPages::new(5);
        cold.add_tenant();
        cold.add_tenant();
        for page in [2, 1, 0, 3, 4] {
            cold.push_hottest(Page::new(page), TenantId(page % 2));
        }
        cold.remove(Page::new(0), even);
        cold.remove(Page::new(1), odd);
        cold.push_hottest(Page::new(0), even);
        let indices = |pages: &mut dyn Iterator<Item = Page>| -> Vec<usize> {
            pages.map(Page::index).collect()
        };
        assert_eq!(indices(&mut cold.iter()), [2, 3, 4, 0]);
        assert_eq!(indices(&mut cold.iter_of(even)), [2, 4, 0]);
        assert_eq!(indices(&mut cold.iter_of(odd)), [3]);
        assert_eq!((cold.len(), cold.len_of(even), cold.len_of(odd)), (4, 3, 1));
    }
}
