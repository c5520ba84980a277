//! The children of each page that belong to one tenant, the most recently used first.
//!
//! Each tenant's children of a public page are a list of their own. So a tenant's search does not
//! depend on what other tenants cache there.

use std::collections::HashMap;
use std::hash::BuildHasher;

use crate::{Page, TenantId};

const NONE: u32 = u32::MAX;

/// The name of a list of children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChildList {
    /// A tenant's first pages of prompts, or its pages under this public page.
    Top(TenantId, Option<Page>),
    /// The children of a page that a tenant owns.
    Page(Page),
}

/// Doubly linked lists in arrays: every change takes constant time.
pub(crate) struct ChildLists<S> {
    first: Vec<u32>, // Indexed by the parent.
    /// The first child of each `ChildList::Top` that is not empty. Probed and never iterated.
    tops: HashMap<(TenantId, Option<Page>), u32, S>,
    next: Vec<u32>,     // Indexed by the child.
    previous: Vec<u32>, // Indexed by the child.
}

impl<S: BuildHasher> ChildLists<S> {
    pub(crate) fn new(pages: usize, hasher: S) -> ChildLists<S> {
        ChildLists {
            first: vec![NONE; pages],
            // A map that is at most half full reuses removed entries without allocating.
            tops: HashMap::with_capacity_and_hasher(2 * pages, hasher),
            next: vec![NONE; pages],
            previous: vec![NONE; pages],
        }
    }

    /// Returns the pages of a list, the most recently used first.
    pub(crate) fn iter(&self, list: ChildList) -> impl Iterator<Item = Page> + '_ {
        let child = |index: u32| (index != NONE).then(|| Page::new(index));
        std::iter::successors(child(self.first(list)), move |page| {
            child(self.next[page.index()])
        })
    }

    fn first(&self, list: ChildList) -> u32 {
        match list {
            ChildList::Top(tenant, parent) => *self.tops.get(&(tenant, parent)).unwrap_or(&NONE),
            ChildList::Page(parent) => self.first[parent.index()],
        }
    }

    fn set_first(&mut self, list: ChildList, child: u32) {
        match list {
            ChildList::Page(parent) => self.first[parent.index()] = child,
            ChildList::Top(tenant, parent) if child == NONE => {
                self.tops.remove(&(tenant, parent));
            }
            ChildList::Top(tenant, parent) => {
                self.tops.insert((tenant, parent), child);
            }
        }
    }

    pub(crate) fn push_first(&mut self, list: ChildList, page: Page) {
        let second = self.first(list);
        self.next[page.index()] = second;
        self.previous[page.index()] = NONE;
        if second != NONE {
            self.previous[second as usize] = page.index() as u32;
        }
        self.set_first(list, page.index() as u32);
    }

    /// Removes `page`, which must be in this list.
    pub(crate) fn remove(&mut self, list: ChildList, page: Page) {
        let (previous, next) = (self.previous[page.index()], self.next[page.index()]);
        if next != NONE {
            self.previous[next as usize] = previous;
        }
        match previous {
            NONE => self.set_first(list, next),
            previous => self.next[previous as usize] = next,
        }
    }

    /// Moves `page`, which must be in this list, to the front.
    pub(crate) fn move_first(&mut self, list: ChildList, page: Page) {
        if self.previous[page.index()] != NONE {
            self.remove(list, page);
            self.push_first(list, page);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::hash::RandomState;

    use super::*;

    #[test]
    fn the_most_recently_used_child_is_first_and_tenants_have_separate_lists() {
        let (tenant, other) = (TenantId(0), TenantId(1));
        let public = Some(Page::new(0));
        for list in [
            ChildList::Page(Page::new(0)),
            ChildList::Top(tenant, public),
        ] {
            let mut children = ChildLists::new(6, RandomState::new());
            children.push_first(ChildList::Top(other, public), Page::new(5));
            for page in 1..5 {
                children.push_first(list, Page::new(page));
            }
            children.move_first(list, Page::new(2));
            children.remove(list, Page::new(3));
            children.move_first(list, Page::new(2));
            let order: Vec<usize> = children.iter(list).map(Page::index).collect();
            assert_eq!(order, [2, 4, 1]);
            for page in [1, 2, 4] {
                children.remove(list, Page::new(page));
            }
            assert_eq!(children.iter(list).next(), None);
            assert_eq!(children.iter(ChildList::Top(other, public)).count(), 1);
        }
    }
}
