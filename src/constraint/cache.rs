//! The compiled grammars of each tenant.
//!
//! Invariant: a tenant gets only grammars that it has compiled itself, so the time of a compilation
//! tells the tenant nothing about other tenants.

use sterna_scheduler::{Ledger, Share};

use super::grammar::Grammar;
use super::source::GrammarSource;

/// The most grammars of a tenant.
const OF_TENANT: Share = Share::with_quota(16);

/// The most grammars of all tenants.
const MAX_OF_ALL: usize = 128;

/// Compiled grammars. When the cache is full, the tenant with most grammars loses the one that was
/// not used for longest. A tenant with no fewer than the others loses one of its own.
pub(super) struct GrammarCache {
    entries: Vec<Entry>, // The most recently used is last.
    places: Ledger<u32>,
}

struct Entry {
    tenant: u32,
    source: GrammarSource,
    grammar: Grammar,
}

impl GrammarCache {
    pub(super) fn new() -> GrammarCache {
        GrammarCache {
            entries: Vec::new(),
            places: Ledger::new(MAX_OF_ALL),
        }
    }

    /// Returns the grammar that `tenant` has compiled from `source`.
    pub(super) fn get(&mut self, tenant: u32, source: &GrammarSource) -> Option<Grammar> {
        let is_it = |entry: &Entry| entry.tenant == tenant && entry.source == *source;
        let index = self.entries.iter().position(is_it)?;
        let entry = self.entries.remove(index);
        let grammar = entry.grammar.clone();
        self.entries.push(entry);
        Some(grammar)
    }

    /// Adds a grammar of `tenant`.
    pub(super) fn insert(&mut self, tenant: u32, source: GrammarSource, grammar: Grammar) {
        if self.get(tenant, &source).is_some() {
            return; // Two requests have compiled it at the same time.
        }
        let leaving = match self.places.room_for(tenant, OF_TENANT, 1) {
            Ok(largest) => largest,
            Err(_) if self.places.used_by(tenant) > 0 => Some(tenant),
            Err(_) => Some(self.entries[0].tenant), // Each of many tenants has one.
        };
        if let Some(leaving) = leaving {
            let oldest = (self.entries.iter()).position(|entry| entry.tenant == leaving);
            self.entries.remove(oldest.expect("the tenant has some"));
            self.places.give_back(leaving, 1);
        }
        self.places.take(tenant, OF_TENANT, 1);
        self.entries.push(Entry {
            tenant,
            source,
            grammar,
        });
    }
}
