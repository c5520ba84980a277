//! The compiled grammars of each tenant.
//!
//! Invariant: a tenant gets only grammars that it has compiled itself, so the time of a compilation
//! tells the tenant nothing about other tenants.

use sterna_scheduler::{Ledger, NoRoom, Share};

use super::constrained_output::Grammar;
use super::error::GrammarError;
use super::source::GrammarSource;

const MIB: u64 = 1 << 20;

/// What each grammar counts at least, in MiB: its worker is a process, and has a thread.
const LEAST: u64 = 4;

/// The largest grammars of a tenant together, in MiB.
const OF_TENANT: Share = Share::with_quota(64);

/// The largest grammars of all tenants together, in MiB.
const MAX_OF_ALL: usize = 512;

/// What was compiled, or why it is refused from now on.
pub(super) type Compiled = Result<Grammar, GrammarError>;

/// Compiled grammars. When the cache is full, the tenant with most memory loses the grammar that
/// was not used for longest. A tenant with no less than the others loses one of its own.
pub(super) struct GrammarCache {
    entries: Vec<Entry>, // The most recently used is last.
    places: Ledger<u32>,
}

struct Entry {
    tenant: u32,
    source: GrammarSource,
    compiled: Compiled,
    size: usize, // In MiB.
}

impl GrammarCache {
    pub(super) fn new() -> GrammarCache {
        GrammarCache {
            entries: Vec::new(),
            places: Ledger::new(MAX_OF_ALL),
        }
    }

    /// Returns what `tenant` has compiled from `source`. A grammar whose worker something else has
    /// ended is forgotten.
    pub(super) fn get(&mut self, tenant: u32, source: &GrammarSource) -> Option<Compiled> {
        let is_it = |entry: &Entry| entry.tenant == tenant && entry.source == *source;
        let index = self.entries.iter().position(is_it)?;
        let mut entry = self.entries.remove(index);
        if let Ok(grammar) = &entry.compiled {
            if let Some(limit) = grammar.excess() {
                entry.compiled = Err(GrammarError::TooCostly(limit.clone()));
            } else if !grammar.is_alive() {
                self.places.give_back(tenant, entry.size);
                return None;
            }
        }
        let compiled = entry.compiled.clone();
        self.entries.push(entry);
        Some(compiled)
    }

    /// Adds a grammar of `tenant`, unless the grammar is larger than the tenant's part.
    pub(super) fn insert(&mut self, tenant: u32, source: GrammarSource, compiled: Compiled) {
        let memory = compiled.as_ref().map_or(0, Grammar::memory);
        let size = memory.div_ceil(MIB).max(LEAST) as usize;
        loop {
            let leaving = match self.places.room_for(tenant, OF_TENANT, size) {
                Ok(None) => break,
                Ok(Some(largest)) => largest,
                Err(_) if self.places.used_by(tenant) > 0 => tenant,
                Err(NoRoom::OfOwner) => return,
                Err(NoRoom::OfAll) => self.entries[0].tenant, // Each of many tenants has some.
            };
            let oldest = (self.entries.iter()).position(|entry| entry.tenant == leaving);
            let entry = self.entries.remove(oldest.expect("the tenant has some"));
            self.places.give_back(leaving, entry.size);
        }
        self.places.take(tenant, OF_TENANT, size);
        self.entries.push(Entry {
            tenant,
            source,
            compiled,
            size,
        });
    }

    /// Returns the memory that counts, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.places.used() as u64 * MIB
    }
}
