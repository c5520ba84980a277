//! The children of each page that are one tenant's, the most recently used first.
//!
//! Tenants' children of one public page stand in separate lists: nobody's scan depends on what others cache there.

use std::collections::HashMap;
use std::hash::BuildHasher;

use crate::{Page, TenantId};

const NONE: u32 = u32::MAX;

/// Which list of children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChildList {
    /// A tenant's first pages, or what it has under this public page.
    Top(TenantId, Option<Page>),
    /// ChildList a page of the same tenant.
    Page(Page),
}

/// PageLists through arrays, so that every change takes constant time.
pub(crate) struct ChildLists<S> {
    first: Vec<u32>, // Indexed by the parent.
    /// Has an entry for each list that is not empty. Probed and never iterated.
    tops: HashMap<(TenantId, Option<Page>), u32, S>,
    next: Vec<u32>,     // Indexed by the child.
    previous: Vec<u32>, // Likewise.
}

impl<S: BuildHasher> ChildLists<S> {
    pub(crate) fn new(pages: usize, hasher: S) -> ChildLists<S> {
        ChildLists {
            first: vec![NONE; pages],
            // A map that is never more than half full cleans up after removals in place, without allocating.
            tops: HashMap::with_capacity_and_hasher(2 * pages, hasher),
            next: vec![NONE; pages],
            previous: vec![NONE; pages],
        }
    }

    /// The most recently used first.
    pub(crate) fn iter(&self, under: ChildList) -> impl Iterator<Item = Page> + '_ {
        let child = |at: u32| (at != NONE).then(|| Page::new(at));
        std::iter::successors(child(self.first(under)), move |page| {
            child(self.next[page.index()])
        })
    }

    fn first(&self, under: ChildList) -> u32 {
        match under {
            ChildList::Top(tenant, parent) => *self.tops.get(&(tenant, parent)).unwrap_or(&NONE),
            ChildList::Page(parent) => self.first[parent.index()],
        }
    }

    fn set_first(&mut self, under: ChildList, child: u32) {
        match under {
            ChildList::Page(parent) => self.first[parent.index()] = child,
            ChildList::Top(tenant, parent) if child == NONE => {
                self.tops.remove(&(tenant, parent));
            }
            ChildList::Top(tenant, parent) => {
                self.tops.insert((tenant, parent), child);
            }
        }
    }

    pub(crate) fn push_first(&mut self, under: ChildList, page: Page) {
        let second = self.first(under);
        self.next[page.index()] = second;
        self.previous[page.index()] = NONE;
        if second != NONE {
            self.previous[second as usize] = page.index() as u32;
        }
        self.set_first(under, page.index() as u32);
    }

    /// `page` must be on this list.
    pub(crate) fn remove(&mut self, under: ChildList, page: Page) {
        let (previous, next) = (self.previous[page.index()], self.next[page.index()]);
        if next != NONE {
            self.previous[next as usize] = previous;
        }
        match previous {
            NONE => self.set_first(under, next),
            previous => self.next[previous as usize] = next,
        }
    }

    /// `page` must be on this list.
    pub(crate) fn move_first(&mut self, under: ChildList, page: Page) {
        if self.previous[page.index()] != NONE {
            self.remove(under, page);
            self.push_first(under, page);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::hash::RandomState;

    use super::*;

    #[test]
    fn the_most_recent_stands_first_and_tenants_stand_apart() {
        let (mine, yours) = (TenantId(0), TenantId(1));
        let public = Some(Page::new(0));
        for under in [ChildList::Page(Page::new(0)), ChildList::Top(mine, public)] {
            let mut children = ChildLists::new(6, RandomState::new());
            children.push_first(ChildList::Top(yours, public), Page::new(5));
            for page in 1..5 {
                children.push_first(under, Page::new(page));
            }
            children.move_first(under, Page::new(2));
            children.remove(under, Page::new(3));
            children.move_first(under, Page::new(2));
            let order: Vec<usize> = children.iter(under).map(Page::index).collect();
            assert_eq!(order, [2, 4, 1]);
            for page in [1, 2, 4] {
                children.remove(under, Page::new(page));
            }
            assert_eq!(children.iter(under).next(), None);
            assert_eq!(children.iter(ChildList::Top(yours, public)).count(), 1);
        }
    }
}
