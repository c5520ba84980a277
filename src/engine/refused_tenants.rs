//! The tenants that were refused lately, and how many of their requests may go to the scheduler. A
//! server under overload refuses the others without a look at them, and without the engine thread.
//!
//! Invariant: a tenant is refused here only if as many of its requests went to the scheduler since
//! the start of the engine's turn as the scheduler had places for. Each waiting request that has
//! left the queue since counts as a place.

use std::collections::HashMap;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use sterna_scheduler::{Refusal, TenantId};

use super::clock::micros;
use super::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering};

/// The number of tenants that may be refused here. Requests of further tenants go to the scheduler.
/// Each turn looks at all of them.
const MAX_TENANTS: usize = 16;

/// The tenants that were refused lately.
pub(super) struct RefusedTenants {
    /// Whether there are any. Without overload, nobody takes the lock.
    any: AtomicBool,
    departures: AtomicU64, // Of waiting requests from the scheduler's queue.
    ends: AtomicU64,       // Of requests whose clients left or had enough.
    tenants: Mutex<HashMap<TenantId, RefusedTenant>>,
}

/// What the scheduler said of a tenant.
#[derive(Clone, Copy)]
struct RefusedTenant {
    refusal: Refusal, // The last one.
    since: Instant,   // When the scheduler refused so.
    places: u64,      // For requests that have not come yet.
    changes: u64,     // Of the queue, of which `places` knows.
    has_asked: bool,  // A request came since the scheduler was asked.
}

impl RefusedTenants {
    pub(super) fn new() -> RefusedTenants {
        RefusedTenants {
            any: AtomicBool::new(false),
            departures: AtomicU64::new(0),
            ends: AtomicU64::new(0),
            tenants: Mutex::new(HashMap::new()),
        }
    }

    /// Notes how many waiting requests have left the scheduler's queue so far.
    pub(super) fn note_departures(&self, departures: u64) {
        self.departures.store(departures, Ordering::Release);
    }

    /// Notes that a stream ends its request, which may be a waiting one.
    pub(super) fn note_end(&self) {
        self.ends.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns why a request of `tenant` is refused now. `None` if the scheduler must decide.
    pub(super) fn refusal(&self, tenant: TenantId, now: Instant) -> Option<Refusal> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        let changes = self.changes();
        let mut tenants = self.tenants();
        let refused = tenants.get_mut(&tenant)?;
        refused.has_asked = true;
        refused.places += changes.saturating_sub(refused.changes);
        refused.changes = changes;
        match refused.places.checked_sub(1) {
            Some(left) => {
                refused.places = left;
                None
            }
            None => refused.refusal_at(now),
        }
    }

    /// Notes that the scheduler has refused `tenant`.
    pub(super) fn add(&self, tenant: TenantId, refusal: Refusal, now: Instant) {
        let changes = self.changes();
        let mut tenants = self.tenants();
        if tenants.len() < MAX_TENANTS || tenants.contains_key(&tenant) {
            let refused = RefusedTenant {
                refusal,
                since: now,
                places: 0,
                changes,
                has_asked: true,
            };
            tenants.insert(tenant, refused);
            self.any.store(true, Ordering::Relaxed);
        }
    }

    /// Asks how many places the scheduler has for each tenant. Forgets a tenant that has places and
    /// sent no request since the last time.
    pub(super) fn update(
        &self,
        now: Instant,
        mut places_for: impl FnMut(TenantId) -> Result<usize, Refusal>,
    ) {
        if !self.any.load(Ordering::Relaxed) {
            return;
        }
        let changes = self.changes();
        let mut tenants = self.tenants();
        tenants.retain(|tenant, refused| {
            let places = places_for(*tenant);
            let is_kept = places.is_err() || refused.has_asked;
            refused.changes = changes;
            refused.has_asked = false;
            match places {
                Ok(places) => refused.places = places as u64,
                Err(refusal) => {
                    refused.places = 0;
                    (refused.refusal, refused.since) = (refusal, now);
                }
            }
            is_kept
        });
        self.any.store(!tenants.is_empty(), Ordering::Relaxed);
    }

    /// Forgets the tenants that were refused for lack of room: nothing runs or waits, so there is
    /// room. Without this, requests that never reach the scheduler, such as malformed ones, could
    /// use up the places of a tenant, and an idle engine gives no new ones.
    pub(super) fn forget_full_queue(&self) {
        if !self.any.load(Ordering::Relaxed) {
            return;
        }
        let mut tenants = self.tenants();
        let is_limited = |refusal| matches!(refusal, Refusal::RateLimited { .. });
        tenants.retain(|_, refused| is_limited(refused.refusal));
        self.any.store(!tenants.is_empty(), Ordering::Relaxed);
    }

    fn changes(&self) -> u64 {
        // Both counts only grow, so their sum changes with each of them.
        self.departures.load(Ordering::Acquire) + self.ends.load(Ordering::Acquire)
    }

    /// Locks the tenants. No method panics halfway through a change.
    fn tenants(&self) -> MutexGuard<'_, HashMap<TenantId, RefusedTenant>> {
        self.tenants.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RefusedTenant {
    /// Returns the refusal at `now`; a used-up rate recovers as time passes.
    fn refusal_at(&self, now: Instant) -> Option<Refusal> {
        let Refusal::RateLimited { rate, retry_after } = self.refusal else {
            return Some(self.refusal);
        };
        let elapsed = now.saturating_duration_since(self.since);
        let left = Duration::from_micros(retry_after).checked_sub(elapsed)?;
        let retry_after = micros(left);
        (retry_after > 0).then_some(Refusal::RateLimited { rate, retry_after })
    }
}

#[cfg(test)]
mod tests {
    use sterna_scheduler::RateKind;

    use super::*;

    const A: TenantId = TenantId(1);
    const B: TenantId = TenantId(2);
    const FULL: Refusal = Refusal::Overloaded { retry_after: 7 };

    #[test]
    fn a_refusal_holds_until_the_scheduler_says_otherwise() {
        let (refused, now) = (RefusedTenants::new(), Instant::now());
        assert_eq!(refused.refusal(A, now), None);
        refused.add(A, FULL, now);
        assert_eq!(refused.refusal(A, now), Some(FULL));
        assert_eq!(refused.refusal(B, now), None, "each tenant for itself");
        refused.update(now, |_| Err(FULL));
        refused.update(now, |_| Err(FULL));
        assert_eq!(refused.refusal(A, now), Some(FULL));
        refused.update(now, |_| Ok(2));
        for expected in [None, None, Some(FULL)] {
            assert_eq!(refused.refusal(A, now), expected);
        }
        refused.update(now, |_| Ok(1));
        refused.update(now, |_| Ok(1));
        for _ in 0..3 {
            assert_eq!(refused.refusal(A, now), None, "the flood has ended");
        }
    }

    #[test]
    fn a_request_that_leaves_the_queue_is_a_place_for_each_tenant() {
        let (refused, now) = (RefusedTenants::new(), Instant::now());
        refused.add(A, FULL, now);
        refused.add(B, FULL, now);
        for change in 1..3 {
            match change {
                1 => refused.note_departures(1),
                _ => refused.note_end(),
            }
            for tenant in [A, B] {
                assert_eq!(refused.refusal(tenant, now), None, "{change}");
                assert_eq!(refused.refusal(tenant, now), Some(FULL), "{change}");
            }
        }
    }

    #[test]
    fn a_used_up_rate_recovers_as_time_passes() {
        let (refused, now) = (RefusedTenants::new(), Instant::now());
        let limited = |retry_after| Refusal::RateLimited {
            rate: RateKind::Requests,
            retry_after,
        };
        refused.add(A, limited(1000), now);
        for (later, expected) in [
            (0, Some(1000)),
            (400, Some(600)),
            (1000, None),
            (5000, None),
        ] {
            let refusal = refused.refusal(A, now + Duration::from_micros(later));
            assert_eq!(refusal, expected.map(limited), "{later}");
        }
    }

    #[test]
    fn an_idle_engine_refuses_nobody_for_lack_of_room() {
        let (refused, now) = (RefusedTenants::new(), Instant::now());
        refused.add(A, FULL, now);
        let limited = Refusal::RateLimited {
            rate: RateKind::Requests,
            retry_after: 1000,
        };
        refused.add(B, limited, now);
        refused.update(now, |tenant| if tenant == A { Ok(1) } else { Err(limited) });
        assert_eq!(
            refused.refusal(A, now),
            None,
            "a malformed request takes the place"
        );
        assert_eq!(refused.refusal(A, now), Some(FULL));
        refused.forget_full_queue();
        assert_eq!(refused.refusal(A, now), None);
        assert_eq!(refused.refusal(B, now), Some(limited));
    }

    #[test]
    fn only_a_few_tenants_are_kept() {
        let (refused, now) = (RefusedTenants::new(), Instant::now());
        for tenant in 0..1000 {
            refused.add(TenantId(tenant), FULL, now);
        }
        let kept = (0..1000).filter(|&tenant| refused.refusal(TenantId(tenant), now).is_some());
        assert_eq!(kept.count(), MAX_TENANTS);
    }
}
