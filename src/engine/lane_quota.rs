//! How much of the submit lane each tenant fills, so that one tenant's flood leaves room in it for the others.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use sterna_scheduler::TenantId;

/// A tenant that the operator has set may fill one such part of the lane.
const LANE_PART: usize = 4;
/// So much it may always fill: a request of several choices is several submissions.
const LEAST_ROOM: usize = 8;

/// Counts submissions from the door until the engine thread takes them. Tenants that were never set may fill the lane.
pub(super) struct LaneQuota {
    room: usize,
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    set: HashSet<TenantId>,
    untaken: HashMap<TenantId, usize>, // None is 0.
}

impl LaneQuota {
    /// For a lane of `lane` submissions.
    pub(super) fn new(lane: usize) -> LaneQuota {
        LaneQuota {
            room: (lane / LANE_PART).max(LEAST_ROOM),
            counts: Mutex::default(),
        }
    }

    /// These tenants have no more than their part from now on.
    pub(super) fn set(&self, tenants: impl Iterator<Item = TenantId>) {
        self.counts().set.extend(tenants);
    }

    /// Counts one more submission of `tenant`; false, and uncounted, if its part is full.
    pub(super) fn enter(&self, tenant: TenantId) -> bool {
        let mut counts = self.counts();
        let is_set = counts.set.contains(&tenant);
        let untaken = counts.untaken.entry(tenant).or_default();
        if is_set && *untaken >= self.room {
            return false;
        }
        *untaken += 1;
        true
    }

    /// A submission that was counted lies in the lane no more.
    pub(super) fn leave(&self, tenant: TenantId) {
        let mut counts = self.counts();
        if let Some(untaken) = counts.untaken.get_mut(&tenant) {
            *untaken -= 1;
            if *untaken == 0 {
                counts.untaken.remove(&tenant);
            }
        }
    }

    /// Nothing in here panics halfway through a change, so the counts of a poisoned lock are true.
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
