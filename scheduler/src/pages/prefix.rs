//! Which cached page holds which prefix: a radix tree whose stride is one page, so that a node *is* a page.
//!
//! Invariant: a prefix is found only where owner, parent page and all tokens of the page are equal.
//! Invariant: a page's parent has the same owner, or is public. So tenants never come upon each other's pages, and meet
//! only in what the operator has declared.

use std::hash::BuildHasher;

use super::children::{ChildList, ChildLists};
use super::edges::EdgeIndex;
use super::public::PublicPrefixes;
use crate::{PAGE_TOKENS, Page, PublicPrefix, TenantId, TokenId};

/// ChildLists that are compared with the wanted tokens, of the tenant's own and of public ones each.
const SCANNED: usize = 8;

/// Who may find a cached page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Owner {
    /// All tenants that may use the declared prefix.
    Public,
    Tenant(TenantId),
}

/// What a cached page holds: these tokens, after what its parent holds.
///
/// Keys and values of a token depend on everything before it, so the parent is part of the identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Edge {
    pub(crate) owner: Owner,
    pub(crate) parent: Option<Page>, // `None` at the owner's root.
    pub(crate) tokens: [TokenId; PAGE_TOKENS],
}

/// A cached page's place in the tree.
#[derive(Clone, Copy)]
struct TreeNode {
    edge: Edge,
    len: usize, // Tokens that count; fewer than a page in a partial leaf.
}

/// The edges between cached pages, from both ends.
pub(crate) struct PrefixTree<S> {
    /// All whole pages by the hash of their edge. Only probed: the hasher's random seed can decide nothing. A hit compares
    /// the whole edge.
    below: EdgeIndex,
    hasher: S,
    above: Vec<Option<TreeNode>>, // Indexed by page.
    children: ChildLists<S>,      // Public pages are not among them.
    public: PublicPrefixes,
    len: usize,
}

impl<S: BuildHasher + Clone> PrefixTree<S> {
    pub(crate) fn new(pages: usize, hasher: S) -> PrefixTree<S> {
        PrefixTree {
            below: EdgeIndex::new(pages),
            hasher: hasher.clone(),
            above: vec![None; pages],
            children: ChildLists::new(pages, hasher),
            public: PublicPrefixes::new(pages),
            len: 0,
        }
    }

    pub(crate) fn declare(&mut self, tokens: &[TokenId]) -> PublicPrefix {
        self.public.declare(tokens)
    }

    /// Whole pages of all declared prefixes.
    pub(crate) fn declared(&self) -> usize {
        self.public.len()
    }

    pub(crate) fn prefixes(&self) -> u32 {
        self.public.prefixes()
    }

    /// Pages of which `tokens` begin like one of the prefixes named.
    pub(crate) fn public_pages(&self, public: &[PublicPrefix], tokens: &[TokenId]) -> usize {
        let shared = public
            .iter()
            .map(|&prefix| self.public.shared_pages(prefix, tokens));
        shared.max().unwrap_or(0)
    }

    /// Where a tenant that may use these public prefixes has a page of these tokens.
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

    /// The pages that hold the longest cached prefix of `tokens`, first to last. Changes nothing.
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

    /// The whole page at this edge.
    pub(crate) fn get(&self, edge: &Edge) -> Option<Page> {
        self.get_hashed(edge, self.hasher.hash_one(edge))
    }

    fn get_hashed(&self, edge: &Edge, hash: u64) -> Option<Page> {
        let mut pages = self.below.of(hash);
        pages.find(|&page| self.edge(page) == Some(edge))
    }

    /// The page after `parent` that begins most like `tokens`, and how many tokens they have in common; of equals, the
    /// most recently used of the tenant's own.
    pub(crate) fn similar(
        &self,
        tenant: TenantId,
        public: &[PublicPrefix],
        parent: Option<Page>,
        tokens: &[TokenId],
    ) -> Option<(Page, usize)> {
        let declared = self.public.after(public, parent).take(SCANNED);
        let public = declared.filter_map(|&tokens| {
            self.get(&Edge {
                owner: Owner::Public,
                parent,
                tokens,
            })
        });
        let mut best = None;
        for page in self.scanned(tenant, parent).chain(public) {
            let shared = common_prefix(self.tokens(page), tokens);
            if shared > best.map_or(0, |(_, longest)| longest) {
                best = Some((page, shared));
            }
        }
        best
    }

    /// The page among the tenant's own after `parent` that begins with all of `tokens`.
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

    /// A tenant's own pages after `parent`, partial leaves included, the most recently used first.
    pub(crate) fn children(
        &self,
        tenant: TenantId,
        parent: Option<Page>,
    ) -> impl Iterator<Item = Page> + '_ {
        self.children.iter(self.under(tenant, parent))
    }

    fn under(&self, tenant: TenantId, parent: Option<Page>) -> ChildList {
        match parent {
            Some(page) if !self.is_public(page) => ChildList::Page(page),
            top => ChildList::Top(tenant, top),
        }
    }

    /// Puts a whole page into the tree, unless one is at this edge already: then returns that one.
    pub(crate) fn insert(&mut self, page: Page, edge: Edge) -> Option<Page> {
        let hash = self.hasher.hash_one(edge);
        let equal = self.get_hashed(&edge, hash);
        if equal.is_some() {
            return equal;
        }
        self.below.insert(hash, page);
        if edge.owner == Owner::Public {
            self.public.settle(page, edge.parent, &edge.tokens);
        }
        let len = PAGE_TOKENS;
        self.place(page, TreeNode { edge, len });
        None
    }

    /// Puts a page into the tree that holds fewer tokens than it could: a partial leaf, which only a scan finds.
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
        self.place(page, TreeNode { edge, len });
    }

    fn place(&mut self, page: Page, place: TreeNode) {
        self.above[page.index()] = Some(place);
        if let Some(under) = self.listed_under(&place.edge) {
            self.children.push_first(under, page);
        }
        self.len += 1;
    }

    /// The list of children in which a page of this edge stands.
    fn listed_under(&self, edge: &Edge) -> Option<ChildList> {
        match edge.owner {
            Owner::Public => None,
            Owner::Tenant(tenant) => Some(self.under(tenant, edge.parent)),
        }
    }

    /// `page` is the most recently used of its parent's children from now on.
    pub(crate) fn touch(&mut self, page: Page) {
        let edge = self.edge(page).expect("a page in the tree has an edge");
        if let Some(under) = self.listed_under(edge) {
            self.children.move_first(under, page);
        }
    }

    /// Takes a leaf of a tenant out of the tree.
    pub(crate) fn remove(&mut self, page: Page) {
        let child = self.children.iter(ChildList::Page(page)).next();
        assert_eq!(child, None, "{page:?} is not a leaf");
        let TreeNode { edge, len } = self.above[page.index()]
            .take()
            .expect("a page in the tree has an edge");
        let under = self.listed_under(&edge);
        self.children
            .remove(under.expect("public pages stay"), page);
        if len == PAGE_TOKENS {
            self.below.remove(self.hasher.hash_one(edge), page);
        }
        self.len -= 1;
    }

    /// The edge that leads to `page`, if it is in the tree. In a partial leaf, only [`PrefixTree::tokens`] of it count.
    pub(crate) fn edge(&self, page: Page) -> Option<&Edge> {
        self.above[page.index()].as_ref().map(|place| &place.edge)
    }

    /// The tokens that a page of the tree holds after its parent's: a whole page, or fewer in a partial leaf.
    pub(crate) fn tokens(&self, page: Page) -> &[TokenId] {
        let place = self.above[page.index()].as_ref();
        let place = place.expect("a page in the tree has an edge");
        &place.edge.tokens[..place.len]
    }

    pub(crate) fn is_public(&self, page: Page) -> bool {
        self.edge(page)
            .is_some_and(|edge| edge.owner == Owner::Public)
    }

    /// Pages in the tree, partial leaves included.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// How many tokens two sequences have in common at the start.
fn common_prefix(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
