//! Room for the bodies of requests: connections on which one arrives, the bytes of those that have come and are not read yet, places
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
use crate::metrics::TurnedAway;
use crate::tenants::Tenant;

/// Bodies that are read, rendered and tokenised at the same time away from the async threads.
const MOST_READERS: usize = 2;
/// Bodies that are read or wait for it.
const MOST_PLACES: usize = MOST_READERS + 256;
/// Bytes of all bodies that have come and are not read yet.
const MOST_BYTES: usize = 64 << 20;
/// A tenant of the file may fill one such part of the connections, the bytes and the places.
const PARTS: usize = 4;
/// So many of a tenant's bodies may always arrive, where there are few connections.
const LEAST_ARRIVING: usize = 8;

/// The room of a server.
pub(super) struct Room {
    connections: usize,
    all: Arc<Portion>,
    parts: Mutex<HashMap<TenantId, Arc<Portion>>>, // Of the tenants that have asked for something.
}

/// Whose room was full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    /// The tenant's own part.
    Own,
    /// Everybody's.
    All,
}

impl Full {
    /// The label under which it is counted.
    pub(super) fn label(self) -> TurnedAway {
        match self {
            Full::Own => TurnedAway::TenantQueueFull,
            Full::All => TurnedAway::QueueFull,
        }
    }
}

struct Portion {
    arriving: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    places: Arc<Semaphore>,
    readers: Arc<Semaphore>,
}

impl Portion {
    fn new(arriving: usize, bytes: usize, places: usize) -> Portion {
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        Portion {
            arriving: semaphore(arriving),
            bytes: semaphore(bytes),
            places: semaphore(places),
            readers: semaphore(MOST_READERS),
        }
    }
}

impl Room {
    /// For a server with so many connections.
    pub(super) fn new(connections: usize) -> Room {
        Room {
            connections,
            all: Arc::new(Portion::new(connections, MOST_BYTES, MOST_PLACES)),
            parts: Mutex::default(),
        }
    }

    /// What `tenant` may have of it: all, if everybody is one tenant.
    pub(super) fn share(&self, tenant: &Tenant) -> Share {
        let arriving = (self.connections / PARTS).max(LEAST_ARRIVING);
        let part = || {
            Arc::new(Portion::new(
                arriving,
                MOST_BYTES / PARTS,
                MOST_PLACES / PARTS,
            ))
        };
        let own = (!tenant.is_anyone()).then(|| {
            // Nothing panics halfway through a change of the map.
            let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(parts.entry(tenant.number).or_insert_with(part))
        });
        Share {
            own,
            all: Arc::clone(&self.all),
        }
    }
}

/// What one tenant may have.
pub(super) struct Share {
    own: Option<Arc<Portion>>,
    all: Arc<Portion>,
}

/// Something of the room; dropping it gives it back.
pub(super) struct Taken {
    own: Option<OwnedSemaphorePermit>,
    all: OwnedSemaphorePermit,
}

impl Taken {
    /// Adds `more` of the same.
    pub(super) fn merge(&mut self, more: Taken) {
        if let (Some(own), Some(more)) = (&mut self.own, more.own) {
            own.merge(more);
        }
        self.all.merge(more.all);
    }
}

impl Share {
    /// A connection on which a body may arrive.
    pub(super) fn arriving(&self) -> Result<Taken, Full> {
        self.take(|portion| &portion.arriving, 1)
    }

    /// Room for `count` bytes.
    pub(super) fn bytes(&self, count: usize) -> Result<Taken, Full> {
        self.take(|portion| &portion.bytes, count)
    }

    /// A place among those that are read or wait for it.
    pub(super) fn place(&self) -> Result<Taken, Full> {
        self.take(|portion| &portion.places, 1)
    }

    /// Waits for a turn to be read.
    pub(super) async fn turn(&self) -> Taken {
        let turn = async |portion: &Portion| {
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
        Taken { own, all }
    }

    fn take(&self, what: fn(&Portion) -> &Arc<Semaphore>, count: usize) -> Result<Taken, Full> {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let of = |portion: &Portion| Arc::clone(what(portion)).try_acquire_many_owned(count);
        let own = match &self.own {
            Some(own) => Some(of(own).map_err(|_| Full::Own)?),
            None => None,
        };
        let all = of(&self.all).map_err(|_| Full::All)?;
        Ok(Taken { own, all })
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
        let room = Room::new(CONNECTIONS);
        let [one, other] = [1, 2].map(|number| room.share(&tenant(number)));
        let mut held = one.bytes(MOST_BYTES / PARTS - 1).ok().unwrap();
        held.merge(one.bytes(1).ok().unwrap());
        assert_eq!(one.bytes(1).err(), Some(Full::Own));
        assert_eq!(
            room.share(&tenant(1)).bytes(1).err(),
            Some(Full::Own),
            "it has one part, however often it asks"
        );
        assert!(other.bytes(MOST_BYTES / PARTS).is_ok());
        let places: Vec<Taken> = std::iter::from_fn(|| one.place().ok()).collect();
        assert_eq!(places.len(), MOST_PLACES / PARTS);
        assert!(other.place().is_ok());
        let arriving: Vec<Taken> = std::iter::from_fn(|| one.arriving().ok()).collect();
        assert_eq!(arriving.len(), CONNECTIONS / PARTS);
        assert!(other.arriving().is_ok());
        drop((held, places, arriving));
        assert!(one.bytes(MOST_BYTES / PARTS).is_ok() && one.place().is_ok());
        assert!(one.arriving().is_ok());
    }

    #[test]
    fn all_tenants_together_fill_everybodys() {
        let room = Room::new(CONNECTIONS);
        let shares = (1..=4).map(|number| room.share(&tenant(number)));
        let held: Vec<Taken> = shares
            .map(|share| share.bytes(MOST_BYTES / PARTS).ok().unwrap())
            .collect();
        let last = room.share(&tenant(5));
        assert_eq!(last.bytes(1).err(), Some(Full::All));
        drop(held);
        assert!(last.bytes(1).is_ok());
    }

    #[test]
    fn without_keys_everybody_shares_all() {
        let share = Room::new(CONNECTIONS).share(&tenant(0));
        let all = share.bytes(MOST_BYTES).ok().unwrap();
        assert_eq!(share.bytes(1).err(), Some(Full::All));
        drop(all);
        assert!(share.bytes(MOST_BYTES).is_ok());
    }

    #[test]
    fn a_tenants_many_bodies_take_turns_with_anothers() {
        let room = Room::new(CONNECTIONS);
        let [many, one] = [1, 2].map(|number| room.share(&tenant(number)));
        let mut flood: Vec<_> = (0..20).map(|_| Box::pin(many.turn())).collect();
        let mut turns: Vec<Taken> = Vec::new();
        turns.extend(flood.iter_mut().filter_map(FutureExt::now_or_never));
        assert_eq!(turns.len(), MOST_READERS, "alone it has all turns");
        let mut waiting = Box::pin(one.turn());
        assert!((&mut waiting).now_or_never().is_none());
        turns.pop();
        assert!(
            (&mut waiting).now_or_never().is_some(),
            "it waits for one body and not for the flood"
        );
    }
}
