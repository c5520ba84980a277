//! Memory for the running sequences: an earlier sequence gets pages that later ones lose. A
//! sequence within its tenant's guarantee gets pages from tenants that exceed their guarantees.
//!
//! Invariant: a tenant that uses fewer pages than its guarantee gets its next page. Tenants that
//! use more than their guarantee give the page, and only such tenants give pages to other tenants.
//!
//! Invariant: when no sequence could advance, the leader, which is the earliest arrival in the
//! highest band that runs, takes its page from the last one. Apart from guarantees, the leader gets
//! every page that it needs. So it ends, and in turn every sequence ends. The running order is
//! fixed when a sequence is admitted.

use std::cmp::Reverse;

use super::plan::StepPlan;
use crate::TenantId;
use crate::limits::PREFILL_FLOOR;
use crate::pages::PagePool;
use crate::sequence::Sequence;
use crate::state::SchedulerState;

/// Times that a sequence may lose its pages while other sequences could give theirs.
const MAX_PREEMPTIONS: u32 = 3;

/// Adds the next `tokens` tokens of a running sequence to the plan, or as many as it gets pages
/// for. If no page is available, later sequences lose theirs. Returns how many tokens it adds.
pub(super) fn plan_row(
    plan: &mut StepPlan,
    state: &mut SchedulerState,
    slot: usize,
    tokens: usize,
) -> usize {
    let sequence = &state.sequences[slot];
    let tenant = sequence.tenant;
    if sequence.lacks_pages_for(tokens) {
        let needed = sequence.pages_of_row(tokens);
        while state.pool.available(tenant) < needed
            && let Some(victim) = victim_of(slot, state)
        {
            #[cfg(debug_assertions)]
            check_victim(slot, victim, state);
            plan.remove(&state.sequences[victim]);
            state.preempt(victim);
        }
    }
    let spare = spare_slabs(state);
    let sequence = &mut state.sequences[slot];
    let tokens = sequence.take_pages(tokens, &mut state.pool, &mut state.batch.tables);
    let tokens = sequence.whole_rows(tokens);
    if tokens == 0 || !sequence.take_slabs(tokens, &mut state.pool, spare) {
        return 0;
    }
    plan.add(sequence, tokens);
    tokens
}

/// Returns how many slabs must stay for the rows of other sequences before a state is kept: one for
/// each running prompt.
///
/// The first row of a step that needs a slab always gets one: each running sequence holds at most
/// one slab between two steps, its own or a snapshot that it is about to read, and there are more
/// slabs than running sequences.
fn spare_slabs(state: &SchedulerState) -> usize {
    if !state.pool.slabs.is_used() {
        return 0;
    }
    let running = state.sequences.iter_running();
    running.filter(|sequence| sequence.is_prefill()).count()
}

/// Plans the leader, which found no page, when no other sequence could advance either. All others
/// then wait to exceed their guarantees, so the last of them give way.
pub(super) fn plan_leader(plan: &mut StepPlan, state: &mut SchedulerState) {
    let running = state.sequences.running();
    let Some(&leader) = running.first() else {
        return;
    };
    let tenant = state.sequences[leader].tenant;
    let tokens = state.sequences[leader].least_row(PREFILL_FLOOR);
    while state.pool.available(tenant) < state.sequences[leader].pages_of_row(tokens)
        && let Some(&last) = state.sequences.running()[1..].last()
    {
        state.preempt(last);
    }
    plan.set_budget(0); // So that the step has no drafts: its decode may be late.
    plan_row(plan, state, leader, tokens);
}

/// Which running sequences may give their pages to another one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Givers {
    /// Sequences of other tenants that use more than their guarantee, wherever they stand: the
    /// taker is within its own guarantee.
    AnyBeyondGuarantee,
    /// Later sequences of the taker's tenant, which is at its page cap.
    OwnLater,
    /// Later sequences of the taker's tenant, and of tenants that use more than their guarantee.
    Later,
}

impl Givers {
    fn of(taker: TenantId, pool: &PagePool) -> Givers {
        if pool.guaranteed_left(taker) > 0 {
            Givers::AnyBeyondGuarantee
        } else if pool.remaining_cap(taker) == 0 {
            Givers::OwnLater
        } else {
            Givers::Later
        }
    }

    fn include(self, tenant: TenantId, taker: TenantId, pool: &PagePool) -> bool {
        let is_own = tenant == taker;
        match self {
            Givers::AnyBeyondGuarantee => !is_own && pool.exceeds_guarantee(tenant),
            Givers::OwnLater => is_own,
            Givers::Later => is_own || pool.exceeds_guarantee(tenant),
        }
    }
}

/// Returns the sequence that loses its pages to the one in `slot`, which comes before it in the
/// running order or is within its tenant's guarantee. Only sequences whose end frees a page are
/// considered. Among these the victim is chosen in this order:
/// 1. It comes after the taker.
/// 2. It has lost its pages fewer than `MAX_PREEMPTIONS` times.
/// 3. It is in the lowest band.
/// 4. Its tenant was served most.
/// 5. It has the fewest pages to compute again.
/// 6. It arrived last.
///
/// A tenant at its page cap takes pages only from itself. If no single end frees a page, because
/// several sequences share each page, the first sequence (of all, or of a tenant at its cap) and a
/// sequence within a guarantee take from the last one.
fn victim_of(slot: usize, state: &SchedulerState) -> Option<usize> {
    let tenant = state.sequences[slot].tenant;
    let givers = Givers::of(tenant, &state.pool);
    let place = state.sequences.place(slot);
    let running = state.sequences.running();
    let from = match givers {
        Givers::AnyBeyondGuarantee => 0,
        Givers::OwnLater | Givers::Later => place + 1,
    };
    let mut eligible = running[from..]
        .iter()
        .copied()
        .filter(|&other| givers.include(state.sequences[other].tenant, tenant, &state.pool));
    let rank = state.sequences[slot].rank();
    let giving = eligible
        .clone()
        .filter(|&other| exclusive_pages(&state.sequences[other], state) > 0);
    let best = giving.min_by_key(|&other| {
        let sequence = &state.sequences[other];
        let served = state.queue.tenant(sequence.tenant).virtual_time;
        (
            sequence.rank() < rank,
            sequence.record.times_preempted >= MAX_PREEMPTIONS,
            Reverse(sequence.band),
            Reverse(served),
            exclusive_pages(sequence, state),
            Reverse(sequence.arrival),
        )
    });
    let is_first = match givers {
        Givers::AnyBeyondGuarantee => true,
        Givers::OwnLater => {
            let mut earlier = running[..place].iter();
            earlier.all(|&other| state.sequences[other].tenant != tenant)
        }
        Givers::Later => place == 0,
    };
    best.or_else(|| eligible.next_back().filter(|_| is_first))
}

/// Returns how many pages are in no other page table. The sequence's end would free them, and after
/// a preemption it would have to compute them again.
fn exclusive_pages(sequence: &Sequence, state: &SchedulerState) -> usize {
    let pages = state.batch.tables.get(sequence.table()).iter();
    pages.filter(|&&page| state.pool.is_exclusive(page)).count()
}

/// S15: a tenant gives pages to another one only if it uses more than it is guaranteed.
///
/// S6: a sequence gives its pages only to an earlier sequence, or to a tenant within its guarantee.
/// So the leader gives pages only to such a tenant. After `MAX_PREEMPTIONS` losses a sequence gives
/// pages only if no sequence with fewer losses could give a page.
#[cfg(debug_assertions)]
fn check_victim(slot: usize, victim: usize, state: &SchedulerState) {
    let taker = &state.sequences[slot];
    let victim = &state.sequences[victim];
    let id = victim.id;
    let is_own = victim.tenant == taker.tenant;
    let exceeds = state.pool.exceeds_guarantee(victim.tenant);
    assert!(is_own || exceeds, "S15: {id:?} is within its guarantee");
    if state.pool.guaranteed_left(taker.tenant) > 0 {
        return;
    }
    assert!(victim.rank() > taker.rank(), "S6: {id:?} is earlier");
    let leader = state.sequences.running()[0];
    assert_ne!(leader, id.slot(), "S6: {id:?} leads");
    if victim.record.times_preempted < MAX_PREEMPTIONS {
        return;
    }
    let takes_from_all = state.pool.remaining_cap(taker.tenant) > 0;
    let spared = state.sequences.iter_running().find(|other| {
        other.rank() > taker.rank()
            && (other.tenant == taker.tenant
                || takes_from_all && state.pool.exceeds_guarantee(other.tenant))
            && other.record.times_preempted < MAX_PREEMPTIONS
            && exclusive_pages(other, state) > 0
    });
    let spared = spared.map(|other| other.id);
    assert_eq!(spared, None, "S6: {id:?} again, and not this one");
}
