//! The compiled grammars of each tenant.
//!
//! Invariant: a tenant gets only grammars that it has compiled itself, so the time of a compilation
//! tells it nothing about other tenants.

use super::grammar::Grammar;
use super::source::GrammarSource;

/// The most grammars of a tenant.
const MAX_OF_TENANT: usize = 16;

/// The most grammars of all tenants.
const MAX_OF_ALL: usize = 128;

/// Compiled grammars. When it is full, the one that was not used for longest leaves.
#[derive(Default)]
pub(super) struct GrammarCache {
    entries: Vec<Entry>, // The most recently used is last.
}

struct Entry {
    tenant: u32,
    source: GrammarSource,
    grammar: Grammar,
}

impl GrammarCache {
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
        let own = |entry: &Entry| entry.tenant == tenant;
        let own_count = self.entries.iter().filter(|entry| own(entry)).count();
        if own_count >= MAX_OF_TENANT {
            let oldest = self.entries.iter().position(own);
            self.entries.remove(oldest.expect("the tenant has some"));
        } else if self.entries.len() >= MAX_OF_ALL {
            let tenant = self.largest_tenant();
            let of_tenant = |entry: &Entry| entry.tenant == tenant;
            let oldest = self.entries.iter().position(of_tenant);
            self.entries.remove(oldest.expect("the tenant has some"));
        }
        self.entries.push(Entry {
            tenant,
            source,
            grammar,
        });
    }

    /// Returns the tenant with the most grammars, so that nobody empties the cache of the others.
    fn largest_tenant(&self) -> u32 {
        let count = |tenant| {
            let own = self.entries.iter().filter(|entry| entry.tenant == tenant);
            own.count()
        };
        let tenants = self.entries.iter().map(|entry| entry.tenant);
        tenants.max_by_key(|tenant| count(*tenant)).unwrap_or(0)
    }
}
