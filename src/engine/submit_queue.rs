//! The queue of submissions that the engine thread has not taken yet.
//!
//! Invariant: a tenant with nothing in the queue always gets a place. If the queue is full, the
//! newest submission of the tenant with the most of it, for its share, leaves.
//!
//! Invariant: the queue holds at most its capacity and one more submission of each tenant.

use std::collections::{HashMap, VecDeque};
use std::mem::take;
use std::sync::PoisonError;

use sterna_scheduler::{Ledger, NoRoom, Share, TenantId, TenantPolicy, quarter};

use super::submission::Submission;
use super::sync::{Mutex, MutexGuard};

/// A configured tenant may have this many submissions in the queue even if a quarter is smaller.
const MIN_QUOTA: usize = 8;

/// Submissions in the order of their arrival. Only tenants that the operator configured have a
/// quota and a share of their own.
pub(super) struct SubmitQueue {
    capacity: usize,
    pages: u32,
    state: Mutex<QueuedSubmissions>,
}

struct QueuedSubmissions {
    all: VecDeque<Submission>,
    places: Ledger<TenantId>,
    shares: HashMap<TenantId, Share>, // Of the configured tenants.
}

impl SubmitQueue {
    /// Creates an empty queue for `capacity` submissions. Shares are computed for `pages` pages.
    pub(super) fn new(capacity: usize, pages: u32) -> SubmitQueue {
        SubmitQueue {
            capacity,
            pages,
            state: Mutex::new(QueuedSubmissions {
                all: VecDeque::new(),
                places: Ledger::new(capacity),
                shares: HashMap::new(),
            }),
        }
    }

    /// Gives these tenants a quota and their share from now on.
    pub(super) fn set(&self, tenants: &[(TenantId, TenantPolicy)]) {
        let quota = quarter(self.capacity).max(MIN_QUOTA);
        let shares = tenants.iter().map(|(id, policy)| {
            let weight = policy.queue_share(self.pages);
            (*id, Share { weight, quota })
        });
        self.state().shares.extend(shares);
    }

    /// Adds a submission. Returns the submission that leaves a full queue for it, if any.
    ///
    /// # Errors
    /// If there is no place for it. Then nothing changes.
    pub(super) fn enter(&self, submission: Submission) -> Result<Option<Submission>, NoRoom> {
        let mut state = self.state();
        let tenant = submission.tenant();
        let share = self.share(&state, tenant);
        let weakest = state.find_place(tenant, share)?;
        let displaced = weakest.and_then(|weakest| state.remove_newest_of(weakest));
        state.places.take(tenant, share, 1);
        state.all.push_back(submission);
        Ok(displaced)
    }

    /// Checks that a submission of `tenant` would find a place now.
    ///
    /// # Errors
    /// If there is no place for it.
    pub(super) fn check_place(&self, tenant: TenantId) -> Result<(), NoRoom> {
        let state = self.state();
        let share = self.share(&state, tenant);
        state.find_place(tenant, share).map(|_| ())
    }

    /// Removes and returns all submissions, the oldest first.
    pub(super) fn take_all(&self) -> VecDeque<Submission> {
        let mut state = self.state();
        state.places = Ledger::new(self.capacity);
        take(&mut state.all)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.state().all.is_empty()
    }

    fn share(&self, state: &QueuedSubmissions, tenant: TenantId) -> Share {
        let share = state.shares.get(&tenant).copied();
        share.unwrap_or_else(|| Share {
            weight: TenantPolicy::default().queue_share(self.pages),
            ..Share::EQUAL
        })
    }

    /// Locks the state. No method panics halfway through a change, so the state is right even if
    /// the lock is poisoned.
    fn state(&self) -> MutexGuard<'_, QueuedSubmissions> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueuedSubmissions {
    /// Returns the tenant whose newest submission leaves a full queue for one of `tenant`, if any.
    fn find_place(&self, tenant: TenantId, share: Share) -> Result<Option<TenantId>, NoRoom> {
        match self.places.room_for(tenant, share, 1) {
            Err(NoRoom::OfAll) if self.places.used_by(tenant) == 0 => Ok(None),
            room => room,
        }
    }

    fn remove_newest_of(&mut self, tenant: TenantId) -> Option<Submission> {
        let place = (self.all.iter()).rposition(|other| other.tenant() == tenant)?;
        self.places.give_back(tenant, 1);
        self.all.remove(place)
    }
}
