//! The blocks that each machine has cached, as its cache events say.
//!
//! A block is a whole page with all pages before it. Routers do not know tenants: equal blocks of
//! two tenants are one block here, although the machine shares nothing between tenants.

use std::collections::{BTreeMap, HashMap};

use sterna_random::mix;
use sterna_scheduler::{CacheChange, PAGE_TOKENS, Page};

/// An index from blocks to machines.
pub(super) struct BlockIndex {
    holders: HashMap<u64, BTreeMap<usize, u32>>, // By hash: machines, and their pages with it.
    pages: Vec<HashMap<Page, u64>>,              // The hashes of each machine's cached pages.
}

impl BlockIndex {
    /// Creates the index of this many machines with empty caches.
    pub(super) fn new(machines: usize) -> BlockIndex {
        BlockIndex {
            holders: HashMap::new(),
            pages: vec![HashMap::new(); machines],
        }
    }

    /// Follows an event of a machine.
    pub(super) fn follow(&mut self, machine: usize, change: &CacheChange) {
        let pages = &mut self.pages[machine];
        match change {
            CacheChange::Stored(stored) => {
                let parent = stored.parent.map_or(0, |parent| pages[&parent]);
                let hash = block_hash(parent, &stored.tokens);
                pages.insert(stored.page, hash);
                let holders = self.holders.entry(hash).or_default();
                *holders.entry(machine).or_default() += 1;
            }
            CacheChange::Removed(page) => {
                let hash = pages.remove(page).expect("a removed page was stored");
                self.remove(machine, hash);
            }
        }
    }

    fn remove(&mut self, machine: usize, hash: u64) {
        let holders = self.holders.get_mut(&hash);
        let holders = holders.expect("a stored block has a holder");
        let pages = holders.get_mut(&machine).expect("the machine holds it");
        *pages -= 1;
        if *pages == 0 {
            holders.remove(&machine);
        }
        if holders.is_empty() {
            self.holders.remove(&hash);
        }
    }

    /// Returns the machines that hold the first block of `prompt`, and how many blocks from the
    /// first on each holds.
    pub(super) fn cached(&self, prompt: &[u32]) -> BTreeMap<usize, u64> {
        let mut cached = BTreeMap::new();
        let mut hash = 0;
        for (block, tokens) in (1..).zip(prompt.chunks_exact(PAGE_TOKENS)) {
            hash = block_hash(hash, tokens);
            let Some(holders) = self.holders.get(&hash) else {
                break;
            };
            let mut holds_more = false;
            for machine in holders.keys() {
                if block == 1 || cached.get(machine) == Some(&(block - 1)) {
                    cached.insert(*machine, block);
                    holds_more = true;
                }
            }
            if !holds_more {
                break;
            }
        }
        cached
    }

    /// Forgets the blocks of a machine.
    pub(super) fn forget(&mut self, machine: usize) {
        for (_, hash) in std::mem::take(&mut self.pages[machine]) {
            self.remove(machine, hash);
        }
    }
}

/// Returns the hash of a block with these tokens behind the block with the hash `parent`.
fn block_hash(parent: u64, tokens: &[u32]) -> u64 {
    let step = |hash: u64, token: &u32| mix(hash ^ u64::from(*token) ^ (1 << 40));
    tokens.iter().fold(mix(parent), step)
}
