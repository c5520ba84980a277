//! The prefixes that the operator has declared public, page by page.
//!
//! Invariant: prefixes that begin with the same pages share those pages, so no page is declared
//! twice.

use crate::{PAGE_TOKENS, Page, PublicPrefix, TokenId};

/// One page of one or more declared prefixes, computed or not.
struct DeclaredPage {
    parent: Option<usize>, // An index into the declared pages.
    depth: usize,          // The number of pages before this page.
    tokens: [TokenId; PAGE_TOKENS],
}

/// All declared prefixes, and the pages of KV memory that hold them.
pub(crate) struct PublicPrefixes {
    declared: Vec<DeclaredPage>,
    paths: Vec<Vec<usize>>, // Indexed by prefix: its declared pages, first to last.
    held: Vec<Option<usize>>, // Indexed by page: the declared page that it holds.
}

impl PublicPrefixes {
    pub(crate) fn new(pages: usize) -> PublicPrefixes {
        PublicPrefixes {
            declared: Vec::new(),
            paths: Vec::new(),
            held: vec![None; pages],
        }
    }

    /// Declares the whole pages of `tokens` as a prefix.
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
        let is_same = |page: &DeclaredPage| page.parent == parent && page.tokens == *tokens;
        self.declared.iter().position(is_same)
    }

    /// Returns the number of pages of all prefixes.
    pub(crate) fn len(&self) -> usize {
        self.declared.len()
    }

    /// Returns the number of declared prefixes.
    pub(crate) fn prefixes(&self) -> u32 {
        self.paths.len() as u32
    }

    /// Returns how many whole pages of `tokens` are the start of one of these prefixes.
    pub(crate) fn shared_pages(&self, public: &[PublicPrefix], tokens: &[TokenId]) -> usize {
        let (pages, _) = tokens.as_chunks::<PAGE_TOKENS>();
        let shared = public.iter().map(|prefix| {
            let path = self.paths[prefix.0 as usize].iter().zip(pages);
            path.take_while(|&(&page, tokens)| self.declared[page].tokens == *tokens)
                .count()
        });
        shared.max().unwrap_or(0)
    }

    /// Returns the pages with which these prefixes continue after `parent`. A prefix that does not
    /// contain `parent` has none.
    pub(crate) fn after<'a>(
        &'a self,
        public: &'a [PublicPrefix],
        parent: Option<Page>,
    ) -> impl Iterator<Item = &'a [TokenId; PAGE_TOKENS]> + 'a {
        let above = parent.map(|page| self.held[page.index()]);
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

    /// Records that `page` holds the declared page of these tokens after `parent`.
    pub(crate) fn record(
        &mut self,
        page: Page,
        parent: Option<Page>,
        tokens: &[TokenId; PAGE_TOKENS],
    ) {
        let above = parent.map(|parent| {
            let above = self.held[parent.index()];
            above.expect("the parent of a public page is public")
        });
        let declared = self.position(above, tokens);
        assert!(declared.is_some(), "{page:?} was never declared");
        self.held[page.index()] = declared;
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
        public.record(Page::new(0), None, &page(1));
        let below: Vec<_> = public.after(&all, first).copied().collect();
        assert_eq!(below, [page(2), page(4)]);
        assert_eq!(public.after(&[elsewhere], first).count(), 0);
    }
}
