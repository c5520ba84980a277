//! Seeded worlds, thousands of steps: does anything ever go wrong?
//!
//! The trick is in the fake model: its KV pages hold the tokens themselves, each with a hash of everything before it. Every
//! step reads each sequence's whole history back through its page table, compares it with the truth, and answers with a
//! hash of what it read. A page that is shared wrongly, evicted in use or written by two shows at once.
//!
//! `STERNA_SIM_STEPS` sets the number of steps; `STERNA_SEED` the first world's seed, each next world adding one. A world
//! that fails prints its own.

mod exhaustive;
mod model;
mod world;

use std::collections::BTreeSet;

use world::World;

const STEPS: u64 = 600_000;

#[test]
fn nothing_ever_goes_wrong() {
    let steps = from_env("STERNA_SIM_STEPS", STEPS);
    let first = from_env("STERNA_SEED", 1);
    let mut seen = Counts::default();
    let mut worlds = 0;
    while seen.steps < steps {
        World::new(first + worlds).run(&mut seen);
        worlds += 1;
    }
    eprintln!("STERNA_SEED={first}: {worlds} worlds, {seen:?}");
    seen.assert_enough();
}

#[test]
fn equal_seeds_give_equal_traces() {
    let first = from_env("STERNA_SEED", 1);
    let mut traces = BTreeSet::new();
    for seed in first..first + 10 {
        let trace = World::new(seed).run(&mut Counts::default());
        assert_eq!(trace, World::new(seed).run(&mut Counts::default()));
        traces.insert(trace);
    }
    assert_eq!(traces.len(), 10, "other seeds give other traces");
}

fn from_env(name: &str, default: u64) -> u64 {
    let number = |text: String| text.parse().unwrap_or_else(|_| panic!("{name} is {text}"));
    std::env::var(name).map_or(default, number)
}

/// What the worlds have exercised.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) steps: u64,
    pub(crate) dropped_steps: u64,
    pub(crate) failed_steps: u64,
    pub(crate) failed_rows: u64,
    pub(crate) cancels: u64,
    pub(crate) cancels_while_waiting: u64,
    pub(crate) refusals: u64,
    pub(crate) resets: u64,
    pub(crate) finished: u64,
    pub(crate) chunks: u64,
    pub(crate) prefix_hits: u64,
    pub(crate) evictions: u64,
    pub(crate) preemptions: u64,
    pub(crate) redirects: u64,
    pub(crate) deferrals: u64,
    pub(crate) copies: u64,
    pub(crate) drafted: u64,
    pub(crate) accepted: u64,
    pub(crate) public_hits: u64,
    pub(crate) late: u64,
    pub(crate) reloads: u64,
    pub(crate) rate_limited: u64,
    pub(crate) tenant_queue_full: u64,
    pub(crate) overloaded: u64,
    pub(crate) too_late: u64,
}

impl Counts {
    /// A run that did not meet the difficult cases has shown nothing about them.
    pub(crate) fn assert_enough(&self) {
        let often = [
            ("dropped steps", self.dropped_steps),
            ("cancels", self.cancels),
            ("chunks", self.chunks),
            ("prefix hits", self.prefix_hits),
            ("evictions", self.evictions),
            ("preemptions", self.preemptions),
            ("redirects to an equal page", self.redirects),
            ("deferrals behind a prefill", self.deferrals),
            ("copies of pages", self.copies),
            ("accepted drafts", self.accepted),
            ("rejected drafts", self.drafted - self.accepted),
        ];
        for (what, count) in often {
            assert!(count >= self.steps / 300, "only {count} {what}");
        }
        let sometimes = [
            ("failed steps", self.failed_steps),
            ("failed rows", self.failed_rows),
            ("cancels while waiting", self.cancels_while_waiting),
            ("refusals", self.refusals),
            ("resets", self.resets),
            ("readings of another tenant's public page", self.public_hits),
            ("requests that took too long", self.late),
            ("other terms for tenants", self.reloads),
            ("refusals for a rate", self.rate_limited),
            ("refusals for a tenant's queue", self.tenant_queue_full),
            ("refusals for the whole queue", self.overloaded),
            ("refusals for a deadline", self.too_late),
        ];
        for (what, count) in sometimes {
            assert!(count >= self.steps / 1000, "only {count} {what}");
        }
    }
}
