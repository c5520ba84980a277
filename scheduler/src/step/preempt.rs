//! Memory for the running sequences: an earlier one gets pages that later ones lose.
//!
//! Invariant: the leader, which is the earliest arrival in the highest band that runs, gets every
//! page that it needs. So it ends, and in turn every sequence ends. The running order is fixed when
//! a sequence is admitted.

use std::cmp::Reverse;

use super::plan::StepPlan;
use crate::sequence::Sequence;
use crate::state::SchedulerState;

/// Times that a sequence may lose its pages while others could give theirs.
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
        while state.pool.available(tenant) == 0
            && let Some(victim) = victim_of(slot, state)
        {
            #[cfg(debug_assertions)]
            check_victim(slot, victim, state);
            plan.remove(&state.sequences[victim]);
            state.preempt(victim);
        }
    }
    let sequence = &mut state.sequences[slot];
    let tokens = sequence.take_pages(tokens, &mut state.pool, &mut state.batch.tables);
    if tokens > 0 {
        plan.add(sequence, tokens);
    }
    tokens
}

/// Returns the sequence that loses its pages to the one in `slot`, which comes before it in the
/// running order. Only sequences whose end frees a page are considered. Among these the victim is
/// chosen in this order:
/// 1. It has lost its pages fewer than `MAX_PREEMPTIONS` times.
/// 2. It is in the lowest band.
/// 3. Its tenant was served most.
/// 4. It has the fewest pages to compute again.
/// 5. It arrived last.
///
/// A tenant at its page cap takes pages only from itself. If no single end frees a page, because
/// several sequences share each page, the first sequence (of all, or of a tenant at its cap) takes
/// from the last one.
fn victim_of(slot: usize, state: &SchedulerState) -> Option<usize> {
    let tenant = state.sequences[slot].tenant;
    let at_cap = state.pool.in_use(tenant) >= state.pool.cap(tenant);
    let is_eligible = |other: &usize| !at_cap || state.sequences[*other].tenant == tenant;
    let place = state.sequences.place(slot);
    let running = state.sequences.running();
    let mut later = running[place + 1..].iter().copied().filter(is_eligible);
    let giving = later
        .clone()
        .filter(|&other| exclusive_pages(&state.sequences[other], state) > 0);
    let best = giving.min_by_key(|&other| {
        let sequence = &state.sequences[other];
        let served = state.queue.tenant(sequence.tenant).virtual_time;
        (
            sequence.record.times_preempted >= MAX_PREEMPTIONS,
            Reverse(sequence.band),
            Reverse(served),
            exclusive_pages(sequence, state),
            Reverse(sequence.arrival),
        )
    });
    let is_first = !running[..place].iter().any(is_eligible);
    best.or_else(|| later.next_back().filter(|_| is_first))
}

/// Returns how many pages are in no other page table. The sequence's end would free them, and after
/// a preemption it would have to compute them again.
fn exclusive_pages(sequence: &Sequence, state: &SchedulerState) -> usize {
    let pages = state.batch.tables.get(sequence.table()).iter();
    pages.filter(|&&page| state.pool.is_exclusive(page)).count()
}

/// S6: a sequence gives its pages only to an earlier one, so the leader never gives any. After
/// `MAX_PREEMPTIONS` losses it gives them only if no sequence with fewer losses could give a page.
#[cfg(debug_assertions)]
fn check_victim(slot: usize, victim: usize, state: &SchedulerState) {
    let taker = &state.sequences[slot];
    let victim = &state.sequences[victim];
    let id = victim.id;
    assert!(victim.rank() > taker.rank(), "S6: {id:?} is earlier");
    let leader = state.sequences.running()[0];
    assert_ne!(leader, id.slot(), "S6: {id:?} leads");
    if victim.record.times_preempted < MAX_PREEMPTIONS {
        return;
    }
    let takes_from_all = state.pool.remaining_cap(taker.tenant) > 0;
    let spared = state.sequences.iter_running().find(|other| {
        other.rank() > taker.rank()
            && (takes_from_all || other.tenant == taker.tenant)
            && other.record.times_preempted < MAX_PREEMPTIONS
            && exclusive_pages(other, state) > 0
    });
    let spared = spared.map(|other| other.id);
    assert_eq!(spared, None, "S6: {id:?} again, and not this one");
}
