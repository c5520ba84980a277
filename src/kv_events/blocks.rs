//! Which blocks readers know, and under which hashes.
//!
//! Invariant: readers hear of a block after its parent, and of its removal before the removal of
//! its parent.

use std::collections::HashMap;

use clap::ValueEnum;
use sha2::{Digest, Sha256};
use sterna_scheduler::{CacheChange, PAGE_TOKENS, Page, StoredPage, TenantId, TokenId};

/// Whose blocks readers hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scope {
    /// The blocks of the public prefixes.
    Public,
    /// The blocks of every tenant.
    All,
}

/// What readers hear.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum BlockEvent {
    /// A block is cached now.
    Stored {
        hash: u64,
        parent: Option<u64>,
        tokens: [TokenId; PAGE_TOKENS],
        salt: Option<String>,
    },
    /// A block is no longer cached.
    Removed { hash: u64 },
}

/// A block that readers know.
struct KnownBlock {
    hash: u64,
    is_public: bool,
}

/// The blocks that readers know.
pub(super) struct Blocks {
    scope: Scope,
    known: HashMap<Page, KnownBlock>,
    /// The number of pages of each hash. Where a block of a model that sees whole blocks goes on
    /// behind a page, there is a page for each way in which it goes on.
    pages: HashMap<u64, u32>,
}

impl Blocks {
    pub(super) fn new(scope: Scope) -> Blocks {
        Blocks {
            scope,
            known: HashMap::new(),
            pages: HashMap::new(),
        }
    }

    /// Returns what readers hear of a change.
    pub(super) fn follow(&mut self, change: &CacheChange) -> Option<BlockEvent> {
        match change {
            CacheChange::Stored(stored) => self.store(stored),
            CacheChange::Removed(page) => {
                let KnownBlock { hash, .. } = self.known.remove(page)?;
                let pages = self.pages.get_mut(&hash).expect("a known block has a page");
                *pages -= 1;
                if *pages > 0 {
                    return None;
                }
                self.pages.remove(&hash);
                Some(BlockEvent::Removed { hash })
            }
        }
    }

    fn store(&mut self, stored: &StoredPage) -> Option<BlockEvent> {
        if self.scope == Scope::Public && stored.tenant.is_some() {
            return None;
        }
        let parent = stored.parent.map(|parent| &self.known[&parent]);
        let is_first_of_tenant = parent.is_none_or(|parent| parent.is_public);
        let salt = stored.tenant.filter(|_| is_first_of_tenant).and_then(salt);
        let parent = parent.map(|parent| parent.hash);
        let hash = hash(parent, salt.as_deref(), &stored.tokens);
        let is_public = stored.tenant.is_none();
        self.known
            .insert(stored.page, KnownBlock { hash, is_public });
        let pages = self.pages.entry(hash).or_default();
        *pages += 1;
        (*pages == 1).then_some(BlockEvent::Stored {
            hash,
            parent,
            tokens: stored.tokens,
            salt,
        })
    }
}

/// Returns what tells the blocks of a tenant from equal ones of others: its number in the tenants
/// file, from 1. A server without tenants has only tenant 0, and needs no salt.
fn salt(tenant: TenantId) -> Option<String> {
    (tenant != TenantId(0)).then(|| format!("tenant-{}", tenant.0))
}

/// Returns the hash of a block: the first 64 bits of the SHA-256 of the parent's hash, the salt and
/// the tokens. It is the same on all servers with the same model and tenants file.
fn hash(parent: Option<u64>, salt: Option<&str>, tokens: &[TokenId]) -> u64 {
    let mut digest = Sha256::new();
    digest.update(parent.unwrap_or(0).to_be_bytes());
    digest.update(salt.unwrap_or_default());
    digest.update([0]);
    for token in tokens {
        digest.update(token.to_be_bytes());
    }
    let digest = digest.finalize();
    let (first, _) = digest.split_first_chunk().expect("a digest has 32 bytes");
    u64::from_be_bytes(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(page: u32, parent: Option<u32>, tenant: Option<u32>, token: TokenId) -> CacheChange {
        CacheChange::Stored(StoredPage {
            page: Page::new(page),
            parent: parent.map(Page::new),
            tenant: tenant.map(TenantId),
            tokens: [token; PAGE_TOKENS],
        })
    }

    fn hash_of(event: Option<BlockEvent>) -> u64 {
        match event {
            Some(BlockEvent::Stored { hash, .. } | BlockEvent::Removed { hash }) => hash,
            None => panic!("readers hear nothing"),
        }
    }

    #[test]
    fn equal_prefixes_have_equal_hashes_and_tenants_have_their_own() {
        let mut blocks = Blocks::new(Scope::All);
        let first = hash_of(blocks.follow(&stored(1, None, Some(1), 7)));
        let then = hash_of(blocks.follow(&stored(2, Some(1), Some(1), 8)));
        let other = blocks.follow(&stored(3, None, Some(2), 7));
        let Some(BlockEvent::Stored { salt, hash, .. }) = other else {
            panic!("a block is stored");
        };
        assert_eq!(salt.as_deref(), Some("tenant-2"));
        assert_ne!(hash, first);
        assert_eq!(
            hash_of(blocks.follow(&CacheChange::Removed(Page::new(2)))),
            then
        );
        // The same prefix in another page.
        assert_eq!(
            hash_of(blocks.follow(&stored(9, Some(1), Some(1), 8))),
            then
        );
        assert_ne!(
            hash_of(blocks.follow(&stored(4, Some(3), Some(2), 8))),
            then
        );
    }

    #[test]
    fn a_block_is_cached_as_long_as_one_of_its_pages() {
        let mut blocks = Blocks::new(Scope::All);
        let first = hash_of(blocks.follow(&stored(1, None, Some(1), 7)));
        assert_eq!(blocks.follow(&stored(2, None, Some(1), 7)), None);
        // Equal tokens after either page are one block too.
        let child = hash_of(blocks.follow(&stored(3, Some(1), Some(1), 8)));
        assert_eq!(blocks.follow(&stored(4, Some(2), Some(1), 8)), None);
        let mut remove = |page| blocks.follow(&CacheChange::Removed(Page::new(page)));
        assert_eq!(remove(3), None);
        assert_eq!(remove(1), None);
        assert_eq!(remove(4), Some(BlockEvent::Removed { hash: child }));
        assert_eq!(remove(2), Some(BlockEvent::Removed { hash: first }));
    }

    #[test]
    fn readers_of_public_blocks_hear_of_no_other() {
        let mut blocks = Blocks::new(Scope::Public);
        let public = blocks.follow(&stored(1, None, None, 7));
        assert!(matches!(
            public,
            Some(BlockEvent::Stored { salt: None, .. })
        ));
        assert_eq!(blocks.follow(&stored(2, Some(1), Some(1), 8)), None);
        assert_eq!(blocks.follow(&stored(3, Some(2), Some(1), 8)), None);
        assert_eq!(blocks.follow(&CacheChange::Removed(Page::new(3))), None);
    }

    #[test]
    fn only_the_first_block_of_a_tenant_has_a_salt() {
        let mut blocks = Blocks::new(Scope::All);
        let salt_of = |event| match event {
            Some(BlockEvent::Stored { salt, .. }) => salt,
            other => panic!("{other:?}"),
        };
        assert_eq!(salt_of(blocks.follow(&stored(1, None, None, 7))), None);
        let own = salt_of(blocks.follow(&stored(2, Some(1), Some(3), 8)));
        assert_eq!(own.as_deref(), Some("tenant-3"));
        assert_eq!(
            salt_of(blocks.follow(&stored(4, Some(2), Some(3), 8))),
            None
        );
        assert_eq!(salt_of(blocks.follow(&stored(5, None, Some(0), 8))), None);
    }
}
