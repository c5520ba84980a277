//! Prefixes that the operator has made public, page by page.
//!
//! Invariant: prefixes that begin with the same pages share them, so each page that is declared is declared once.

use crate::{PAGE_TOKENS, Page, PublicPrefix, TokenId};

/// A page of some declared prefixes, computed or not.
struct DeclaredPage {
    parent: Option<usize>, // Among the declared pages.
    depth: usize,          // Pages before it.
    tokens: [TokenId; PAGE_TOKENS],
}

/// All declared prefixes, and which of their pages stand where.
pub(crate) struct PublicPrefixes {
    declared: Vec<DeclaredPage>,
    paths: Vec<Vec<usize>>, // Indexed by prefix: its declared pages, first to last.
    standing: Vec<Option<usize>>, // Indexed by page: which declared page it holds.
}

impl PublicPrefixes {
    pub(crate) fn new(pages: usize) -> PublicPrefixes {
        PublicPrefixes {
            declared: Vec::new(),
            paths: Vec::new(),
            standing: vec![None; pages],
        }
    }

    /// Keeps the whole pages of `tokens`.
    pub(crate) fn declare(&mut self, tokens: &[TokenId]) -> PublicPrefix {
        let (whole_pages, _) = tokens.as_chunks::<PAGE_TOKENS>();
        let mut path: Vec<usize> = Vec::with_capacity(whole_pages.len());
        for (depth, &tokens) in whole_pages.iter().enumerate() {
            let parent = path.last().copied();
            let known = self.position(parent, &tokens);
            path.push(known.unwrap_or(self.declared.len()));
            if known.is_none() {
                self.declared.push(DeclaredPage {
                    parent,
                    depth,
                    tokens,
                });
            }
        }
        self.paths.push(path);
        PublicPrefix(self.paths.len() as u32 - 1)
    }

    fn position(&self, parent: Option<usize>, tokens: &[TokenId; PAGE_TOKENS]) -> Option<usize> {
        let is_it = |page: &DeclaredPage| page.parent == parent && page.tokens == *tokens;
        self.declared.iter().position(is_it)
    }

    /// Pages of all prefixes.
    pub(crate) fn len(&self) -> usize {
        self.declared.len()
    }

    /// How many were declared.
    pub(crate) fn prefixes(&self) -> u32 {
        self.paths.len() as u32
    }

    /// Whole pages in which `tokens` begin like a prefix.
    pub(crate) fn shared_pages(&self, prefix: PublicPrefix, tokens: &[TokenId]) -> usize {
        let (pages, _) = tokens.as_chunks::<PAGE_TOKENS>();
        let path = &self.paths[prefix.0 as usize];
        let pairs = path
            .iter()
            .map(|&page| &self.declared[page].tokens)
            .zip(pages);
        pairs
            .take_while(|(declared, tokens)| declared == tokens)
            .count()
    }

    /// What these prefixes go on with after `parent`: nothing, when it is not a public page of theirs.
    pub(crate) fn after<'a>(
        &'a self,
        public: &'a [PublicPrefix],
        parent: Option<Page>,
    ) -> impl Iterator<Item = &'a [TokenId; PAGE_TOKENS]> + 'a {
        let above = parent.map(|page| self.standing[page.index()]);
        let depth = match above {
            None => Some(0),
            Some(above) => above.map(|page| self.declared[page].depth + 1),
        };
        public.iter().filter_map(move |prefix| {
            let path = &self.paths[prefix.0 as usize];
            let next = &self.declared[*path.get(depth?)?];
            (next.parent == above.flatten()).then_some(&next.tokens)
        })
    }

    /// `page` now holds the declared page with these tokens after `parent`, for good.
    pub(crate) fn settle(
        &mut self,
        page: Page,
        parent: Option<Page>,
        tokens: &[TokenId; PAGE_TOKENS],
    ) {
        let above = parent.map(|parent| {
            let above = self.standing[parent.index()];
            above.expect("the parent of a public page is public")
        });
        let declared = self.position(above, tokens);
        assert!(declared.is_some(), "{page:?} was never declared");
        self.standing[page.index()] = declared;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_share_their_first_pages() {
        let page = |token: TokenId| [token; PAGE_TOKENS];
        let mut public = PublicPrefixes::new(1);
        let long = public.declare(&[page(1), page(2), page(3)].concat());
        let other = public.declare(&[page(1), page(4), page(6)].concat()[..40]);
        let elsewhere = public.declare(&[page(5), page(2)].concat());
        assert_eq!(public.len(), 6);
        let all = [long, other, elsewhere];
        let root: Vec<_> = public.after(&all, None).copied().collect();
        assert_eq!(root, [page(1), page(1), page(5)]);
        let first = Some(Page::new(0));
        assert_eq!(public.after(&all, first).count(), 0, "not a public page");
        public.settle(Page::new(0), None, &page(1));
        let below: Vec<_> = public.after(&all, first).copied().collect();
        assert_eq!(below, [page(2), page(4)]);
        assert_eq!(public.after(&[elsewhere], first).count(), 0);
    }
}
