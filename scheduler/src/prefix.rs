//! Which cached page holds which prefix: a radix tree whose stride is one page, so that a node *is* a page.
//!
//! Invariant: a prefix is found only where tenant, parent page and all tokens of the page are equal.

use std::collections::HashMap;

use crate::{PAGE_TOKENS, Page, TenantId, TokenId};

/// What a cached page holds: these tokens, after what its parent holds.
///
/// Keys and values of a token depend on everything before it, so the parent is part of the identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Edge {
    pub(crate) tenant: TenantId,
    pub(crate) parent: Option<Page>, // `None` at the tenant's root.
    pub(crate) tokens: [TokenId; PAGE_TOKENS],
}

/// The edges between cached pages, from both ends.
pub(crate) struct PrefixTree {
    /// Probed and never iterated: the hasher's random seed can decide nothing. The whole edge is the key, so a hit is an
    /// exact comparison.
    below: HashMap<Edge, Page>,
    above: Vec<Option<Edge>>, // Indexed by page.
    children: Vec<u32>,       // Indexed by page.
}

impl PrefixTree {
    pub(crate) fn new(pages: usize) -> PrefixTree {
        PrefixTree {
            // A map that is never more than half full cleans up after removals in place, without allocating.
            below: HashMap::with_capacity(2 * pages),
            above: vec![None; pages],
            children: vec![0; pages],
        }
    }

    /// The pages that hold the longest cached prefix of `tokens`, first to last. Changes nothing.
    pub(crate) fn find<'a>(
        &'a self,
        tenant: TenantId,
        tokens: &'a [TokenId],
    ) -> impl Iterator<Item = Page> + 'a {
        let (whole_pages, _) = tokens.as_chunks::<PAGE_TOKENS>();
        let mut parent = None;
        whole_pages.iter().map_while(move |&tokens| {
            let edge = Edge {
                tenant,
                parent,
                tokens,
            };
            parent = self.get(&edge);
            parent
        })
    }

    pub(crate) fn get(&self, edge: &Edge) -> Option<Page> {
        self.below.get(edge).copied()
    }

    pub(crate) fn insert(&mut self, page: Page, edge: Edge) {
        let before = self.below.insert(edge, page);
        assert_eq!(before, None, "{page:?} is published where another page is");
        self.above[page.index()] = Some(edge);
        if let Some(parent) = edge.parent {
            self.children[parent.index()] += 1;
        }
    }

    pub(crate) fn remove(&mut self, page: Page) {
        assert_eq!(self.children[page.index()], 0, "{page:?} is not a leaf");
        let edge = self.above[page.index()]
            .take()
            .expect("a page in the tree has an edge");
        self.below.remove(&edge);
        if let Some(parent) = edge.parent {
            self.children[parent.index()] -= 1;
        }
    }

    /// The edge that leads to `page`, if it is in the tree.
    pub(crate) fn edge(&self, page: Page) -> Option<&Edge> {
        self.above[page.index()].as_ref()
    }

    pub(crate) fn children(&self, page: Page) -> u32 {
        self.children[page.index()]
    }

    pub(crate) fn len(&self) -> usize {
        self.below.len()
    }
}
