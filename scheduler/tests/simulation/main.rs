//! Seeded random worlds run the scheduler for thousands of steps, and every step is checked.
//!
//! The fake model stores tokens instead of keys and values: each position of a KV page holds one
//! token and a hash of everything before it. Every step reads each sequence's history back through
//! its page table, compares it with the expected tokens, and answers with a hash of what it read.
//! So a page that is shared wrongly, evicted while in use or overwritten is found at the next read.
//!
//! Environment variables:
//! - `STERNA_SIM_STEPS` sets the number of steps. The default makes more than a million operations
//!   (calls that change the scheduler); `STERNA_SIM_STEPS=37500000 cargo sim` makes 1e8.
//! - `STERNA_SEED` sets the seed of the first world; each next world adds one. A world that fails
//!   prints its seed.
//!
//! # The rules
//!
//! An assertion begins with the name of the rule that it checks. The scheduler itself checks M1 to
//! M6 and M9 between calls (`Scheduler::check`), S6 and S15 when it preempts, and S11 when it
//! admits.
//!
//! Memory:
//! - M1: Every page is free, private to one living sequence, or in the prefix tree.
//! - M2: A page's pin count is the number of page tables that contain it and pending copies that
//!   read it, plus one if the page is public.
//! - M3: A private page is in exactly one page table, and no row writes a page that another row
//!   reads.
//! - M4: The cold list holds each unpinned tree page once, and children before their parents.
//! - M5: The parent of a tree page is a whole page of the same owner or a public page, and it is
//!   pinned if its child is pinned.
//! - M6: A sequence reads only pages that hold its own tokens and belong to its tenant or to a
//!   public prefix.
//! - M7: A plan evicts no more pages than it takes.
//! - M8: After the last request has ended, no page is private and only public pages are pinned.
//! - M9: A row's page table covers exactly the positions up to the end of the row.
//!
//! Service:
//! - S1: A step is predicted to fit its time budget, or it holds no draft tokens and at most one
//!   prompt chunk of at most 8 tokens beside its decodes. The number of tokens is bounded too.
//! - S2: Every running decode is in every step, unless it is preempted, needs a page that it cannot
//!   get, or pauses. A pause lasts at most seven steps with fair-share order, and at most three
//!   with another order.
//! - S3: A request is accepted only if it fits in memory alone, and a plan is idle only if no
//!   request is left.
//! - S4: At most 64 later requests of the same client of a tenant are admitted before a waiting
//!   request, unless that one has a band of its own, or may have waited for a prefix that another
//!   sequence was computing.
//! - S5: Between two tenants of one band that always have requests waiting, the lead in service is
//!   at most the slack and the cost of what one tenant may have running.
//! - S6: A preempted sequence comes after the sequence that takes its pages, unless that one is
//!   within its tenant's guarantee. A sequence that was preempted three times is preempted again
//!   only if no other sequence can give a page.
//! - S7: The charges of a step add up to its predicted time.
//! - S8: Cancelling a request makes its pages available again.
//! - S9: After `drain`, every request ends.
//! - S10: A refused request leaves the scheduler as it was. No request of a tenant without a place
//!   is accepted.
//! - S11: A request that was first in its band and lacks memory is bypassed at most 256 times,
//!   unless the cap of its own tenant leaves it too few pages. Requests within the guarantees of
//!   their tenants do not count.
//! - S12: No tenant and no step exceeds its limits, except by what a tenant had before its limits
//!   were lowered.
//!
//! - S13: With fair-share order, a tenant with nothing waiting is refused for lack of room only if
//!   no other tenant has two requests waiting. Only a request that has never run is displaced.
//! - S14: A tenant's output tokens exceed its token rate by at most the output of one request.
//! - S15: A tenant that uses no more than its guaranteed pages gives no page to another tenant, and
//!   its decodes never wait for a page while it uses no more.
//! - S16: A step's prediction contains the sampling of its rows, and no tenant is charged for the
//!   sampling of others.
//! - S17: With fair-share order, the clients of a tenant that always have requests waiting start
//!   equally many equal ones, apart from the slack. A request with a lower band than its tenant's
//!   starts only when no other request of the tenant waits.
//!
//! Ledgers of shares, which worlds of their own use:
//! - L1: The owners hold no more than the ledger's size.
//! - L2: An owner is refused for its quota exactly if it would hold more.
//! - L3: The owner that gives way has the most before its last unit, for its weight, and more than
//!   the owner that gets the units.
//! - L4: The ledger counts what each owner took and did not give back.
//! - L5: An owner is refused only if there is too little room once all others are cut down to its
//!   level, and then nobody has given way. One that wants no more than an equal part is not
//!   refused, and one that holds nothing only if nobody holds two.
//!
//! Determinism, with the numbers of ARCHITECTURE.md:
//! - D2: A request gets the same tokens as if it ran alone.
//! - D6: Equal calls give equal plans, so one seed gives one trace.

mod blocks;
mod checks;
mod clients;
mod clock;
mod coverage;
mod crowd;
mod exhaustive;
mod fair;
mod guaranteed;
mod model;
mod rules;
mod shares;
mod states;
mod terms;
mod traffic;
mod world;

use std::collections::BTreeSet;

use clients::ClientWorld;
use coverage::Coverage;
use crowd::CrowdedWorld;
use fair::FairWorld;
use guaranteed::GuaranteedWorld;
use shares::{LedgerCoverage, LedgerWorld};
use world::World;

const STEPS: u64 = 600_000;

const LEDGERS: u64 = 1000;

#[test]
fn every_rule_holds_in_random_worlds() {
    let steps = from_env("STERNA_SIM_STEPS", STEPS);
    let first = first_seed();
    let mut coverage = Coverage::default();
    let mut worlds = 0;
    while coverage.steps < steps {
        World::new(first + worlds).run(&mut coverage);
        worlds += 1;
    }
    let operations = coverage.operations();
    eprintln!("STERNA_SEED={first}: {operations} operations in {worlds} worlds, {coverage:?}");
    assert!(operations >= 5 * steps / 3, "only {operations} operations");
    coverage.assert_enough();
}

#[test]
fn busy_tenants_are_served_by_weight() {
    let first = first_seed();
    for seed in first..first + 20 {
        FairWorld::new(seed).run();
    }
}

#[test]
fn the_clients_of_a_tenant_take_turns() {
    let first = first_seed();
    for seed in first..first + 20 {
        ClientWorld::new(seed).run();
    }
}

#[test]
fn newcomers_do_not_bypass_a_large_request_forever() {
    let first = first_seed();
    for seed in first..first + 4 {
        CrowdedWorld::new(seed).run();
    }
}

#[test]
fn a_tenant_gets_its_guaranteed_pages_from_one_that_fills_the_memory() {
    let first = first_seed();
    for seed in first..first + 20 {
        GuaranteedWorld::new(seed).run();
    }
}

#[test]
fn every_owner_finds_its_share_in_random_ledgers() {
    let first = first_seed();
    let mut coverage = LedgerCoverage::default();
    for seed in first..first + LEDGERS {
        LedgerWorld::new(seed).run(&mut coverage);
    }
    eprintln!("STERNA_SEED={first}: {coverage:?}");
    let LedgerCoverage {
        taken,
        gave_way,
        quota_used_up,
        full,
    } = coverage;
    let least = [taken, gave_way, quota_used_up, full].into_iter().min();
    assert!(least >= Some(LEDGERS), "too little happened: {coverage:?}");
}

#[test]
fn equal_seeds_give_equal_traces() {
    let first = first_seed();
    let mut traces = BTreeSet::new();
    for seed in first..first + 10 {
        let trace = World::new(seed).run(&mut Coverage::default());
        let repeated = World::new(seed).run(&mut Coverage::default());
        assert_eq!(trace, repeated, "D6: STERNA_SEED={seed}");
        traces.insert(trace);
    }
    assert_eq!(traces.len(), 10, "different seeds give different traces");
}

/// S10: a second world in which the refused requests are never submitted has the same trace.
#[test]
fn refused_requests_change_nothing() {
    let first = first_seed();
    let mut refused = 0;
    for seed in first..first + 40 {
        let mut world = World::new(seed);
        let trace = world.run(&mut Coverage::default());
        let mut quiet = World::new(seed);
        quiet
            .submissions
            .skipped
            .clone_from(&world.submissions.refused);
        refused += world.submissions.refused.len();
        let repeated = quiet.run(&mut Coverage::default());
        assert_eq!(trace, repeated, "S10: STERNA_SEED={seed}");
    }
    assert!(refused > 1000, "only {refused} requests were refused");
}

fn first_seed() -> u64 {
    sterna_random::seed_from_env().unwrap_or(1)
}

fn from_env(name: &str, default: u64) -> u64 {
    let number = |text: String| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} must be a whole number; got {text:?}"))
    };
    std::env::var(name).map_or(default, number)
}
