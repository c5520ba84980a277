//! The unpinned cached pages in the order of their last use: a list of all pages, and one list per
//! tenant.
//!
//! Invariant: a tenant's list is the list of all pages without the pages of other tenants.

use crate::{Page, TenantId};

/// The pages that may be evicted.
pub(crate) struct ColdPages {
    all: PageLists,
    by_tenant: PageLists, // One list for each tenant.
}

impl ColdPages {
    pub(crate) fn new(pages: usize) -> ColdPages {
        let mut all = PageLists::new(pages);
        all.add_list();
        ColdPages {
            all,
            by_tenant: PageLists::new(pages),
        }
    }

    pub(crate) fn add_tenant(&mut self) {
        self.by_tenant.add_list();
    }

    pub(crate) fn len(&self) -> usize {
        self.all.lens[0]
    }

    pub(crate) fn len_of(&self, tenant: TenantId) -> usize {
        self.by_tenant.lens[tenant.index()]
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
        self.all.push_hottest(0, page);
        self.by_tenant.push_hottest(tenant.index(), page);
    }

    /// Removes `page`, which must be a cold page of this tenant.
    pub(crate) fn remove(&mut self, page: Page, tenant: TenantId) {
        self.all.remove(0, page);
        self.by_tenant.remove(tenant.index(), page);
    }
}

/// Disjoint lists of pages in two arrays: every change takes constant time.
struct PageLists {
    /// The next hotter entry, indexed by page, then by list. Each list is a ring that its own entry
    /// closes: the next hotter entry after it is the list's coldest page.
    hotter: Vec<u32>,
    /// The next colder entry, indexed like `hotter`.
    colder: Vec<u32>,
    lens: Vec<usize>, // Indexed by list.
    pages: usize,
}

impl PageLists {
    fn new(pages: usize) -> PageLists {
        let unlisted: Vec<u32> = (0..pages as u32).collect();
        PageLists {
            hotter: unlisted.clone(),
            colder: unlisted,
            lens: Vec::new(),
            pages,
        }
    }

    fn add_list(&mut self) {
        let end = self.hotter.len() as u32;
        self.hotter.push(end);
        self.colder.push(end);
        self.lens.push(0);
    }

    fn iter(&self, list: usize) -> impl Iterator<Item = Page> + Clone + '_ {
        let end = self.pages + list;
        let next = |entry: usize| self.hotter[entry] as usize;
        std::iter::successors(Some(next(end)), move |&entry| Some(next(entry)))
            .take_while(move |&entry| entry != end)
            .map(|entry| Page::new(entry as u32))
    }

    fn push_hottest(&mut self, list: usize, page: Page) {
        let end = self.pages + list;
        let before = self.colder[end] as usize;
        self.link(before, page.index());
        self.link(page.index(), end);
        self.lens[list] += 1;
    }

    fn remove(&mut self, list: usize, page: Page) {
        let page = page.index();
        self.link(self.colder[page] as usize, self.hotter[page] as usize);
        self.lens[list] -= 1;
    }

    fn link(&mut self, colder: usize, hotter: usize) {
        self.hotter[colder] = hotter as u32;
        self.colder[hotter] = colder as u32;
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
