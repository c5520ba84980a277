//! Makes room in a full queue for a tenant that has less of it than its share.
//!
//! A waiting request stands behind the earlier waiting requests of its tenant. What stands before
//! it counts relative to the tenant's share. If the queue is full, the request with the most before
//! it leaves, provided that the new request has less before it. This is the rule of the ledger
//! (`ledger.rs`), with two differences. The queue is limited in places and in time, so requests are
//! compared by the resource that the queue lacks. Between tenants with nothing else waiting, the
//! larger share decides, then the service so far.
//!
//! Invariant: a tenant with nothing waiting finds room as long as another tenant has two requests
//! waiting that have not started.
//!
//! Invariant: a request that leaves has never run, and the new request has the stronger claim. So
//! tenants that flood the queue cannot displace each other in turns.

use std::cmp::Ordering;

use crate::ledger::Standing;
use crate::queue::Backlog;
use crate::state::SchedulerState;
use crate::{Nanos, Order, TenantId};

/// The greatest lead that a request keeps over the tenant of a new one.
///
/// If two tenants have equal shares and nothing else waiting, a tenant gives way only if it is
/// ahead of the other by more than the new request takes. So the other tenant is still behind after
/// its request has been served, and the two tenants do not displace each other in turns.
const MAX_LEAD: Nanos = 1_000_000_000;

/// A waiting request that leaves the queue, with all its choices.
#[derive(Clone, Copy)]
pub(super) struct Leaving {
    pub(super) tenant: TenantId,
    pub(super) first_choice: u64,
    time: Nanos,
}

/// A request whose tenant asks for room.
#[derive(Clone, Copy)]
pub(super) struct Newcomer {
    pub(super) tenant: TenantId,
    pub(super) time: Nanos, // Its predicted machine time, as at the calibration.
}

/// The limit of the queue that a new request would exceed.
#[derive(Clone, Copy)]
enum Lack {
    Places,
    Time,
}

/// What a request may claim of a full queue.
#[derive(Clone, Copy)]
struct Claim {
    /// Requests or nanoseconds of its tenant before it, by what the queue lacks.
    standing: Standing,
    lead: i128, // How far its tenant is ahead of its turn.
}

impl Claim {
    /// Orders claims from the strongest to the weakest.
    fn compare(&self, other: &Claim) -> Ordering {
        (self.standing.compare(&other.standing))
            .then(other.standing.weight.cmp(&self.standing.weight))
            .then(self.lead.cmp(&other.lead))
    }

    /// Returns whether the request leaves for a new one that takes `time`.
    fn gives_way_to(&self, newcomer: &Claim, time: Nanos) -> bool {
        let (own, new) = (&self.standing, &newcomer.standing);
        match own.compare(new) {
            Ordering::Greater => true,
            Ordering::Equal if new.before == 0 => match own.weight.cmp(&new.weight) {
                Ordering::Less => true,
                Ordering::Equal => self.lead > newcomer.lead + i128::from(time.min(MAX_LEAD)),
                Ordering::Greater => false,
            },
            Ordering::Equal | Ordering::Less => false,
        }
    }
}

/// Returns the requests that leave the queue so that `newcomer` finds room: usually none. Returns
/// `None` if the queue is full of requests that need not give way.
pub(super) fn find_room(state: &SchedulerState, newcomer: Newcomer) -> Option<Vec<Leaving>> {
    let mut leaving = Vec::new();
    while let Some(lack) = lack(state, newcomer, &leaving) {
        let (weakest, claim) = weakest(state, newcomer.tenant, lack, &leaving)?;
        let own = claim_of_newcomer(state, newcomer.tenant, lack);
        let time = state.conditions.predictor.at_present(newcomer.time);
        if !claim.gives_way_to(&own, time) {
            return None;
        }
        leaving.push(weakest);
    }
    Some(leaving)
}

/// Returns what the queue lacks for a new request once the `leaving` requests have left.
///
/// For a tenant with nothing waiting, only the time of the others counts, and the time of one of
/// them is enough. Otherwise another tenant's long request, which waits alone, would keep this
/// tenant out.
fn lack(state: &SchedulerState, newcomer: Newcomer, leaving: &[Leaving]) -> Option<Lack> {
    let (limits, predictor) = (&state.conditions.limits, &state.conditions.predictor);
    let left = without(state.queue.backlog(), leaving.iter());
    let is_only = state.queue.tenant(newcomer.tenant).backlog.places == 0;
    let (time, has_time) = if is_only {
        (left.time, !leaving.is_empty())
    } else {
        (left.time + newcomer.time, false)
    };
    if left.places >= limits.max_queued as usize {
        Some(Lack::Places)
    } else if !has_time
        && left.places > 0
        && !predictor.is_unsure()
        && predictor.at_present(time) / 1000 > limits.max_queued_time
    {
        Some(Lack::Time)
    } else {
        None
    }
}

fn without<'a>(backlog: Backlog, leaving: impl Iterator<Item = &'a Leaving>) -> Backlog {
    leaving.fold(backlog, |left, leaving| Backlog {
        places: left.places - 1,
        time: left.time - leaving.time,
    })
}

/// Returns the waiting request with the weakest claim of all other tenants. Returns `None` if the
/// queue is not shared by weight.
fn weakest(
    state: &SchedulerState,
    newcomer: TenantId,
    lack: Lack,
    leaving: &[Leaving],
) -> Option<(Leaving, Claim)> {
    if !matches!(state.conditions.policy.order, Order::FairShare { .. }) {
        return None;
    }
    let others = state.queue.active_tenants().filter(|&id| id != newcomer);
    let newest = others.filter_map(|id| newest_of(state, id, lack, leaving));
    newest.max_by(|(a, claim), (b, other)| claim.compare(other).then(b.tenant.cmp(&a.tenant)))
}

/// Returns the newest request of a tenant that has not started and is not leaving.
fn newest_of(
    state: &SchedulerState,
    id: TenantId,
    lack: Lack,
    leaving: &[Leaving],
) -> Option<(Leaving, Claim)> {
    let tenant = state.queue.tenant(id);
    let own = || leaving.iter().filter(|leaving| leaving.tenant == id);
    let left = without(tenant.backlog, own());
    let newest = tenant.waiting.iter().rev();
    let first = newest
        .filter(|waiting| waiting.takes_place())
        .nth(own().count())?;
    let leaving = Leaving {
        tenant: id,
        first_choice: first.arrival,
        time: tenant
            .choices(first.arrival)
            .map(|choice| choice.estimate)
            .sum(),
    };
    let before = without(left, [&leaving].into_iter());
    Some((leaving, claim(state, id, before, lack)))
}

fn claim_of_newcomer(state: &SchedulerState, id: TenantId, lack: Lack) -> Claim {
    claim(state, id, state.queue.tenant(id).backlog, lack)
}

fn claim(state: &SchedulerState, id: TenantId, before: Backlog, lack: Lack) -> Claim {
    let policy = &state.queue.tenant(id).policy;
    let before = match lack {
        Lack::Places => before.places as u64,
        Lack::Time if before.places == 0 => 0,
        Lack::Time => before.time,
    };
    Claim {
        standing: Standing {
            before,
            weight: policy.queue_share(state.conditions.limits.pages),
        },
        lead: state.queue.lead(id),
    }
}
