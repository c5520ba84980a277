//! BodyLimits for the bodies of requests: connections on which one arrives, the bytes of those that have come and are not read yet, places
//! for those that wait to be read, and turns to be read.
//!
//! Invariants: all bodies together have a limit of each. A tenant of the file may fill a part of the connections, the bytes and the
//! places, however slowly its bodies come, and what is beyond is refused at once, as its own; so there is room for the others. Turns
//! are not refused but taken in order, and as a tenant stands in that line with no more bodies than can be read at once, another's
//! waits for few.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::engine::TenantId;
use crate::metrics::RejectionReason;
use crate::tenants::Tenant;

/// Bodies that are read, rendered and tokenised at the same time away from the async threads.
const MAX_READERS: usize = 2;
/// Bodies that are read or wait for it.
const MAX_PARSE_QUEUE: usize = MAX_READERS + 256;
/// Bytes of all bodies that have come and are not read yet.
const MAX_BUFFERED_BYTES: usize = 64 << 20;
/// A tenant of the file may fill one such part of the connections, the bytes and the places.
const TENANT_DIVISOR: usize = 4;
/// So many of a tenant's bodies may always arrive, where there are few connections.
const MIN_ARRIVING: usize = 8;

/// The room of a server.
pub(super) struct BodyLimits {
    connections: usize,
    all: Arc<BodyPermits>,
    parts: Mutex<HashMap<TenantId, Arc<BodyPermits>>>, // Of the tenants that have asked for something.
}

/// Whose room was full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyLimitReached {
    /// The tenant's own part.
    Tenant,
    /// Everybody's.
    Server,
}

impl BodyLimitReached {
    /// The label under which it is counted.
    pub(super) fn label(self) -> RejectionReason {
        match self {
            BodyLimitReached::Tenant => RejectionReason::TenantQueueFull,
            BodyLimitReached::Server => RejectionReason::QueueFull,
        }
    }
}

struct BodyPermits {
    arriving: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    places: Arc<Semaphore>,
    readers: Arc<Semaphore>,
}

impl BodyPermits {
    fn new(arriving: usize, bytes: usize, places: usize) -> BodyPermits {
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        BodyPermits {
            arriving: semaphore(arriving),
            bytes: semaphore(bytes),
            places: semaphore(places),
            readers: semaphore(MAX_READERS),
        }
    }
}

impl BodyLimits {
    /// For a server with so many connections.
    pub(super) fn new(connections: usize) -> BodyLimits {
        BodyLimits {
            connections,
            all: Arc::new(BodyPermits::new(
                connections,
                MAX_BUFFERED_BYTES,
                MAX_PARSE_QUEUE,
            )),
            parts: Mutex::default(),
        }
    }

    /// What `tenant` may have of it: all, if everybody is one tenant.
    pub(super) fn quota(&self, tenant: &Tenant) -> BodyQuota {
        let arriving = (self.connections / TENANT_DIVISOR).max(MIN_ARRIVING);
        let part = || {
            Arc::new(BodyPermits::new(
                arriving,
                MAX_BUFFERED_BYTES / TENANT_DIVISOR,
                MAX_PARSE_QUEUE / TENANT_DIVISOR,
            ))
        };
        let own = (!tenant.is_anyone()).then(|| {
            // Nothing panics halfway through a change of the map.
            let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(parts.entry(tenant.number).or_insert_with(part))
        });
        BodyQuota {
            own,
            all: Arc::clone(&self.all),
        }
    }
}

/// What one tenant may have.
pub(super) struct BodyQuota {
    own: Option<Arc<BodyPermits>>,
    all: Arc<BodyPermits>,
}

/// Something of the room; dropping it gives it back.
pub(super) struct BodyPermit {
    own: Option<OwnedSemaphorePermit>,
    all: OwnedSemaphorePermit,
}

impl BodyPermit {
    /// Adds `more` of the same.
    pub(super) fn merge(&mut self, more: BodyPermit) {
        if let (Some(own), Some(more)) = (&mut self.own, more.own) {
            own.merge(more);
        }
        self.all.merge(more.all);
    }
}

impl BodyQuota {
    /// A connection on which a body may arrive.
    pub(super) fn arriving(&self) -> Result<BodyPermit, BodyLimitReached> {
        self.take(|portion| &portion.arriving, 1)
    }

    /// BodyLimits for `count` bytes.
    pub(super) fn bytes(&self, count: usize) -> Result<BodyPermit, BodyLimitReached> {
        self.take(|portion| &portion.bytes, count)
    }

    /// A place among those that are read or wait for it.
    pub(super) fn place(&self) -> Result<BodyPermit, BodyLimitReached> {
        self.take(|portion| &portion.places, 1)
    }

    /// Waits for a turn to be read.
    pub(super) async fn turn(&self) -> BodyPermit {
        let turn = async |portion: &BodyPermits| {
            let readers = Arc::clone(&portion.readers);
            let turn = readers.acquire_owned().await;
            turn.expect("the semaphore is never closed")
        };
        // Its own first: whoever waits for that is not in everybody's line yet.
        let own = match &self.own {
            Some(own) => Some(turn(own).await),
            None => None,
        };
        let all = turn(&self.all).await;
        BodyPermit { own, all }
    }

    fn take(
        &self,
        what: fn(&BodyPermits) -> &Arc<Semaphore>,
        count: usize,
    ) -> Result<BodyPermit, BodyLimitReached> {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let of = |portion: &BodyPermits| Arc::clone(what(portion)).try_acquire_many_owned(count);
        let own = match &self.own {
            Some(own) => Some(of(own).map_err(|_| BodyLimitReached::Tenant)?),
            None => None,
        };
        let all = of(&self.all).map_err(|_| BodyLimitReached::Server)?;
        Ok(BodyPermit { own, all })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::tenants::{Deadlines, Tenants};

    const CONNECTIONS: usize = 100;

    fn tenant(number: u32) -> Tenant {
        let anyone = Tenants::anyone(Deadlines::default()).find(None).unwrap();
        Tenant {
            number: TenantId(number),
            ..Tenant::clone(&anyone)
        }
    }

    #[test]
    fn a_tenant_fills_its_part_and_leaves_the_rest() {
        let room = BodyLimits::new(CONNECTIONS);
        let [one, other] = [1, 2].map(|number| room.quota(&tenant(number)));
        let mut held = one
            .bytes(MAX_BUFFERED_BYTES / TENANT_DIVISOR - 1)
            .ok()
            .unwrap();
        held.merge(one.bytes(1).ok().unwrap());
        assert_eq!(one.bytes(1).err(), Some(BodyLimitReached::Tenant));
        assert_eq!(
            room.quota(&tenant(1)).bytes(1).err(),
            Some(BodyLimitReached::Tenant),
            "it has one part, however often it asks"
        );
        assert!(other.bytes(MAX_BUFFERED_BYTES / TENANT_DIVISOR).is_ok());
        let places: Vec<BodyPermit> = std::iter::from_fn(|| one.place().ok()).collect();
        assert_eq!(places.len(), MAX_PARSE_QUEUE / TENANT_DIVISOR);
        assert!(other.place().is_ok());
        let arriving: Vec<BodyPermit> = std::iter::from_fn(|| one.arriving().ok()).collect();
        assert_eq!(arriving.len(), CONNECTIONS / TENANT_DIVISOR);
        assert!(other.arriving().is_ok());
        drop((held, places, arriving));
        assert!(one.bytes(MAX_BUFFERED_BYTES / TENANT_DIVISOR).is_ok() && one.place().is_ok());
        assert!(one.arriving().is_ok());
    }

    #[test]
    fn all_tenants_together_fill_everybodys() {
        let room = BodyLimits::new(CONNECTIONS);
        let shares = (1..=4).map(|number| room.quota(&tenant(number)));
        let held: Vec<BodyPermit> = shares
            .map(|share| {
                share
                    .bytes(MAX_BUFFERED_BYTES / TENANT_DIVISOR)
                    .ok()
                    .unwrap()
            })
            .collect();
        let last = room.quota(&tenant(5));
        assert_eq!(last.bytes(1).err(), Some(BodyLimitReached::Server));
        drop(held);
        assert!(last.bytes(1).is_ok());
    }

    #[test]
    fn without_keys_everybody_shares_all() {
        let share = BodyLimits::new(CONNECTIONS).quota(&tenant(0));
        let all = share.bytes(MAX_BUFFERED_BYTES).ok().unwrap();
        assert_eq!(share.bytes(1).err(), Some(BodyLimitReached::Server));
        drop(all);
        assert!(share.bytes(MAX_BUFFERED_BYTES).is_ok());
    }

    #[test]
    fn a_tenants_many_bodies_take_turns_with_anothers() {
        let room = BodyLimits::new(CONNECTIONS);
        let [many, one] = [1, 2].map(|number| room.quota(&tenant(number)));
        let mut flood: Vec<_> = (0..20).map(|_| Box::pin(many.turn())).collect();
        let mut turns: Vec<BodyPermit> = Vec::new();
        turns.extend(flood.iter_mut().filter_map(FutureExt::now_or_never));
        assert_eq!(turns.len(), MAX_READERS, "alone it has all turns");
        let mut waiting = Box::pin(one.turn());
        assert!((&mut waiting).now_or_never().is_none());
        turns.pop();
        assert!(
            (&mut waiting).now_or_never().is_some(),
            "it waits for one body and not for the flood"
        );
    }
}
