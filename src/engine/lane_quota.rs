//! Limits how much of the submit queue each configured tenant may fill, so that one tenant's flood
//! leaves room for the others.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use sterna_scheduler::TenantId;

/// A configured tenant may fill one such part of the queue.
const QUEUE_PARTS: usize = 4;
/// A configured tenant may have this many submissions in the queue even if its part is smaller. A
/// request with several choices is several submissions.
const MIN_QUOTA: usize = 8;

/// Counts each tenant's submissions in the submit queue. Only tenants that the operator configured
/// have a quota; the others may fill the queue.
pub(super) struct LaneQuota {
    quota: usize,
    counts: Mutex<QueuedCounts>,
}

#[derive(Default)]
struct QueuedCounts {
    configured: HashSet<TenantId>,
    queued: HashMap<TenantId, usize>, // Without tenants that have none.
}

impl LaneQuota {
    /// Returns the quota for a queue of `capacity` submissions.
    pub(super) fn new(capacity: usize) -> LaneQuota {
        LaneQuota {
            quota: (capacity / QUEUE_PARTS).max(MIN_QUOTA),
            counts: Mutex::default(),
        }
    }

    /// Gives these tenants a quota from now on.
    pub(super) fn set(&self, tenants: impl Iterator<Item = TenantId>) {
        self.counts().configured.extend(tenants);
    }

    /// Counts one more submission of `tenant`. Returns false, and counts nothing, if the tenant's
    /// quota is used up.
    pub(super) fn enter(&self, tenant: TenantId) -> bool {
        let mut counts = self.counts();
        let has_quota = counts.configured.contains(&tenant);
        let queued = counts.queued.entry(tenant).or_default();
        if has_quota && *queued >= self.quota {
            return false;
        }
        *queued += 1;
        true
    }

    /// Counts one submission less, because it has left the queue.
    pub(super) fn leave(&self, tenant: TenantId) {
        let mut counts = self.counts();
        if let Some(queued) = counts.queued.get_mut(&tenant) {
            *queued -= 1;
            if *queued == 0 {
                counts.queued.remove(&tenant);
            }
        }
    }

    /// Locks the counts. No method panics halfway through a change, so the counts are right even if
    /// the lock is poisoned.
    fn counts(&self) -> MutexGuard<'_, QueuedCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
