//! Limits for request bodies, and who gives way when they are reached.
//!
//! Three resources are limited, for the server and for each tenant of the tenants file:
//!
//! - bodies that are arriving,
//! - bytes that have arrived, of bodies that are incomplete or wait for a parser,
//! - bodies that wait for a parser.
//!
//! Beside them are the parsers, which read, render and tokenize bodies off the async threads. Each
//! holds one body, and a large body takes all of them.
//!
//! Requests beyond an allowance of reading (`reading_time.rs`) have none of these parsers: they all
//! share one slow parser.
//!
//! Each resource has a ledger. If it is full, the tenant that uses most loses its newest body: the
//! server frees it at once and answers its request 429.
//!
//! Invariant: a tenant of the file may use at most a quarter of each resource. The server rejects
//! the tenant's further bodies with 429.
//!
//! Invariant: the server rejects no body for lack of a parser. Bodies take parsers in the order of
//! their arrival, and at most as many bodies of one tenant as there are parsers wait in the
//! server's queue. So a tenant's body waits for few bodies of another tenant.

use std::collections::{BTreeMap, HashMap};
use std::mem::take;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::reading_time::ReadingAllowances;
use crate::engine::{Ledger, NoRoom, Share, TenantId, quarter};
use crate::tenants::Tenant;

const MAX_PARSERS: u32 = 2;
/// A larger body takes all parsers, because tokenizing its text takes hundreds of bytes for each.
const LARGE_BYTES: usize = 256 << 10;
const MAX_PARSE_QUEUE: usize = 256;
const MAX_BUFFERED_BYTES: usize = 64 << 20;
/// A tenant may always receive this many bodies at the same time, even if connections are few.
const MIN_ARRIVING: usize = 8;

/// A limited resource.
#[derive(Clone, Copy)]
enum Resource {
    Arriving,
    Bytes,
    ParseQueue,
}

/// An amount of each resource.
type Amounts = [usize; 3];

/// The limits of a server, and what of them is in use.
pub(in crate::api) struct BodyLimits {
    quotas: Amounts, // Of each tenant of the file.
    bodies: Mutex<Bodies>,
    parsers: Arc<Semaphore>,
    slow_parser: Arc<Semaphore>,
    /// Of tenants that have sent a body.
    tenants_parsers: Mutex<HashMap<(TenantId, Lane), Arc<Semaphore>>>,
    allowances: Arc<ReadingAllowances>,
}

/// The bodies, and who uses how much of each resource for them.
struct Bodies {
    ledgers: [Ledger<TenantId>; 3],
    entries: BTreeMap<BodyId, BodyEntry>,
    next_body: u64,
}

/// Which parsers read a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Lane {
    /// The usual parsers.
    Usual,
    /// The slow parser.
    Slow,
}

/// The parsers of a body, as its tenant's and as the server's. Dropping a parser returns both
/// permits.
pub(super) struct Parser {
    lane: Lane,
    permits: [OwnedSemaphorePermit; 2],
}

impl Parser {
    pub(super) fn lane(&self) -> Lane {
        self.lane
    }

    /// Returns the permits, first the tenant's.
    pub(super) fn into_permits(self) -> [OwnedSemaphorePermit; 2] {
        self.permits
    }
}

/// The tenant of a body, and the number of the body in the order of arrival.
type BodyId = (TenantId, u64);

struct BodyEntry {
    used: Amounts,
    buffer: Arc<BodyBuffer>,
}

/// The bytes of a body; `None` after the server has taken its room back.
struct BodyBuffer {
    bytes: Mutex<Option<Vec<u8>>>,
    taken_back: Notify,
}

impl BodyBuffer {
    fn bytes(&self) -> MutexGuard<'_, Option<Vec<u8>>> {
        // The lock's poison is harmless: no change of the bytes can panic halfway.
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bodies {
    /// Removes a body and all that it uses.
    fn remove(&mut self, id: BodyId) -> Option<BodyEntry> {
        let entry = self.entries.remove(&id)?;
        for (ledger, used) in self.ledgers.iter_mut().zip(entry.used) {
            ledger.give_back(id.0, used);
        }
        Some(entry)
    }

    /// Takes back the room of the newest body with which a tenant uses a resource.
    fn take_back(&mut self, tenant: TenantId, resource: Resource) {
        let of_tenant = self.entries.range((tenant, 0)..=(tenant, u64::MAX));
        let mut users = of_tenant.filter(|(_, entry)| entry.used[resource as usize] > 0);
        let (&newest, _) = users
            .next_back()
            .expect("a tenant uses what its bodies use");
        let entry = self.remove(newest).expect("it has just been found");
        *entry.buffer.bytes() = None;
        entry.buffer.taken_back.notify_one();
    }
}

impl BodyLimits {
    /// Returns the limits of a server that accepts at most `connections` connections.
    pub(in crate::api) fn new(connections: usize) -> BodyLimits {
        // The other connections are for heads and for the responses that say why a body must wait.
        let arriving = (connections - quarter(connections)).max(MIN_ARRIVING);
        let sizes = [arriving, MAX_BUFFERED_BYTES, MAX_PARSE_QUEUE];
        let mut quotas = [connections, MAX_BUFFERED_BYTES, MAX_PARSE_QUEUE].map(quarter);
        quotas[Resource::Arriving as usize] = quarter(connections).max(MIN_ARRIVING);
        let bodies = Bodies {
            ledgers: sizes.map(Ledger::new),
            entries: BTreeMap::new(),
            next_body: 0,
        };
        BodyLimits {
            quotas,
            bodies: Mutex::new(bodies),
            parsers: Arc::new(Semaphore::new(MAX_PARSERS as usize)),
            slow_parser: Arc::new(Semaphore::new(1)),
            tenants_parsers: Mutex::default(),
            allowances: Arc::default(),
        }
    }

    /// Begins to receive a body of `tenant`.
    ///
    /// # Errors
    /// If too many bodies are arriving.
    pub(in crate::api) fn begin(&self, tenant: &Tenant) -> Result<ArrivingBody<'_>, NoRoom> {
        let buffer = Arc::new(BodyBuffer {
            bytes: Mutex::new(Some(Vec::new())),
            taken_back: Notify::new(),
        });
        let mut bodies = self.bodies();
        let id = (tenant.number, bodies.next_body);
        bodies.next_body += 1;
        let (used, own) = ([0; 3], Arc::clone(&buffer));
        bodies.entries.insert(id, BodyEntry { used, buffer: own });
        drop(bodies);
        let body = ArrivingBody {
            limits: self,
            is_anyone: tenant.is_anyone(),
            id,
            buffer,
        };
        body.take(Resource::Arriving, 1)?;
        Ok(body)
    }

    /// Returns how much reading without an answer each tenant has left.
    pub(super) fn allowances(&self) -> &Arc<ReadingAllowances> {
        &self.allowances
    }

    fn bodies(&self) -> MutexGuard<'_, Bodies> {
        // The lock's poison is harmless: a failed assertion in a change is a bug anyway.
        self.bodies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the parsers that a body of `bytes` bytes needs, and takes them. On a server
    /// without API keys, all clients are one tenant, and it may use all parsers. A body that
    /// `is_slow` before its turn takes the slow parser instead.
    async fn parser(&self, tenant: TenantId, bytes: usize, is_slow: impl Fn() -> bool) -> Parser {
        let is_large = bytes > LARGE_BYTES;
        // The tenant's permit first: while a body waits for it, the body is not in the server's
        // queue, where other tenants would wait behind it.
        if !is_slow() {
            let count = if is_large { MAX_PARSERS } else { 1 };
            let of_tenant = acquire(self.tenants_parsers(tenant, Lane::Usual), count).await;
            // Earlier bodies may have used up the allowance while this one waited.
            if !is_slow() {
                let of_server = acquire(Arc::clone(&self.parsers), count).await;
                return Parser {
                    lane: Lane::Usual,
                    permits: [of_tenant, of_server],
                };
            }
        }
        let of_tenant = acquire(self.tenants_parsers(tenant, Lane::Slow), MAX_PARSERS).await;
        let of_server = acquire(Arc::clone(&self.slow_parser), 1).await;
        Parser {
            lane: Lane::Slow,
            permits: [of_tenant, of_server],
        }
    }

    fn tenants_parsers(&self, tenant: TenantId, lane: Lane) -> Arc<Semaphore> {
        let parsers = &self.tenants_parsers;
        let mut parsers = parsers.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(Semaphore::new(MAX_PARSERS as usize));
        Arc::clone(parsers.entry((tenant, lane)).or_insert_with(new))
    }
}

async fn acquire(parsers: Arc<Semaphore>, count: u32) -> OwnedSemaphorePermit {
    let permit = parsers.acquire_many_owned(count).await;
    permit.expect("the semaphore is never closed")
}

/// A body that arrives or waits for a parser. Dropping it returns its room.
pub(in crate::api) struct ArrivingBody<'a> {
    limits: &'a BodyLimits,
    is_anyone: bool,
    id: BodyId,
    buffer: Arc<BodyBuffer>,
}

impl ArrivingBody<'_> {
    /// Adds bytes that have arrived.
    ///
    /// # Errors
    /// If they do not fit, or if the server has taken the body's room back.
    pub(in crate::api) fn add(&self, bytes: &[u8]) -> Result<(), NoRoom> {
        self.take(Resource::Bytes, bytes.len())?;
        match &mut *self.buffer.bytes() {
            Some(buffer) => buffer.extend_from_slice(bytes),
            None => return Err(NoRoom::OfOwner),
        }
        Ok(())
    }

    /// Frees the bytes of a body that will be rejected. The body may still be arriving.
    pub(super) fn discard(&self) {
        let bodies = &mut *self.limits.bodies();
        if let Some(entry) = bodies.entries.get_mut(&self.id) {
            *entry.buffer.bytes() = None;
            for resource in [Resource::Bytes, Resource::ParseQueue] {
                let used = take(&mut entry.used[resource as usize]);
                bodies.ledgers[resource as usize].give_back(self.id.0, used);
            }
        }
    }

    /// Waits until the server takes the body's room back. It may never do so.
    pub(super) async fn taken_back(&self) -> NoRoom {
        self.buffer.taken_back.notified().await;
        NoRoom::OfOwner
    }

    /// Returns the bytes of a body that has arrived. From here on they count no more.
    ///
    /// # Errors
    /// If the server has taken the body's room back.
    pub(super) fn into_bytes(self) -> Result<Vec<u8>, NoRoom> {
        self.buffer.bytes().take().ok_or(NoRoom::OfOwner)
    }

    /// Waits for a parser, the slow one if the body `is_slow`. Returns it with the bytes of the
    /// body, which count no more.
    ///
    /// # Errors
    /// If too many bodies wait, or if the server takes the body's room back meanwhile.
    pub(super) async fn wait_for_parser(
        self,
        is_slow: impl Fn() -> bool,
    ) -> Result<(Vec<u8>, Parser), NoRoom> {
        self.take(Resource::ParseQueue, 1)?;
        let bytes = self.buffer.bytes().as_ref().map_or(0, Vec::len);
        tokio::select! {
            limit = self.taken_back() => Err(limit),
            parser = self.limits.parser(self.id.0, bytes, is_slow) => {
                Ok((self.into_bytes()?, parser))
            }
        }
    }

    /// Takes `count` of `resource`, if necessary from the tenants that use most of it.
    fn take(&self, resource: Resource, count: usize) -> Result<(), NoRoom> {
        let (at, tenant) = (resource as usize, self.id.0);
        let share = match self.is_anyone {
            true => Share::EQUAL,
            false => Share::with_quota(self.limits.quotas[at]),
        };
        let bodies = &mut *self.limits.bodies();
        if !bodies.entries.contains_key(&self.id) {
            return Err(NoRoom::OfOwner); // The server has taken the body's room back.
        }
        while let Some(most) = bodies.ledgers[at].room_for(tenant, share, count)? {
            bodies.take_back(most, resource);
        }
        bodies.ledgers[at].take(tenant, share, count);
        let entry = bodies.entries.get_mut(&self.id);
        entry.expect("other tenants gave way").used[at] += count;
        Ok(())
    }
}

impl Drop for ArrivingBody<'_> {
    fn drop(&mut self) {
        self.limits.bodies().remove(self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_util::FutureExt;

    use super::*;
    use crate::tenants::{Deadlines, Tenants};

    const CONNECTIONS: usize = 100;
    const QUOTA: usize = quarter(MAX_BUFFERED_BYTES);

    fn tenant(number: u32) -> Tenant {
        let anyone = Tenants::anyone(Deadlines::default()).find(None).unwrap();
        Tenant {
            number: TenantId(number),
            ..Tenant::clone(&anyone)
        }
    }

    /// Begins bodies of tenant `number` until the server rejects one. Adds `bytes` to each.
    fn flood(limits: &BodyLimits, number: u32, bytes: usize) -> Vec<ArrivingBody<'_>> {
        let one = || {
            let body = limits.begin(&tenant(number)).ok()?;
            body.add(&vec![0; bytes]).ok()?;
            Some(body)
        };
        std::iter::from_fn(one).collect()
    }

    fn is_taken_back(body: &ArrivingBody<'_>) -> bool {
        body.taken_back().now_or_never().is_some()
    }

    #[test]
    fn a_tenant_that_uses_its_quota_leaves_the_rest_to_others() {
        let limits = BodyLimits::new(CONNECTIONS);
        let many = flood(&limits, 1, 1);
        assert_eq!(many.len(), quarter(CONNECTIONS));
        let last = &many[0];
        assert!(last.add(&vec![0; QUOTA - many.len()]).is_ok());
        assert_eq!(last.add(b"x"), Err(NoRoom::OfOwner));
        let other = limits.begin(&tenant(2)).ok().unwrap();
        assert!(other.add(&vec![0; QUOTA]).is_ok());
        drop(many);
        let again = limits.begin(&tenant(1)).ok().unwrap();
        assert!(again.add(&vec![0; QUOTA]).is_ok());
        drop((other, again));
        assert!([0, 1, 2].map(|at| limits.bodies().ledgers[at].used()) == [0; 3]);
        assert!(limits.bodies().entries.is_empty());
    }

    #[test]
    fn tenants_that_fill_the_buffer_give_way_to_one_below_its_share() {
        for floods in [4, 1000] {
            let limits = BodyLimits::new(4096);
            let share = MAX_BUFFERED_BYTES / floods;
            let flooding: Vec<_> = (1..=floods)
                .map(|number| {
                    let bodies = [1, 2].map(|_| limits.begin(&tenant(number as u32)));
                    let bodies = bodies.map(|body| body.ok().unwrap());
                    assert!(
                        bodies
                            .iter()
                            .all(|body| body.add(&vec![0; share / 2]).is_ok())
                    );
                    bodies
                })
                .collect();
            let late = tenant(floods as u32 + 1);
            let small = limits.begin(&late).ok().unwrap();
            assert_eq!(small.add(&[0; 4000]), Ok(()), "{floods} tenants flood");
            let lost = flooding.iter().flatten().filter(|body| is_taken_back(body));
            assert_eq!(lost.count(), 1, "one body makes room");
            let [oldest, newest] = flooding.last().unwrap();
            assert_eq!(newest.add(b"x"), Err(NoRoom::OfOwner));
            assert!(!is_taken_back(oldest));
            let whole_share = MAX_BUFFERED_BYTES / (floods + 1);
            assert_eq!(small.add(&vec![0; whole_share - 4000]), Ok(()));
            let left =
                MAX_BUFFERED_BYTES - limits.bodies().ledgers[Resource::Bytes as usize].used();
            assert!(
                small.add(&vec![0; left + 1]).is_err(),
                "it is above its share"
            );
            assert!(limits.bodies().ledgers[Resource::Bytes as usize].used() <= MAX_BUFFERED_BYTES);
        }
    }

    #[test]
    fn tenants_whose_bodies_never_end_leave_connections_for_another_tenant() {
        let limits = BodyLimits::new(CONNECTIONS);
        let floods: Vec<_> = (1..=4).map(|number| flood(&limits, number, 1)).collect();
        let used = limits.bodies().ledgers[Resource::Arriving as usize].used();
        assert_eq!(used, CONNECTIONS - quarter(CONNECTIONS));
        let late: Vec<_> = (5..=8)
            .map(|number| limits.begin(&tenant(number)))
            .collect();
        assert!(late.iter().all(Result::is_ok));
        let lost = floods.iter().flatten().filter(|body| is_taken_back(body));
        assert!(lost.count() >= late.len());
    }

    #[test]
    fn without_api_keys_all_clients_share_the_servers_limit() {
        let limits = BodyLimits::new(CONNECTIONS);
        let all = limits.begin(&tenant(0)).ok().unwrap();
        assert!(all.add(&vec![0; MAX_BUFFERED_BYTES]).is_ok());
        let more = limits.begin(&tenant(0)).ok().unwrap();
        assert_eq!(more.add(b"x"), Err(NoRoom::OfAll));
        all.discard();
        assert!(more.add(&vec![0; MAX_BUFFERED_BYTES]).is_ok());
        assert!(!is_taken_back(&all));
    }

    #[test]
    fn a_tenants_many_bodies_share_the_parsers_with_another_tenant() {
        let limits = BodyLimits::new(CONNECTIONS);
        let begin = |number| limits.begin(&tenant(number)).ok().unwrap();
        let mut flood: Vec<_> = (0..20)
            .map(|_| Box::pin(begin(1).wait_for_parser(|| false)))
            .collect();
        let parsing = flood.iter_mut().filter_map(FutureExt::now_or_never);
        let mut parsing: Vec<_> = parsing.map(|parsing| parsing.ok().unwrap()).collect();
        assert_eq!(
            parsing.len(),
            MAX_PARSERS as usize,
            "alone, a tenant uses all parsers"
        );
        let mut waiting = Box::pin(begin(2).wait_for_parser(|| false));
        assert!((&mut waiting).now_or_never().is_none());
        parsing.pop();
        assert!(
            (&mut waiting).now_or_never().is_some(),
            "the other tenant waits for one body, not for the flood"
        );
    }

    #[test]
    fn a_large_body_is_parsed_alone() {
        let limits = BodyLimits::new(CONNECTIONS);
        let waiting = |number: u32, bytes: usize| {
            let body = limits.begin(&tenant(number)).ok().unwrap();
            assert!(body.add(&vec![0; bytes]).is_ok());
            Box::pin(body.wait_for_parser(|| false))
        };
        let mut small = waiting(1, LARGE_BYTES);
        let small = (&mut small).now_or_never().unwrap();
        let mut large = [2, 3].map(|number| waiting(number, LARGE_BYTES + 1));
        assert!(large.iter_mut().all(|body| body.now_or_never().is_none()));
        drop(small);
        let first = (&mut large[0]).now_or_never().unwrap();
        assert!((&mut large[1]).now_or_never().is_none());
        assert!(waiting(4, 1).now_or_never().is_none());
        drop(first);
        assert!((&mut large[1]).now_or_never().is_some());
    }

    #[test]
    fn tenants_that_fill_the_parse_queue_give_way_to_one_below_its_share() {
        let limits = BodyLimits::new(4096);
        let begin = |number| limits.begin(&tenant(number)).ok().unwrap();
        let mut floods: Vec<_> = (0..MAX_PARSE_QUEUE + MAX_PARSERS as usize)
            .map(|body| Box::pin(begin(1 + body as u32 % 5).wait_for_parser(|| false)))
            .collect();
        let mut parsing = Vec::new();
        floods.retain_mut(|waiting| match waiting.now_or_never() {
            Some(taken) => {
                parsing.push(taken.ok().unwrap());
                false
            }
            None => true,
        });
        assert_eq!(
            (parsing.len(), floods.len()),
            (MAX_PARSERS as usize, MAX_PARSE_QUEUE)
        );
        let mut late = Box::pin(begin(9).wait_for_parser(|| false));
        assert!(
            (&mut late).now_or_never().is_none(),
            "it waits for a parser"
        );
        let lost = floods.iter_mut().filter_map(FutureExt::now_or_never);
        let lost: Vec<_> = lost.map(Result::err).collect();
        assert_eq!(lost, [Some(NoRoom::OfOwner)]);
    }

    #[test]
    fn a_slow_body_keeps_no_parser_from_others() {
        let limits = BodyLimits::new(CONNECTIONS);
        let begin = |number| limits.begin(&tenant(number)).ok().unwrap();
        let mut slow = [1, 2].map(|number| Box::pin(begin(number).wait_for_parser(|| true)));
        let first = (&mut slow[0]).now_or_never().unwrap();
        assert!((&mut slow[1]).now_or_never().is_none(), "one at a time");
        let others: Vec<_> = (3..5)
            .map(|number| Box::pin(begin(number).wait_for_parser(|| false)).now_or_never())
            .collect();
        assert!(others.iter().all(Option::is_some));
        drop(first);
        assert!((&mut slow[1]).now_or_never().is_some());
    }

    #[test]
    fn a_body_is_read_slowly_if_the_allowance_is_used_up_before_its_turn() {
        let limits = BodyLimits::new(CONNECTIONS);
        let is_beyond = Cell::new(false);
        let waiting = || {
            let body = limits.begin(&tenant(1)).ok().unwrap();
            Box::pin(body.wait_for_parser(|| is_beyond.get()))
        };
        let mut uploads: Vec<_> = (0..5).map(|_| waiting()).collect();
        let parsing = uploads.iter_mut().filter_map(FutureExt::now_or_never);
        let parsing: Vec<_> = parsing.map(Result::unwrap).collect();
        assert_eq!(parsing.len(), MAX_PARSERS as usize);
        is_beyond.set(true);
        drop(parsing);
        let rest = uploads.iter_mut().skip(MAX_PARSERS as usize);
        let (_, slow) = rest
            .filter_map(FutureExt::now_or_never)
            .next()
            .unwrap()
            .unwrap();
        assert_eq!(slow.lane(), Lane::Slow);
    }

    #[test]
    fn slow_bodies_keep_no_parser_from_their_own_tenant() {
        let limits = BodyLimits::new(CONNECTIONS);
        let begin = || limits.begin(&tenant(1)).ok().unwrap();
        let mut slow: Vec<_> = (0..5)
            .map(|_| Box::pin(begin().wait_for_parser(|| true)))
            .collect();
        let parsing: Vec<_> = slow
            .iter_mut()
            .filter_map(FutureExt::now_or_never)
            .collect();
        assert_eq!(parsing.len(), 1);
        assert!(begin().wait_for_parser(|| false).now_or_never().is_some());
    }
}
