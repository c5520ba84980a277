//! The queue of submissions that the engine thread has not taken yet.
//!
//! Invariant: a tenant with nothing in the queue always gets a place. If the queue is full, the
//! newest submission of the tenant with the most of it, for its share, leaves.
//!
//! Invariant: the queue holds at most its capacity and one more submission of each tenant.

use std::collections::{HashMap, VecDeque};
use std::mem::take;
use std::sync::PoisonError;

use sterna_scheduler::{TenantId, TenantPolicy};

use super::submission::Submission;
use super::sync::{Mutex, MutexGuard};

/// A configured tenant may fill one such part of the queue.
const QUEUE_PARTS: usize = 4;
/// A configured tenant may have this many submissions in the queue even if its part is smaller.
const MIN_QUOTA: usize = 8;

/// Submissions in the order of their arrival. Only tenants that the operator configured have a
/// quota and a share of their own.
pub(super) struct SubmitQueue {
    capacity: usize,
    quota: usize,
    pages: u32,
    state: Mutex<QueuedSubmissions>,
}

#[derive(Default)]
struct QueuedSubmissions {
    all: VecDeque<Submission>,
    counts: HashMap<TenantId, usize>, // Without tenants that have none.
    shares: HashMap<TenantId, u64>,   // Of the configured tenants.
}

/// Why a submission finds no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoPlace {
    /// The tenant's quota is used up.
    OfTenant,
    /// The queue is full, and the tenant has no less of it than its share.
    OfAll,
}

impl SubmitQueue {
    /// Creates an empty queue for `capacity` submissions. Shares are computed for `pages` pages.
    pub(super) fn new(capacity: usize, pages: u32) -> SubmitQueue {
        SubmitQueue {
            capacity,
            quota: (capacity / QUEUE_PARTS).max(MIN_QUOTA),
            pages,
            state: Mutex::default(),
        }
    }

    /// Gives these tenants a quota and their share from now on.
    pub(super) fn set(&self, tenants: &[(TenantId, TenantPolicy)]) {
        let shares = tenants.iter();
        let shares = shares.map(|(id, policy)| (*id, policy.queue_share(self.pages)));
        self.state().shares.extend(shares);
    }

    /// Adds a submission. Returns the submission that leaves a full queue for it, if any.
    ///
    /// # Errors
    /// If there is no place for it. Then nothing changes.
    pub(super) fn enter(&self, submission: Submission) -> Result<Option<Submission>, NoPlace> {
        let mut state = self.state();
        let tenant = submission.request.tenant;
        let weakest = self.find_place(&state, tenant)?;
        let displaced = weakest.and_then(|weakest| state.remove_newest_of(weakest));
        *state.counts.entry(tenant).or_default() += 1;
        state.all.push_back(submission);
        Ok(displaced)
    }

    /// Checks that a submission of `tenant` would find a place now.
    ///
    /// # Errors
    /// If there is no place for it.
    pub(super) fn check_place(&self, tenant: TenantId) -> Result<(), NoPlace> {
        self.find_place(&self.state(), tenant).map(|_| ())
    }

    /// Returns the tenant whose newest submission leaves a full queue for one of `tenant`, if any.
    fn find_place(
        &self,
        state: &QueuedSubmissions,
        tenant: TenantId,
    ) -> Result<Option<TenantId>, NoPlace> {
        let own = state.counts.get(&tenant).copied().unwrap_or(0);
        if own >= self.quota && state.shares.contains_key(&tenant) {
            return Err(NoPlace::OfTenant);
        }
        if state.all.len() < self.capacity {
            return Ok(None);
        }
        let weakest = state.weakest_for(tenant, own, |state, id| self.share(state, id));
        match weakest {
            None if own > 0 => Err(NoPlace::OfAll),
            weakest => Ok(weakest),
        }
    }

    /// Removes and returns all submissions, the oldest first.
    pub(super) fn take_all(&self) -> VecDeque<Submission> {
        let mut state = self.state();
        state.counts.clear();
        take(&mut state.all)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.state().all.is_empty()
    }

    fn share(&self, state: &QueuedSubmissions, tenant: TenantId) -> u64 {
        let share = state.shares.get(&tenant).copied();
        share.unwrap_or_else(|| TenantPolicy::default().queue_share(self.pages))
    }

    /// Locks the state. No method panics halfway through a change, so the state is right even if
    /// the lock is poisoned.
    fn state(&self) -> MutexGuard<'_, QueuedSubmissions> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueuedSubmissions {
    /// Returns the tenant that has the most before its newest submission, for its share, if
    /// `newcomer` has less before its next one.
    fn weakest_for(
        &self,
        newcomer: TenantId,
        own: usize,
        share: impl Fn(&QueuedSubmissions, TenantId) -> u64,
    ) -> Option<TenantId> {
        // `a / share` of one tenant against `b / share` of another, without fractions.
        let weigh = |before: usize, share: u64| before as u128 * u128::from(share);
        let others = self.counts.iter().filter(|(id, _)| **id != newcomer);
        let (tenant, before) = others.map(|(&id, &count)| (id, count - 1)).max_by(|a, b| {
            let (left, right) = (share(self, a.0), share(self, b.0));
            let by_share = weigh(a.1, right).cmp(&weigh(b.1, left));
            by_share.then(b.0.cmp(&a.0))
        })?;
        let has_more = weigh(before, share(self, newcomer)) > weigh(own, share(self, tenant));
        has_more.then_some(tenant)
    }

    fn remove_newest_of(&mut self, tenant: TenantId) -> Option<Submission> {
        let place = (self.all.iter()).rposition(|other| other.request.tenant == tenant)?;
        *self.counts.get_mut(&tenant)? -= 1;
        self.all.remove(place)
    }
}
