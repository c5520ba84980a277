//! The prefix tree: which cached page holds which prefix.
//!
//! It is a radix tree whose stride is one page, so a node is a page.
//!
//! Invariant: a lookup finds a page only if owner, parent page and all tokens of the page are
//! equal, and the tokens behind the page that its keys and values depend on.
//!
//! Invariant: a page's parent has the same owner or is public. So no tenant finds another tenant's
//! pages; tenants share only the prefixes that the operator has declared.

use std::hash::{BuildHasher, Hash, Hasher};

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

/// The tokens behind a page that its keys and values depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Behind<'a> {
    block: u32, // The size of the blocks within which tokens attend to each other, or 0.
    tokens: &'a [TokenId], // Up to the end of the block of the page's last token.
}

impl<'a> Behind<'a> {
    /// Returns the tokens behind the page that ends after the first `end` of `tokens`. Returns
    /// `None` if not all of them are known. `block` is the size of the blocks within which tokens
    /// attend to each other, or 0 if a token attends to those up to its own.
    pub(crate) fn page(block: u32, tokens: &'a [TokenId], end: usize) -> Option<Behind<'a>> {
        let block_end = match block {
            0 => end,
            block => end.next_multiple_of(block as usize),
        };
        let tokens = tokens.get(end..block_end)?;
        Some(Behind { block, tokens })
    }
}

/// The identity of a cached page: its tokens, which follow the tokens of its parent.
///
/// The keys and values of a token depend on all tokens before it, so the parent is part of the
/// identity. If tokens attend to all of their block, the rest of the block is too.
#[derive(Clone, Copy, Debug, Eq)]
pub(crate) struct Edge<'a> {
    pub(crate) owner: Owner,
    pub(crate) parent: Option<Page>, // `None` for the first page of a prompt.
    pub(crate) tokens: &'a [TokenId; PAGE_TOKENS],
    pub(crate) behind: Behind<'a>,
}

impl Edge<'_> {
    /// Returns what lookups compare and hash, beside the tokens. There are few pieces, because a
    /// lookup hashes each page of a prompt.
    fn owner_and_parent(&self) -> (u64, u64) {
        let owner = match self.owner {
            Owner::Public => 0,
            Owner::Tenant(tenant) => u64::from(tenant.0) + 1,
        };
        let parent = self.parent.map_or(0, |page| page.index() as u64 + 1);
        (owner, parent)
    }
}

impl PartialEq for Edge<'_> {
    fn eq(&self, other: &Edge<'_>) -> bool {
        self.owner_and_parent() == other.owner_and_parent()
            && self.tokens == other.tokens
            && self.behind == other.behind
    }
}

impl Hash for Edge<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.owner_and_parent().hash(state);
        self.tokens.hash(state);
        if self.behind.block != 0 {
            self.behind.hash(state);
        }
    }
}

/// A page in the tree.
#[derive(Clone)]
struct TreeNode {
    owner: Owner,
    parent: Option<Page>,
    tokens: [TokenId; PAGE_TOKENS],
    len: usize, // Valid tokens; fewer than a page in a partial leaf.
    block: u32,
    behind: Box<[TokenId]>, // Empty, without memory, if keys and values are causal.
}

impl TreeNode {
    fn new(edge: &Edge<'_>, len: usize) -> TreeNode {
        TreeNode {
            owner: edge.owner,
            parent: edge.parent,
            tokens: *edge.tokens,
            len,
            block: edge.behind.block,
            behind: edge.behind.tokens.into(),
        }
    }

    fn edge(&self) -> Edge<'_> {
        Edge {
            owner: self.owner,
            parent: self.parent,
            tokens: &self.tokens,
            behind: Behind {
                block: self.block,
                tokens: &self.behind,
            },
        }
    }
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
    pub(crate) fn edge_for<'a>(
        &self,
        tenant: TenantId,
        public: &[PublicPrefix],
        parent: Option<Page>,
        tokens: &'a [TokenId; PAGE_TOKENS],
        behind: Behind<'a>,
    ) -> Edge<'a> {
        let mut declared = self.public.after(public, parent);
        let owner = if declared.any(|next| next == tokens) {
            Owner::Public
        } else {
            Owner::Tenant(tenant)
        };
        Edge {
            owner,
            parent,
            tokens,
            behind,
        }
    }

    /// Returns the cached pages of the longest prefix of `tokens`, first to last: pages of the
    /// `public` prefixes, then the tenant's own. Within blocks of `block` tokens, if it is not 0,
    /// tokens attend to each other. Pins nothing.
    pub(crate) fn find<'a>(
        &'a self,
        tenant: TenantId,
        public: &'a [PublicPrefix],
        block: u32,
        tokens: &'a [TokenId],
    ) -> impl Iterator<Item = Page> + 'a {
        let (whole_pages, _) = tokens.as_chunks::<PAGE_TOKENS>();
        let mut parent = None;
        (whole_pages.iter().enumerate()).map_while(move |(index, page)| {
            let behind = Behind::page(block, tokens, (index + 1) * PAGE_TOKENS)?;
            parent = self.get(&self.edge_for(tenant, public, parent, page, behind));
            parent
        })
    }

    /// Returns the whole page at this edge.
    pub(crate) fn get(&self, edge: &Edge<'_>) -> Option<Page> {
        self.get_in(self.bucket(edge), edge)
    }

    fn get_in(&self, bucket: usize, edge: &Edge<'_>) -> Option<Page> {
        let mut pages = self.index.iter(bucket);
        pages.find(|&page| self.edge(page).as_ref() == Some(edge))
    }

    /// Returns the list of the index that has the pages with the hash of this edge.
    fn bucket(&self, edge: &Edge<'_>) -> usize {
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

    /// Returns the first pages after `parent` whose keys and values are causal: the tenant's own,
    /// including partial leaves, the most recently used first, then public ones.
    pub(crate) fn candidates<'a>(
        &'a self,
        tenant: TenantId,
        public: &'a [PublicPrefix],
        parent: Option<Page>,
    ) -> impl Iterator<Item = Page> + 'a {
        let declared = self.public.after(public, parent).take(SCANNED);
        let public = declared.filter_map(move |tokens| {
            self.get(&Edge {
                owner: Owner::Public,
                parent,
                tokens,
                behind: Behind::default(),
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
        let children = self.children(tenant, parent);
        let is_causal = |page: &Page| self.node(*page).is_some_and(|node| node.block == 0);
        children.filter(is_causal).take(SCANNED)
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
    pub(crate) fn insert(&mut self, page: Page, edge: &Edge<'_>) -> Option<Page> {
        let bucket = self.bucket(edge);
        let equal = self.get_in(bucket, edge);
        if equal.is_some() {
            return equal;
        }
        self.index.push_last(bucket, page);
        if edge.owner == Owner::Public {
            self.public.record(page, edge.parent, edge.tokens);
        }
        self.add_node(page, TreeNode::new(edge, PAGE_TOKENS));
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
        let mut padded = [0; PAGE_TOKENS];
        padded[..len].copy_from_slice(tokens);
        let edge = Edge {
            owner: Owner::Tenant(tenant),
            parent,
            tokens: &padded,
            behind: Behind::default(),
        };
        self.add_node(page, TreeNode::new(&edge, len));
    }

    fn add_node(&mut self, page: Page, node: TreeNode) {
        if let Some(list) = self.child_list(&node) {
            self.children.push_first(list, page);
        }
        self.nodes[page.index()] = Some(node);
        self.len += 1;
    }

    /// Returns the child list that contains a page of this node.
    fn child_list(&self, node: &TreeNode) -> Option<ChildList> {
        match node.owner {
            Owner::Public => None,
            Owner::Tenant(tenant) => Some(self.children_of(tenant, node.parent)),
        }
    }

    /// Makes `page` the most recently used of its parent's children.
    pub(crate) fn touch(&mut self, page: Page) {
        let node = self.node(page).expect("a page in the tree");
        if let Some(list) = self.child_list(node) {
            self.children.move_first(list, page);
        }
    }

    /// Removes a leaf that a tenant owns.
    pub(crate) fn remove(&mut self, page: Page) {
        let child = self.children.iter(ChildList::Page(page)).next();
        assert_eq!(child, None, "{page:?} is not a leaf");
        let node = self.nodes[page.index()].take();
        let node = node.expect("a page in the tree");
        let list = self.child_list(&node);
        self.children
            .remove(list.expect("a public page is never removed"), page);
        if node.len == PAGE_TOKENS {
            self.index.remove(self.bucket(&node.edge()), page);
        }
        self.len -= 1;
    }

    /// Returns the edge of `page` if it is in the tree. In a partial leaf, only the tokens that
    /// [`PrefixTree::tokens`] returns are valid.
    pub(crate) fn edge(&self, page: Page) -> Option<Edge<'_>> {
        self.node(page).map(TreeNode::edge)
    }

    fn node(&self, page: Page) -> Option<&TreeNode> {
        self.nodes[page.index()].as_ref()
    }

    /// Returns the valid tokens of a page in the tree: a whole page, or fewer in a partial leaf.
    pub(crate) fn tokens(&self, page: Page) -> &[TokenId] {
        let node = self.node(page).expect("a page in the tree");
        &node.tokens[..node.len]
    }

    pub(crate) fn is_public(&self, page: Page) -> bool {
        self.node(page)
            .is_some_and(|node| node.owner == Owner::Public)
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
