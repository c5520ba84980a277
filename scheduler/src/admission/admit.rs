//! Which waiting requests start: the policy's choice among those for which there are a place, time
//! and memory.
//!
//! Invariant: choosing a request changes no page. Its cached pages are pinned when it starts.
//!
//! Invariant: the first request of its band that does not fit is bypassed a limited number of
//! times. Then no request of its band starts before it. If it waits only for sequences of its own
//! tenant, only its tenant waits with it.

use super::load::RunningLoad;
use crate::conditions::Conditions;
use crate::queue::Waiting;
use crate::sequence::pages_for;
use crate::state::{CachedPrefix, SchedulerState};
use crate::{Band, Order, PAGE_TOKENS, SequenceId};

/// Running prefills that a waiting request is compared with.
const COMPARED_PREFILLS: usize = 8;

/// Times that other requests may bypass the first request of a band.
const PATIENCE: u32 = 32;

/// The same for a request that lacks only time, and for a blocked head. It is longer because the
/// requests that bypass these are mostly of tenants that run less than their share.
const LONG_PATIENCE: u32 = 256;

/// The memory of admissions.
#[derive(Default)]
pub(crate) struct Admission {
    candidates: Vec<Waiting>, // Scratch memory of `choose`.
    /// By band: a request that was its first once and found no memory.
    blocked_heads: [Option<SequenceId>; 3],
}

/// Whether a candidate can start now.
enum Readiness {
    /// A running prefill is about to compute more of its prefix than is cached.
    AwaitsPrefix,
    /// Its tenant may not hold as many pages. It waits for sequences of its own tenant.
    AtTenantCap,
    LacksPages,
    LacksTime,
    Ready {
        cached_tokens: usize,
    },
}

/// What becomes of one band's candidates. `head` is the first of them that does not await a prefix.
enum BandChoice {
    Start { slot: usize, head: Option<usize> },
    None { head: Option<usize> },
    Reserved, // For the head, which cannot start yet.
}

/// The requests of one band that an admission may bypass.
#[derive(Clone, Copy, Default)]
struct BandHeads {
    head: Option<usize>,
    blocked: Option<usize>,
}

impl Admission {
    /// Starts waiting requests while there are places, time and memory.
    pub(crate) fn admit(&mut self, state: &mut SchedulerState, conditions: &Conditions) {
        let max_running = conditions.limits.max_running as usize;
        if state.queue.len() == 0 || state.sequences.running().len() >= max_running {
            return;
        }
        let mut load = RunningLoad::of(state, conditions);
        while state.sequences.running().len() < max_running {
            let Some(slot) = self.choose(state, conditions, &load) else {
                return;
            };
            state.start(slot, conditions);
            load.add(&state.sequences[slot], state, conditions);
        }
    }

    /// Returns the next request to start, or `None` for now.
    fn choose(
        &mut self,
        state: &mut SchedulerState,
        conditions: &Conditions,
        load: &RunningLoad,
    ) -> Option<usize> {
        let mut heads = [BandHeads::default(); 3];
        for (index, band) in state.queue.bands().into_iter().enumerate() {
            let blocked = self.blocked_head(band, state);
            let is_overdue =
                |slot: &usize| state.sequences[*slot].times_bypassed() >= LONG_PATIENCE;
            let overdue = blocked.filter(is_overdue);
            let mut candidates = std::mem::take(&mut self.candidates);
            candidates.clear();
            candidates.extend(overdue.map(|slot| state.sequences[slot].as_waiting()));
            state.queue.candidates(band, &mut candidates);
            let choice = self.choose_among(&candidates, band, state, conditions, load);
            self.candidates = candidates;
            let (head, chosen) = match choice {
                BandChoice::Start { slot, head } => (head, Some(slot)),
                BandChoice::None { head } => (head, None),
                BandChoice::Reserved => return None,
            };
            heads[index] = BandHeads { head, blocked };
            if let Some(slot) = chosen {
                note_bypassed(&heads, slot, state);
                return Some(slot);
            }
        }
        None
    }

    /// Returns the blocked head of a band, if it still waits and its tenant may run it.
    fn blocked_head(&mut self, band: Band, state: &SchedulerState) -> Option<usize> {
        let blocked = &mut self.blocked_heads[band as usize];
        let sequence = state.sequences.get((*blocked)?).filter(|sequence| {
            let tenant = state.queue.tenant(sequence.tenant);
            tenant.policy().band == band && !sequence.is_running()
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
        state: &mut SchedulerState,
        conditions: &Conditions,
        load: &RunningLoad,
    ) -> BandChoice {
        let is_strict = conditions.policy.order == Order::FirstCome;
        let mut head = None;
        let mut best: Option<(usize, usize)> = None; // Cached tokens, and the slot.
        let mut held_tenant = None; // Its first request has been bypassed often enough.
        for &Waiting { slot, .. } in candidates {
            let tenant = state.sequences[slot].tenant;
            let has_time = load.has_time_for(slot, state, conditions);
            let is_head = head.is_none();
            if held_tenant == Some(tenant) || !has_time && !is_head {
                continue;
            }
            let readiness = classify(slot, has_time, load, state);
            if let Readiness::AwaitsPrefix = readiness {
                state.log.deferred();
                continue;
            }
            head = head.or(Some(slot));
            if is_head && matches!(readiness, Readiness::LacksPages) {
                self.block_head(band, slot, state);
            }
            let bypassed = state.sequences[slot].times_bypassed();
            let is_due = is_head && (is_strict || bypassed >= PATIENCE);
            match readiness {
                Readiness::Ready { .. } if is_due => return BandChoice::Start { slot, head },
                Readiness::Ready { cached_tokens } => {
                    if best.is_none_or(|(most, _)| cached_tokens > most) {
                        best = Some((cached_tokens, slot));
                    }
                }
                Readiness::LacksPages if is_due => return BandChoice::Reserved,
                Readiness::LacksTime if is_due && (is_strict || bypassed >= LONG_PATIENCE) => {
                    return BandChoice::Reserved;
                }
                Readiness::AtTenantCap | Readiness::LacksTime if is_due => {
                    held_tenant = Some(tenant);
                }
                Readiness::AwaitsPrefix
                | Readiness::AtTenantCap
                | Readiness::LacksPages
                | Readiness::LacksTime => {}
            }
        }
        match best {
            Some((_, slot)) => BandChoice::Start { slot, head },
            None => BandChoice::None { head },
        }
    }
}

/// Returns whether the candidate in `slot` can start now, and if not, what it lacks.
fn classify(slot: usize, has_time: bool, load: &RunningLoad, state: &SchedulerState) -> Readiness {
    let prefix = state.cached_prefix(slot);
    if awaits_prefix(slot, prefix, state) {
        return Readiness::AwaitsPrefix;
    }
    let needed = needed_pages(slot, prefix, state);
    if needed > state.pool.remaining_cap(state.sequences[slot].tenant) {
        Readiness::AtTenantCap
    } else if !load.has_memory_for(slot, needed, state) {
        Readiness::LacksPages
    } else if !has_time {
        Readiness::LacksTime
    } else {
        Readiness::Ready {
            cached_tokens: prefix.pages * PAGE_TOKENS,
        }
    }
}

/// Returns whether a running prefill is about to compute more of this request's prefix than is
/// cached now.
fn awaits_prefix(slot: usize, prefix: CachedPrefix, state: &SchedulerState) -> bool {
    let sequence = &state.sequences[slot];
    let prefills = state.sequences.iter_running();
    prefills
        .filter(|other| other.is_prefill())
        .take(COMPARED_PREFILLS)
        .any(|other| sequence.shareable_with(other) / PAGE_TOKENS > prefix.pages)
}

/// Returns how many of the free and evictable pages a waiting request takes for its known tokens.
/// Its cached pages that could be evicted are among them.
fn needed_pages(slot: usize, prefix: CachedPrefix, state: &SchedulerState) -> usize {
    pages_for(state.sequences[slot].len()) - prefix.pages + prefix.unpinned
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
            if may_await && awaits_prefix(slot, state.cached_prefix(slot), state) {
                continue;
            }
            state.sequences[slot].bypass();
            #[cfg(debug_assertions)]
            check_patience(slot, state);
        }
    }
}

/// S11: a waiting request is bypassed at most `LONG_PATIENCE` times, except while its own tenant is
/// at its page cap.
#[cfg(debug_assertions)]
fn check_patience(slot: usize, state: &SchedulerState) {
    let sequence = &state.sequences[slot];
    let needed = needed_pages(slot, state.cached_prefix(slot), state);
    assert!(
        sequence.times_bypassed() <= LONG_PATIENCE
            || needed > state.pool.remaining_cap(sequence.tenant),
        "S11: {:?} is bypassed for ever",
        sequence.id
    );
}
