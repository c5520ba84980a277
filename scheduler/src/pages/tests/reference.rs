//! A slow reference for `PagePool`: every query looks at all pages.

use std::cmp::Reverse;

use crate::pages::{Owner, PageQuota};
use crate::{PAGE_TOKENS, Page, PublicPrefix, SequenceId, TenantId, TokenId};

/// The state of one page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PageState {
    Free,
    Private(SequenceId, TenantId),
    Tree(CachedPage),
}

/// A page in the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CachedPage {
    pub(crate) owner: Owner,
    pub(crate) parent: Option<Page>,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) used: u64,   // When it entered the tree or was last pinned.
    pub(crate) cooled: u64, // When its last pin was removed.
}

/// The reason for an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EvictionCause {
    AtCap,
    OverShare,
    NothingFree,
    NotGuaranteed,
}

/// The reference pool.
pub(crate) struct ReferencePool {
    pub(crate) states: Vec<PageState>, // Indexed by page.
    pub(crate) pins: Vec<u32>,
    pub(crate) quotas: Vec<PageQuota>,
    pub(crate) declared: Vec<Vec<TokenId>>, // Whole pages.
    clock: u64,
}

impl ReferencePool {
    pub(crate) fn new(pages: usize) -> ReferencePool {
        ReferencePool {
            states: vec![PageState::Free; pages],
            pins: vec![0; pages],
            quotas: Vec::new(),
            declared: Vec::new(),
            clock: 0,
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    pub(crate) fn pages(&self) -> impl Iterator<Item = Page> + use<> {
        (0..self.states.len() as u32).map(Page::new)
    }

    pub(crate) fn cached(&self, page: Page) -> Option<&CachedPage> {
        match &self.states[page.index()] {
            PageState::Tree(cached) => Some(cached),
            _ => None,
        }
    }

    fn cached_mut(&mut self, page: Page) -> &mut CachedPage {
        match &mut self.states[page.index()] {
            PageState::Tree(cached) => cached,
            other => panic!("{page:?} is {other:?}"),
        }
    }

    pub(crate) fn payer(&self, page: Page) -> Option<TenantId> {
        match self.states[page.index()] {
            PageState::Free => None,
            PageState::Private(_, tenant) => Some(tenant),
            PageState::Tree(CachedPage { owner, .. }) => match owner {
                Owner::Public => None,
                Owner::Tenant(tenant) => Some(tenant),
            },
        }
    }

    pub(crate) fn held(&self, tenant: TenantId) -> u32 {
        let is_own = |&page: &Page| self.payer(page) == Some(tenant);
        self.pages().filter(is_own).count() as u32
    }

    pub(crate) fn in_use(&self, tenant: TenantId) -> u32 {
        self.held(tenant) - self.cold(Some(tenant)).len() as u32
    }

    /// Returns the unpinned cached pages of one tenant or of all, the coldest first.
    pub(crate) fn cold(&self, tenant: Option<TenantId>) -> Vec<Page> {
        let mut cold: Vec<(u64, Page)> = Vec::new();
        for page in self.pages().filter(|page| self.pins[page.index()] == 0) {
            if let Some(cached) = self.cached(page)
                && (tenant.is_none() || self.payer(page) == tenant)
            {
                cold.push((cached.cooled, page));
            }
        }
        cold.sort_unstable();
        cold.into_iter().map(|(_, page)| page).collect()
    }

    pub(crate) fn unmet_guarantees(&self, except: TenantId) -> usize {
        let tenants = (0..self.quotas.len()).filter(|&tenant| tenant != except.index());
        let unmet = |tenant: usize| {
            let in_use = self.in_use(TenantId(tenant as u32));
            self.quotas[tenant].guaranteed.saturating_sub(in_use) as usize
        };
        tenants.map(unmet).sum()
    }

    fn is_over_share(&self, tenant: TenantId) -> bool {
        let mut active = 0;
        for (index, quota) in self.quotas.iter().enumerate() {
            if self.held(TenantId(index as u32)) > 0 {
                active += u64::from(quota.weight);
            }
        }
        let weight = u64::from(self.quotas[tenant.index()].weight);
        let part = self.states.len() as u64 * weight / active.max(1);
        u64::from(self.held(tenant)) > part.max(4)
    }

    /// Returns all tokens from the root to the end of a page, and whether all of them are public.
    fn path(&self, page: Option<Page>) -> (Vec<TokenId>, bool) {
        let Some(cached) = page.and_then(|page| self.cached(page)) else {
            return (Vec::new(), true);
        };
        let (mut tokens, is_public) = self.path(cached.parent);
        tokens.extend(&cached.tokens);
        (tokens, is_public && cached.owner == Owner::Public)
    }

    pub(crate) fn owner(
        &self,
        tenant: TenantId,
        public: &[PublicPrefix],
        parent: Option<Page>,
        tokens: &[TokenId],
    ) -> Owner {
        let (mut path, is_public) = self.path(parent);
        path.extend(tokens);
        let is_declared = |prefix: &PublicPrefix| {
            let declared = &self.declared[prefix.0 as usize];
            declared.starts_with(&path)
        };
        if is_public && public.iter().any(is_declared) {
            Owner::Public
        } else {
            Owner::Tenant(tenant)
        }
    }

    pub(crate) fn get(
        &self,
        owner: Owner,
        parent: Option<Page>,
        tokens: &[TokenId],
    ) -> Option<Page> {
        assert_eq!(tokens.len(), PAGE_TOKENS);
        self.pages().find(|&page| {
            self.cached(page).is_some_and(|cached| {
                (cached.owner, cached.parent) == (owner, parent) && cached.tokens == tokens
            })
        })
    }

    pub(crate) fn find(
        &self,
        tenant: TenantId,
        public: &[PublicPrefix],
        tokens: &[TokenId],
    ) -> Vec<Page> {
        let mut found: Vec<Page> = Vec::new();
        for tokens in tokens.chunks_exact(PAGE_TOKENS) {
            let parent = found.last().copied();
            let owner = self.owner(tenant, public, parent, tokens);
            match self.get(owner, parent, tokens) {
                Some(page) => found.push(page),
                None => break,
            }
        }
        found
    }

    /// Returns a tenant's own pages after `parent`, the most recently used first.
    pub(crate) fn children(&self, tenant: TenantId, parent: Option<Page>) -> Vec<Page> {
        let mut children: Vec<(Reverse<u64>, Page)> = Vec::new();
        for page in self.pages() {
            if let Some(cached) = self.cached(page)
                && (cached.owner, cached.parent) == (Owner::Tenant(tenant), parent)
            {
                children.push((Reverse(cached.used), page));
            }
        }
        children.sort_unstable();
        children.into_iter().map(|(_, page)| page).collect()
    }

    pub(crate) fn similar(
        &self,
        tenant: TenantId,
        public: &[PublicPrefix],
        parent: Option<Page>,
        tokens: &[TokenId],
    ) -> Option<(Page, usize)> {
        let mut compared = self.children(tenant, parent);
        compared.truncate(8);
        for page in self.pages() {
            if let Some(cached) = self.cached(page)
                && (cached.owner, cached.parent) == (Owner::Public, parent)
                && self.owner(tenant, public, parent, &cached.tokens) == Owner::Public
            {
                compared.push(page);
            }
        }
        let shared = |&page: &Page| {
            let pairs = self
                .path(Some(page))
                .0
                .into_iter()
                .skip(self.path(parent).0.len());
            pairs.zip(tokens).take_while(|(a, b)| a == *b).count()
        };
        let longest = compared.iter().map(shared).max()?;
        let page = compared
            .iter()
            .copied()
            .find(|page| shared(page) == longest)?;
        (longest > 0).then_some((page, longest))
    }

    /// Returns the pages to evict before the tenant gets a page, and the reason for each, or `None`
    /// if the tenant can get no page.
    pub(crate) fn victims(&self, tenant: TenantId) -> Option<Vec<(Page, EvictionCause)>> {
        let max = self.quotas[tenant.index()].max;
        let is_free = |state: &&PageState| **state == PageState::Free;
        let free = self.states.iter().filter(is_free).count();
        let (all, own) = (self.cold(None), self.cold(Some(tenant)));
        if self.in_use(tenant) >= max || free + all.len() == 0 {
            return None;
        }
        let excess = (self.held(tenant) + 1).saturating_sub(max) as usize;
        if excess > 0 {
            let coldest = own[..excess].iter();
            return Some(coldest.map(|&page| (page, EvictionCause::AtCap)).collect());
        }
        if free > 0 {
            return Some(Vec::new());
        }
        match own.first() {
            Some(&page) if self.is_over_share(tenant) => {
                Some(vec![(page, EvictionCause::OverShare)])
            }
            _ => {
                let may_leave = |page: &&Page| {
                    let payer = self.payer(**page).expect("a cold page has a payer");
                    payer == tenant || self.held(payer) > self.quotas[payer.index()].guaranteed
                };
                let coldest = all.iter().find(may_leave).unwrap_or(&all[0]);
                let cause = if *coldest == all[0] {
                    EvictionCause::NothingFree
                } else {
                    EvictionCause::NotGuaranteed
                };
                Some(vec![(*coldest, cause)])
            }
        }
    }

    pub(crate) fn evict(&mut self, page: Page) {
        let is_parent = |&child: &Page| {
            let cached = self.cached(child);
            cached.is_some_and(|cached| cached.parent == Some(page))
        };
        assert_eq!(self.pages().find(is_parent), None, "{page:?} is not a leaf");
        self.states[page.index()] = PageState::Free;
    }

    pub(crate) fn give(&mut self, page: Page, sequence: SequenceId, tenant: TenantId) {
        assert_eq!(self.states[page.index()], PageState::Free);
        self.states[page.index()] = PageState::Private(sequence, tenant);
        self.pins[page.index()] = 1;
    }

    pub(crate) fn pin(&mut self, page: Page) {
        self.pins[page.index()] += 1;
        let now = self.tick();
        self.cached_mut(page).used = now;
    }

    pub(crate) fn release(&mut self, page: Page) {
        self.pins[page.index()] -= 1;
        let now = self.tick();
        match &mut self.states[page.index()] {
            PageState::Tree(cached) if self.pins[page.index()] == 0 => cached.cooled = now,
            PageState::Tree(_) => {}
            state => *state = PageState::Free,
        }
    }

    pub(crate) fn insert(
        &mut self,
        page: Page,
        owner: Owner,
        parent: Option<Page>,
        tokens: &[TokenId],
    ) {
        let used = self.tick();
        self.pins[page.index()] += u32::from(owner == Owner::Public);
        self.states[page.index()] = PageState::Tree(CachedPage {
            owner,
            parent,
            tokens: tokens.to_vec(),
            used,
            cooled: 0,
        });
    }
}
