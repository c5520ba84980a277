//! The prefix tree: which cached page holds which prefix.
//!
//! It is a radix tree whose stride is one page, so a node is a page.
//!
//! Invariant: a lookup finds a page only if owner, parent page and all tokens of the page are
//! equal.
//!
//! Invariant: a page's parent has the same owner or is public. So no tenant finds another tenant's
//! pages; tenants share only the prefixes that the operator has declared.

use std::hash::BuildHasher;

use super::children::{ChildList, ChildLists};
use super::lists::PageLists;
use super::public::PublicPrefixes;
use crate::{PAGE_TOKENS, Page, PublicPrefix, TenantId, TokenId};

/// The number of children that a search compares with the wanted tokens, of the tenant's own pages
/// and of public pages each.
const SCANNED: usize = 8;

/// The owner of a cached page: the tenants that may find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Owner {
    /// All tenants that may use the declared prefix.
    Public,
    /// One tenant.
    Tenant(TenantId),
}

/// The identity of a cached page: its tokens, which follow the tokens of its parent.
///
/// The keys and values of a token depend on all tokens before it, so the parent is part of the
/// identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Edge {
    pub(crate) owner: Owner,
    pub(crate) parent: Option<Page>, // `None` for the first page of a prompt.
    pub(crate) tokens: [TokenId; PAGE_TOKENS],
}

/// A page in the tree.
#[derive(Clone, Copy)]
struct TreeNode {
    edge: Edge,
    len: usize, // Valid tokens; fewer than a page in a partial leaf.
}

/// The edges of all cached pages, indexed by their hash, by page and by parent.
pub(crate) struct PrefixTree<S> {
    /// All whole pages by the hash of their edge, one list per bucket. It is only probed, and a hit
    /// compares the whole edge, so the hasher's random seed changes no result.
    index: PageLists,
    buckets: usize, // A power of two.
    hasher: S,
    nodes: Vec<Option<TreeNode>>, // Indexed by page.
    children: ChildLists<S>,      // Without public pages.
    pub(crate) public: PublicPrefixes,
    len: usize,
}

impl<S: BuildHasher + Clone> PrefixTree<S> {
    pub(crate) fn new(pages: usize, hasher: S) -> PrefixTree<S> {
        let buckets = pages.next_power_of_two();
        PrefixTree {
            index: PageLists::new(pages, buckets),
            buckets,
            hasher: hasher.clone(),
            nodes: vec![None; pages],
            children: ChildLists::new(pages, hasher),
            public: PublicPrefixes::new(pages),
            len: 0,
        }
    }

    /// Returns the edge of a page of these tokens after `parent`. The owner is the public if the
    /// page continues one of the `public` prefixes; otherwise it is the tenant.
    pub(crate) fn edge_for(
        &self,
        tenant: TenantId,
        public: &[PublicPrefix],
        parent: Option<Page>,
        tokens: [TokenId; PAGE_TOKENS],
    ) -> Edge {
        let mut declared = self.public.after(public, parent);
        let owner = if declared.any(|next| *next == tokens) {
            Owner::Public
        } else {
            Owner::Tenant(tenant)
        };
        Edge {
            owner,
            parent,
            tokens,
        }
    }

    /// Returns the cached pages of the longest prefix of `tokens`, first to last: pages of the
    /// `public` prefixes, then the tenant's own. Pins nothing.
    pub(crate) fn find<'a>(
        &'a self,
        tenant: TenantId,
        public: &'a [PublicPrefix],
        tokens: &'a [TokenId],
    ) -> impl Iterator<Item = Page> + 'a {
        let (whole_pages, _) = tokens.as_chunks::<PAGE_TOKENS>();
        let mut parent = None;
        whole_pages.iter().map_while(move |&tokens| {
            parent = self.get(&self.edge_for(tenant, public, parent, tokens));
            parent
        })
    }

    /// Returns the whole page at this edge.
    pub(crate) fn get(&self, edge: &Edge) -> Option<Page> {
        self.get_in(self.bucket(edge), edge)
    }

    fn get_in(&self, bucket: usize, edge: &Edge) -> Option<Page> {
        let mut pages = self.index.iter(bucket);
        pages.find(|&page| self.edge(page) == Some(edge))
    }

    /// Returns the list of the index that has the pages with the hash of this edge.
    fn bucket(&self, edge: &Edge) -> usize {
        self.hasher.hash_one(edge) as usize & (self.buckets - 1)
    }

    /// Returns the cached page after `parent` that shares the most first tokens with `tokens`, and
    /// their number, which is at least 1. Among equals, the most recently used page of the
    /// tenant's own wins. A sequence copies this page if no whole page is found. Pins nothing.
    pub(crate) fn similar(
        &self,
        tenant: TenantId,
        public: &[PublicPrefix],
        parent: Option<Page>,
        tokens: &[TokenId],
    ) -> Option<(Page, usize)> {
        let mut best = None;
        for page in self.candidates(tenant, public, parent) {
            let shared = common_prefix(self.tokens(page), tokens);
            if shared > best.map_or(0, |(_, longest)| longest) {
                best = Some((page, shared));
            }
        }
        best
    }

    /// Returns the first pages after `parent`: the tenant's own, including partial leaves, the most
    /// recently used first, then public ones.
    pub(crate) fn candidates<'a>(
        &'a self,
        tenant: TenantId,
        public: &'a [PublicPrefix],
        parent: Option<Page>,
    ) -> impl Iterator<Item = Page> + 'a {
        let declared = self.public.after(public, parent).take(SCANNED);
        let public = declared.filter_map(move |&tokens| {
            self.get(&Edge {
                owner: Owner::Public,
                parent,
                tokens,
            })
        });
        self.scanned(tenant, parent).chain(public)
    }

    /// Returns the tenant's own page after `parent` that begins with all of `tokens`.
    pub(crate) fn covering(
        &self,
        tenant: TenantId,
        parent: Option<Page>,
        tokens: &[TokenId],
    ) -> Option<Page> {
        let mut scanned = self.scanned(tenant, parent);
        scanned.find(|&page| self.tokens(page).starts_with(tokens))
    }

    fn scanned(&self, tenant: TenantId, parent: Option<Page>) -> impl Iterator<Item = Page> + '_ {
        self.children(tenant, parent).take(SCANNED)
    }

    /// Returns a tenant's own pages after `parent`, including partial leaves, the most recently
    /// used first.
    pub(crate) fn children(
        &self,
        tenant: TenantId,
        parent: Option<Page>,
    ) -> impl Iterator<Item = Page> + '_ {
        self.children.iter(self.children_of(tenant, parent))
    }

    fn children_of(&self, tenant: TenantId, parent: Option<Page>) -> ChildList {
        match parent {
            Some(page) if !self.is_public(page) => ChildList::Page(page),
            top => ChildList::Top(tenant, top),
        }
    }

    /// Puts a whole page into the tree, unless a page is at this edge already. Returns that page.
    pub(crate) fn insert(&mut self, page: Page, edge: Edge) -> Option<Page> {
        let bucket = self.bucket(&edge);
        let equal = self.get_in(bucket, &edge);
        if equal.is_some() {
            return equal;
        }
        self.index.push_last(bucket, page);
        if edge.owner == Owner::Public {
            self.public.record(page, edge.parent, &edge.tokens);
        }
        let len = PAGE_TOKENS;
        self.add_node(page, TreeNode { edge, len });
        None
    }

    /// Puts a page into the tree that holds fewer than [`PAGE_TOKENS`] tokens: a partial leaf,
    /// which only [`PrefixTree::similar`] and [`PrefixTree::covering`] find.
    pub(crate) fn insert_partial(
        &mut self,
        page: Page,
        tenant: TenantId,
        parent: Option<Page>,
        tokens: &[TokenId],
    ) {
        let len = tokens.len();
        let mut edge = Edge {
            owner: Owner::Tenant(tenant),
            parent,
            tokens: [0; PAGE_TOKENS],
        };
        edge.tokens[..len].copy_from_slice(tokens);
        self.add_node(page, TreeNode { edge, len });
    }

    fn add_node(&mut self, page: Page, node: TreeNode) {
        self.nodes[page.index()] = Some(node);
        if let Some(list) = self.child_list(&node.edge) {
            self.children.push_first(list, page);
        }
        self.len += 1;
    }

    /// Returns the child list that contains a page of this edge.
    fn child_list(&self, edge: &Edge) -> Option<ChildList> {
        match edge.owner {
            Owner::Public => None,
            Owner::Tenant(tenant) => Some(self.children_of(tenant, edge.parent)),
        }
    }

    /// Makes `page` the most recently used of its parent's children.
    pub(crate) fn touch(&mut self, page: Page) {
        let edge = self.edge(page).expect("a page in the tree has an edge");
        if let Some(list) = self.child_list(edge) {
            self.children.move_first(list, page);
        }
    }

    /// Removes a leaf that a tenant owns.
    pub(crate) fn remove(&mut self, page: Page) {
        let child = self.children.iter(ChildList::Page(page)).next();
        assert_eq!(child, None, "{page:?} is not a leaf");
        let TreeNode { edge, len } = self.nodes[page.index()]
            .take()
            .expect("a page in the tree has an edge");
        let list = self.child_list(&edge);
        self.children
            .remove(list.expect("a public page is never removed"), page);
        if len == PAGE_TOKENS {
            self.index.remove(self.bucket(&edge), page);
        }
        self.len -= 1;
    }

    /// Returns the edge of `page` if it is in the tree. In a partial leaf, only the tokens that
    /// [`PrefixTree::tokens`] returns are valid.
    pub(crate) fn edge(&self, page: Page) -> Option<&Edge> {
        self.nodes[page.index()].as_ref().map(|node| &node.edge)
    }

    /// Returns the valid tokens of a page in the tree: a whole page, or fewer in a partial leaf.
    pub(crate) fn tokens(&self, page: Page) -> &[TokenId] {
        let node = self.nodes[page.index()].as_ref();
        let node = node.expect("a page in the tree has an edge");
        &node.edge.tokens[..node.len]
    }

    pub(crate) fn is_public(&self, page: Page) -> bool {
        self.edge(page)
            .is_some_and(|edge| edge.owner == Owner::Public)
    }

    /// Returns the number of pages in the tree, including partial leaves.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// Returns the length of the common prefix of `a` and `b`.
pub(crate) fn common_prefix(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
