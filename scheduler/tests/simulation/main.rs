//! Seeded worlds, thousands of steps: does anything ever go wrong?
//!
//! The trick is in the fake model: its KV pages hold the tokens themselves, each with a hash of everything before it. Every
//! step reads each sequence's whole history back through its page table, compares it with the truth, and answers with a
//! hash of what it read. A page that is shared wrongly, evicted in use or written by two shows at once.
//!
//! `STERNA_SIM_STEPS` sets the number of steps; `STERNA_SEED` the first world's seed, each next world adding one. A world
//! that fails prints its own. An ordinary run makes a million operations and more (calls that change the scheduler), and
//! says how many; `STERNA_SIM_STEPS=37500000 cargo sim` makes 1e8.
//!
//! Assertions begin with the name of the invariant they hold: M of memory, S of service, D of determinism. Those that can
//! be seen from within a single call are in the scheduler's `check`, `preempt` and `admit`.

mod checks;
mod clock;
mod crowd;
mod exhaustive;
mod fair;
mod model;
mod rules;
mod terms;
mod world;

use std::collections::BTreeSet;

use crowd::CrowdedWorld;
use fair::FairWorld;
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
    let operations = seen.operations();
    eprintln!("STERNA_SEED={first}: {operations} operations in {worlds} worlds, {seen:?}");
    assert!(operations >= 5 * steps / 3, "only {operations} operations");
    seen.assert_enough();
}

#[test]
fn busy_tenants_are_served_by_weight() {
    let first = from_env("STERNA_SEED", 1);
    for seed in first..first + 20 {
        FairWorld::new(seed).run();
    }
}

#[test]
fn nobody_is_passed_for_ever() {
    let first = from_env("STERNA_SEED", 1);
    for seed in first..first + 4 {
        CrowdedWorld::new(seed).run();
    }
}

#[test]
fn equal_seeds_give_equal_traces() {
    let first = from_env("STERNA_SEED", 1);
    let mut traces = BTreeSet::new();
    for seed in first..first + 10 {
        let trace = World::new(seed).run(&mut Counts::default());
        let again = World::new(seed).run(&mut Counts::default());
        assert_eq!(trace, again, "D1: STERNA_SEED={seed}");
        traces.insert(trace);
    }
    assert_eq!(traces.len(), 10, "other seeds give other traces");
}

/// Who is refused might as well not have asked: S10, seen in all that comes after.
#[test]
fn refusals_leave_no_trace() {
    let first = from_env("STERNA_SEED", 1);
    let mut refused = 0;
    for seed in first..first + 40 {
        let mut world = World::new(seed);
        let trace = world.run(&mut Counts::default());
        let mut quiet = World::new(seed);
        quiet.skipped.clone_from(&world.refused);
        refused += world.refused.len();
        let same = quiet.run(&mut Counts::default());
        assert_eq!(trace, same, "S10: STERNA_SEED={seed}");
    }
    assert!(refused > 1000, "only {refused} were refused");
}

fn from_env(name: &str, default: u64) -> u64 {
    let number = |text: String| text.parse().unwrap_or_else(|_| panic!("{name} is {text}"));
    std::env::var(name).map_or(default, number)
}

/// What the worlds have exercised.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) submits: u64,
    pub(crate) plans: u64,
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
    pub(crate) calibrations: u64,
    pub(crate) corrected: u64, // Steps after which predictions are far from the cost model.
    pub(crate) rests: u64,     // Steps in which a decode rested.
    pub(crate) longest_rest: u64,
    pub(crate) preempted_again: u64, // For more than the third time.
    pub(crate) rate_limited: u64,
    pub(crate) tenant_queue_full: u64,
    pub(crate) overloaded: u64,
    pub(crate) too_late: u64,
}

impl Counts {
    /// Calls that change the scheduler, each of which everything was checked after.
    fn operations(&self) -> u64 {
        let steps = self.plans + self.steps; // Each step is committed, dropped or fails.
        self.submits + self.cancels + steps + self.resets + self.reloads + self.calibrations
    }

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
            ("predictions that were corrected much", self.corrected),
            ("steps in which a decode rested", self.rests),
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
        let now_and_then = [
            ("other cost models", self.calibrations),
            ("fourth preemptions of one", self.preempted_again),
        ];
        for (what, count) in now_and_then {
            assert!(count >= self.steps / 10_000, "only {count} {what}");
        }
        let has_rested = self.longest_rest == 7 || self.steps < 100_000;
        assert!(has_rested, "only {} rests in a row", self.longest_rest);
    }
}
