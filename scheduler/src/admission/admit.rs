//! Decides which waiting requests start.
//!
//! A request waits for one of these:
//! - its turn: a higher band, a tenant with less virtual time, an earlier request of its tenant, or
//!   a request with more cached pages comes first;
//! - a place: `max_running` of the server and of its tenant;
//! - time: one more decode would miss the inter-token target, or too many prefills run;
//! - memory: free pages, or pages under its tenant's cap;
//! - a prefix: a running prefill is about to compute more of the request's prefix than is cached;
//! - a blocked head: a request that came first and waits for memory. A request within its tenant's
//!   guarantee takes no memory from it and does not wait.
//!
//! After a step that preempted a sequence, nothing starts unless nothing runs.
//!
//! ```text
//! while the server has a place:
//!     if choose() returns a request: start it, and add its load
//!     else: stop
//!
//! choose():
//!     for each band, the band furthest behind its share first:
//!         candidates = the blocked head, if it was bypassed 256 times; then 16 requests in turn
//!         for each candidate that is not barred, and that has time if the band has a head:
//!             if it awaits a prefix: go on with the next candidate
//!             if it is the first that awaits no prefix: it is the head of the band
//!                 if it lacks pages: it is the blocked head too, unless the band has one
//!                 if it was bypassed 32 times, or the policy is first come, first served:
//!                     if it is ready: return it
//!                     if it is at its tenant's cap: bar its tenant
//!                     if it lacks pages: bar its tenant, and from now on all beyond a guarantee
//!                     if it lacks time: bar its tenant; return none instead if it was bypassed
//!                         256 times, or the policy is first come, first served
//!             if it is ready: best = the candidate, if it has more cached pages than best
//!         if there is a best: return it
//!     return none
//! ```
//!
//! When `choose` returns a request, every other head and blocked head so far counts a bypass,
//! except a blocked head that awaits a prefix. A start within a guarantee counts no bypass while a
//! head without memory bars all else.
//!
//! Three alternatives were rejected. If nothing could bypass a request that does not fit, places
//! would stay empty while a long prompt waits for memory. If requests could bypass a long prompt
//! without a limit, a stream of short ones would keep it waiting for ever (rule S11 of the
//! simulation). If memory were reserved for `max_tokens` instead of the usual length, fewer answers
//! would run at a time (`memory-pressure` in `benches/README.md`).
//!
//! Invariant: choosing a request changes no page. Its cached pages are pinned when it starts.
//!
//! Invariant: the first request of its band that does not fit is bypassed a limited number of
//! times. Then no request of its band starts before it, except within a guarantee. If it waits only
//! for sequences of its own tenant, only its tenant waits with it.

use super::load::{RunningLoad, is_guaranteed};
use crate::queue::Waiting;
use crate::sequence::{Sequence, pages_for};
use crate::state::SchedulerState;
use crate::{Band, Order, PAGE_TOKENS, SequenceId};

/// Running prefills that a waiting request is compared with.
const COMPARED_PREFILLS: usize = 8;

/// Times that other requests may bypass the first request of a band.
const PATIENCE: u32 = 32;

/// Times that other requests may bypass a blocked head, or a request that lacks only time. The
/// limit is higher because most bypassing requests are of tenants that run less than their share.
const LONG_PATIENCE: u32 = 256;

/// The memory of admissions.
#[derive(Default)]
pub(crate) struct Admission {
    candidates: Vec<Waiting>, // Kept between calls for its memory.
    /// By band, a request that was once the first of the band and found no memory.
    blocked_heads: [Option<SequenceId>; 3],
}

/// The cached pages that begin the tokens of a waiting request.
#[derive(Clone, Copy, PartialEq, Eq)]
struct CachedPrefix {
    pages: usize,
    /// Free and evictable pages that the request takes for its known tokens. Its cached pages that
    /// could be evicted are among them.
    needed: usize,
}

/// Whether a candidate can start now.
#[derive(PartialEq, Eq)]
enum Readiness {
    /// A running prefill is about to compute more of its prefix than is cached.
    AwaitsPrefix,
    /// Its tenant may not hold as many pages. It waits for sequences of its own tenant.
    AtTenantCap,
    LacksPages,
    LacksTime,
    Ready(CachedPrefix),
}

/// Whether other requests may still bypass a candidate.
enum HeadPatience {
    Ample,
    /// No other request may bypass it, except while the candidate lacks only time.
    Short,
    /// No other request may bypass it.
    Exhausted,
}

/// What becomes of one band's candidates. `head` is the first of them that awaits no prefix.
enum BandChoice {
    Start { slot: usize, head: Option<usize> },
    None { head: Option<usize> },
    Reserved, // For the head, which cannot start yet.
}

/// Whose memory an admission may take.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MemoryLeft {
    Any,
    /// A head without memory may not be bypassed any more. Only requests within their tenants'
    /// guarantees may start.
    Guaranteed,
}

/// The requests of one band that an admission may bypass.
#[derive(Clone, Copy, Default)]
struct BandHeads {
    head: Option<usize>,
    blocked: Option<usize>,
}

impl Admission {
    /// Starts waiting requests while there are places, time and memory.
    pub(crate) fn admit(&mut self, state: &mut SchedulerState) {
        let max_running = state.conditions.limits.max_running as usize;
        if state.queue.len() == 0 || state.sequences.running().len() >= max_running {
            return;
        }
        let mut load = RunningLoad::of(state);
        while state.sequences.running().len() < max_running {
            let Some(slot) = self.choose(state, &load) else {
                return;
            };
            state.start(slot);
            load.add(&state.sequences[slot], state);
        }
    }

    /// Returns the next request to start, or `None` for now.
    fn choose(&mut self, state: &mut SchedulerState, load: &RunningLoad) -> Option<usize> {
        let mut heads = [BandHeads::default(); 3];
        let mut memory = MemoryLeft::Any;
        for (index, band) in state.queue.bands().into_iter().enumerate() {
            let blocked = self.blocked_head(band, state);
            let blocked_sequence = blocked.map(|slot| &state.sequences[slot]);
            let overdue = blocked_sequence.filter(|s| s.record.times_bypassed >= LONG_PATIENCE);
            let mut candidates = std::mem::take(&mut self.candidates);
            candidates.clear();
            candidates.extend(overdue.map(Sequence::as_waiting));
            state.queue.candidates(band, &mut candidates);
            let choice = self.choose_among(&candidates, band, &mut memory, state, load);
            self.candidates = candidates;
            match choice {
                BandChoice::Start { slot, head } => {
                    heads[index] = BandHeads { head, blocked };
                    if memory == MemoryLeft::Any {
                        note_bypassed(&heads, slot, state);
                    }
                    return Some(slot);
                }
                BandChoice::Reserved => return None,
                BandChoice::None { head } => heads[index] = BandHeads { head, blocked },
            }
        }
        None
    }

    /// Returns the blocked head of a band, if it still waits and its tenant may run it.
    fn blocked_head(&mut self, band: Band, state: &SchedulerState) -> Option<usize> {
        let blocked = &mut self.blocked_heads[band as usize];
        let sequence = state.sequences.get((*blocked)?).filter(|sequence| {
            let tenant = state.queue.tenant(sequence.tenant);
            tenant.policy.band == band && !sequence.is_running
        });
        let Some(sequence) = sequence else {
            *blocked = None;
            return None;
        };
        let tenant = state.queue.tenant(sequence.tenant);
        tenant.may_run_more().then_some(sequence.id.slot())
    }

    /// Makes a request the blocked head of its band, unless an earlier one still is.
    fn block_head(&mut self, band: Band, slot: usize, state: &SchedulerState) {
        let id = state.sequences[slot].id;
        self.blocked_head(band, state); // Forgets a request that no longer waits.
        self.blocked_heads[band as usize].get_or_insert(id);
    }

    fn choose_among(
        &mut self,
        candidates: &[Waiting],
        band: Band,
        memory: &mut MemoryLeft,
        state: &mut SchedulerState,
        load: &RunningLoad,
    ) -> BandChoice {
        let mut head = None;
        let mut best: Option<(usize, usize)> = None; // Cached pages, and the slot.
        let mut barred_tenant = None; // Its requests wait for the head.
        for &Waiting { slot, .. } in candidates {
            let tenant = state.sequences[slot].tenant;
            let has_time = load.has_time_for(slot, state);
            if barred_tenant == Some(tenant) || !has_time && head.is_some() {
                continue;
            }
            if *memory == MemoryLeft::Guaranteed
                && !is_guaranteed(slot, cached_prefix(slot, state).needed, state)
            {
                continue;
            }
            let readiness = classify(slot, has_time, load, state);
            let is_head = head.is_none() && readiness != Readiness::AwaitsPrefix;
            let mut patience = HeadPatience::Ample;
            if is_head {
                head = Some(slot);
                patience = patience_of(slot, state);
                if readiness == Readiness::LacksPages {
                    self.block_head(band, slot, state);
                }
            }
            use {HeadPatience::*, Readiness::*};
            match (readiness, patience) {
                (AwaitsPrefix, _) => {
                    state.log.deferred();
                    ask_for_state(slot, state);
                }
                (Ready(cached), Ample) => {
                    if best.is_none_or(|(most, _)| cached.pages > most) {
                        best = Some((cached.pages, slot));
                    }
                }
                (Ready(_), Short | Exhausted) => return BandChoice::Start { slot, head },
                (LacksPages, Short | Exhausted) => {
                    barred_tenant = Some(tenant);
                    *memory = MemoryLeft::Guaranteed;
                }
                (LacksTime, Exhausted) => return BandChoice::Reserved,
                (LacksTime, Short) | (AtTenantCap, Short | Exhausted) => {
                    barred_tenant = Some(tenant);
                }
                (AtTenantCap | LacksPages | LacksTime, Ample) => {}
            }
        }
        match best {
            Some((_, slot)) => BandChoice::Start { slot, head },
            None => BandChoice::None { head },
        }
    }
}

/// Returns whether other requests may bypass the head of a band.
fn patience_of(slot: usize, state: &SchedulerState) -> HeadPatience {
    let is_strict = state.conditions.policy.order == Order::FirstCome;
    match state.sequences[slot].record.times_bypassed {
        LONG_PATIENCE.. => HeadPatience::Exhausted,
        _ if is_strict => HeadPatience::Exhausted,
        PATIENCE.. => HeadPatience::Short,
        _ => HeadPatience::Ample,
    }
}

/// Returns whether the candidate in `slot` can start now, and if not, what it lacks.
fn classify(slot: usize, has_time: bool, load: &RunningLoad, state: &SchedulerState) -> Readiness {
    let prefix = cached_prefix(slot, state);
    if awaits_prefix(slot, prefix, state) {
        Readiness::AwaitsPrefix
    } else if prefix.needed > state.pool.remaining_cap(state.sequences[slot].tenant) {
        Readiness::AtTenantCap
    } else if !load.has_memory_for(slot, prefix.needed, state) {
        Readiness::LacksPages
    } else if !has_time {
        Readiness::LacksTime
    } else {
        Readiness::Ready(prefix)
    }
}

/// Returns whether a running prefill is about to compute more of this request's prefix than is
/// cached now.
fn awaits_prefix(slot: usize, prefix: CachedPrefix, state: &SchedulerState) -> bool {
    prefill_ahead(slot, prefix, state).is_some()
}

/// Returns a running prefill that is about to compute more of a waiting request's prefix than is
/// cached now, and how many pages they share. If sequences have states, the prefill must be able
/// to keep its state there.
fn prefill_ahead(
    slot: usize,
    prefix: CachedPrefix,
    state: &SchedulerState,
) -> Option<(usize, usize)> {
    let sequence = &state.sequences[slot];
    let has_states = state.pool.slabs.is_used();
    let prefills = state.sequences.iter_running();
    let mut prefills = prefills
        .filter(|other| other.is_prefill())
        .take(COMPARED_PREFILLS);
    prefills.find_map(|other| {
        let pages = sequence.shareable_with(other);
        let is_kept = !has_states || other.may_keep(pages * PAGE_TOKENS);
        (pages > prefix.pages && is_kept).then_some((other.id.slot(), pages))
    })
}

/// Asks the running prefill that a request waits for to keep its state where their prompts diverge.
fn ask_for_state(slot: usize, state: &mut SchedulerState) {
    let prefix = cached_prefix(slot, state);
    if state.pool.slabs.is_used()
        && let Some((ahead, pages)) = prefill_ahead(slot, prefix, state)
    {
        state.sequences[ahead].ask_for_state(pages * PAGE_TOKENS);
    }
}

/// Returns the pages that the cache holds for a waiting request.
fn cached_prefix(slot: usize, state: &SchedulerState) -> CachedPrefix {
    let sequence = &state.sequences[slot];
    let mut prefix = CachedPrefix {
        pages: 0,
        needed: pages_for(sequence.len()),
    };
    for page in sequence.cached_pages(&state.pool) {
        prefix.pages += 1;
        prefix.needed -= usize::from(state.pool.is_pinned(page));
    }
    prefix
}

/// Notes that the request in `started` bypasses the head and the blocked head of each band.
fn note_bypassed(heads: &[BandHeads; 3], started: usize, state: &mut SchedulerState) {
    for &BandHeads { head, blocked } in heads {
        let blocked = blocked.filter(|_| blocked != head);
        for slot in [head, blocked].into_iter().flatten() {
            if slot == started {
                continue;
            }
            let may_await = Some(slot) == blocked;
            if may_await && awaits_prefix(slot, cached_prefix(slot, state), state) {
                continue;
            }
            state.sequences[slot].bypass();
            #[cfg(debug_assertions)]
            check_patience(slot, state);
        }
    }
}

/// S11: a waiting request is bypassed at most `LONG_PATIENCE` times, except while its own tenant is
/// at its page cap, and except by requests within a guarantee, which are not counted.
#[cfg(debug_assertions)]
fn check_patience(slot: usize, state: &SchedulerState) {
    let sequence = &state.sequences[slot];
    let needed = cached_prefix(slot, state).needed;
    assert!(
        sequence.record.times_bypassed <= LONG_PATIENCE
            || needed > state.pool.remaining_cap(sequence.tenant),
        "S11: {:?} is bypassed for ever",
        sequence.id
    );
}
