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
//! Invariant: a tenant of the file may use at most a quarter of each resource. The server rejects
//! the tenant's further bodies with 429.
//!
//! Invariant: a tenant that stays below its share of a resource always gets it, however many
//! tenants use it. The share is the limit divided by the number of tenants that use the resource.
//! If nothing is left, the tenant that uses most loses its newest body: the server frees it at once
//! and answers its request 429.
//!
//! Invariant: the server rejects no body for lack of a parser. Bodies take parsers in the order of
//! their arrival, and at most as many bodies of one tenant as there are parsers wait in the
//! server's queue. So a tenant's body waits for few bodies of another tenant.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::engine::TenantId;
use crate::metrics::RejectionReason;
use crate::tenants::Tenant;

const MAX_PARSERS: u32 = 2;
/// A larger body takes all parsers, because tokenizing its text takes hundreds of bytes for each.
const LARGE_BYTES: usize = 256 << 10;
const MAX_PARSE_QUEUE: usize = 256;
const MAX_BUFFERED_BYTES: usize = 64 << 20;
/// A tenant of the file may use the server's limit divided by this.
const TENANT_DIVISOR: usize = 4;
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
    of_server: Amounts,
    of_tenant: Amounts,
    ledger: Mutex<Ledger>,
    parsers: Arc<Semaphore>,
    tenants_parsers: Mutex<HashMap<TenantId, Arc<Semaphore>>>, // Of tenants that have sent a body.
}

/// The limit that a body exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) enum BodyLimitReached {
    /// The tenant's own limit, or its share when others need theirs.
    Tenant,
    /// The limit of the server.
    Server,
}

impl BodyLimitReached {
    /// Returns the reason under which the metrics count the rejection.
    pub(in crate::api) fn reason(self) -> RejectionReason {
        match self {
            BodyLimitReached::Tenant => RejectionReason::TenantQueueFull,
            BodyLimitReached::Server => RejectionReason::QueueFull,
        }
    }
}

/// Who uses how much.
#[derive(Default)]
struct Ledger {
    used: Amounts,
    tenants: HashMap<TenantId, TenantBodies>, // Only tenants with a body.
    next_body: u64,
}

#[derive(Default)]
struct TenantBodies {
    used: Amounts,
    bodies: BTreeMap<u64, BodyEntry>, // In the order of their arrival.
}

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

impl Ledger {
    /// Adds `count` of `resource` to what a body uses. Returns whether the body still has room.
    fn add(&mut self, tenant: TenantId, body: u64, resource: Resource, count: usize) -> bool {
        let at = resource as usize;
        let Some(of_tenant) = self.tenants.get_mut(&tenant) else {
            return false;
        };
        let Some(entry) = of_tenant.bodies.get_mut(&body) else {
            return false;
        };
        for used in [&mut entry.used, &mut of_tenant.used, &mut self.used] {
            used[at] += count;
        }
        true
    }

    /// Removes a body and all that it uses.
    fn remove(&mut self, tenant: TenantId, body: u64) -> Option<BodyEntry> {
        let of_tenant = self.tenants.get_mut(&tenant)?;
        let entry = of_tenant.bodies.remove(&body)?;
        for (at, count) in entry.used.iter().enumerate() {
            of_tenant.used[at] -= count;
            self.used[at] -= count;
        }
        if of_tenant.bodies.is_empty() {
            self.tenants.remove(&tenant);
        }
        Some(entry)
    }

    fn used_by(&self, tenant: TenantId) -> Amounts {
        let of_tenant = self.tenants.get(&tenant);
        of_tenant.map_or([0; 3], |of_tenant| of_tenant.used)
    }

    /// Returns the share of a tenant of `limit`. `tenant` counts as one that uses the resource.
    fn share(&self, tenant: TenantId, resource: Resource, limit: usize) -> usize {
        let uses = |(id, of_tenant): &(&TenantId, &TenantBodies)| {
            **id != tenant && of_tenant.used[resource as usize] > 0
        };
        limit / (1 + self.tenants.iter().filter(uses).count())
    }

    /// Takes back the room of the newest body of the tenant that uses most of `resource`.
    fn take_back(&mut self, resource: Resource) {
        let at = resource as usize;
        let most = self.tenants.iter();
        let most = most.max_by_key(|(id, of_tenant)| (of_tenant.used[at], id.0));
        let (&tenant, of_tenant) = most.expect("a tenant uses the resource");
        let mut newest_first = of_tenant.bodies.iter().rev();
        let newest = newest_first.find(|(_, entry)| entry.used[at] > 0);
        let (&body, _) = newest.expect("a tenant uses what its bodies use");
        let entry = self.remove(tenant, body).expect("it has just been found");
        *entry.buffer.bytes() = None;
        entry.buffer.taken_back.notify_one();
    }
}

impl BodyLimits {
    /// Returns the limits of a server that accepts at most `connections` connections.
    pub(in crate::api) fn new(connections: usize) -> BodyLimits {
        // The other connections are for heads and for the responses that say why a body must wait.
        let arriving = (connections - connections / TENANT_DIVISOR).max(MIN_ARRIVING);
        let tenants_arriving = (connections / TENANT_DIVISOR).max(MIN_ARRIVING);
        BodyLimits {
            of_server: [arriving, MAX_BUFFERED_BYTES, MAX_PARSE_QUEUE],
            of_tenant: [
                tenants_arriving,
                MAX_BUFFERED_BYTES / TENANT_DIVISOR,
                MAX_PARSE_QUEUE / TENANT_DIVISOR,
            ],
            ledger: Mutex::default(),
            parsers: Arc::new(Semaphore::new(MAX_PARSERS as usize)),
            tenants_parsers: Mutex::default(),
        }
    }

    /// Begins to receive a body of `tenant`.
    ///
    /// # Errors
    /// If too many bodies are arriving.
    pub(in crate::api) fn begin(
        &self,
        tenant: &Tenant,
    ) -> Result<ArrivingBody<'_>, BodyLimitReached> {
        let buffer = Arc::new(BodyBuffer {
            bytes: Mutex::new(Some(Vec::new())),
            taken_back: Notify::new(),
        });
        let mut ledger = self.ledger();
        let number = ledger.next_body;
        ledger.next_body += 1;
        let of_tenant = ledger.tenants.entry(tenant.number).or_default();
        let entry = BodyEntry {
            used: [0; 3],
            buffer: Arc::clone(&buffer),
        };
        of_tenant.bodies.insert(number, entry);
        drop(ledger);
        let body = ArrivingBody {
            limits: self,
            tenant: tenant.number,
            is_anyone: tenant.is_anyone(),
            number,
            buffer,
        };
        body.take(Resource::Arriving, 1)?;
        Ok(body)
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // The lock's poison is harmless: a failed assertion in a change is a bug anyway.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the parsers that a body of `bytes` bytes needs, and takes them. On a server
    /// without API keys, all clients are one tenant, and it may use all parsers.
    async fn parser(&self, tenant: TenantId, bytes: usize) -> ParserPermit {
        let count = if bytes > LARGE_BYTES { MAX_PARSERS } else { 1 };
        let acquire = async |parsers: Arc<Semaphore>| {
            let permit = parsers.acquire_many_owned(count).await;
            permit.expect("the semaphore is never closed")
        };
        let tenants_parsers = {
            let tenants = &self.tenants_parsers;
            let mut tenants = tenants.lock().unwrap_or_else(PoisonError::into_inner);
            let new = || Arc::new(Semaphore::new(MAX_PARSERS as usize));
            Arc::clone(tenants.entry(tenant).or_insert_with(new))
        };
        // The tenant's permit first: while a body waits for it, the body is not in the server's
        // queue, where other tenants would wait behind it.
        let of_tenant = acquire(tenants_parsers).await;
        let of_server = acquire(Arc::clone(&self.parsers)).await;
        ParserPermit {
            _of_tenant: of_tenant,
            _of_server: of_server,
        }
    }
}

/// A parser. Dropping the permit returns it.
pub(super) struct ParserPermit {
    _of_tenant: OwnedSemaphorePermit,
    _of_server: OwnedSemaphorePermit,
}

/// A body that arrives or waits for a parser. Dropping it returns its room.
pub(in crate::api) struct ArrivingBody<'a> {
    limits: &'a BodyLimits,
    tenant: TenantId,
    is_anyone: bool,
    number: u64,
    buffer: Arc<BodyBuffer>,
}

impl ArrivingBody<'_> {
    /// Adds bytes that have arrived.
    ///
    /// # Errors
    /// If they do not fit, or if the server has taken the body's room back.
    pub(in crate::api) fn add(&self, bytes: &[u8]) -> Result<(), BodyLimitReached> {
        self.take(Resource::Bytes, bytes.len())?;
        match &mut *self.buffer.bytes() {
            Some(buffer) => buffer.extend_from_slice(bytes),
            None => return Err(BodyLimitReached::Tenant),
        }
        Ok(())
    }

    /// Frees the bytes of a body that will be rejected. The body may still be arriving.
    pub(super) fn discard(&self) {
        let mut ledger = self.limits.ledger();
        if let Some(entry) = ledger.remove(self.tenant, self.number) {
            *entry.buffer.bytes() = None;
            let of_tenant = ledger.tenants.entry(self.tenant).or_default();
            let buffer = Arc::clone(&self.buffer);
            let used = [0; 3];
            of_tenant
                .bodies
                .insert(self.number, BodyEntry { used, buffer });
            ledger.add(self.tenant, self.number, Resource::Arriving, 1);
        }
    }

    /// Waits until the server takes the body's room back. It may never do so.
    pub(super) async fn taken_back(&self) -> BodyLimitReached {
        self.buffer.taken_back.notified().await;
        BodyLimitReached::Tenant
    }

    /// Returns the bytes of a body that has arrived. From here on they count no more.
    ///
    /// # Errors
    /// If the server has taken the body's room back.
    pub(super) fn into_bytes(self) -> Result<Vec<u8>, BodyLimitReached> {
        let bytes = self.buffer.bytes().take();
        bytes.ok_or(BodyLimitReached::Tenant)
    }

    /// Waits for a parser. Returns it with the bytes of the body, which count no more.
    ///
    /// # Errors
    /// If too many bodies wait, or if the server takes the body's room back meanwhile.
    pub(super) async fn wait_for_parser(self) -> Result<(Vec<u8>, ParserPermit), BodyLimitReached> {
        self.take(Resource::ParseQueue, 1)?;
        let bytes = self.buffer.bytes().as_ref().map_or(0, Vec::len);
        tokio::select! {
            limit = self.taken_back() => Err(limit),
            parser = self.limits.parser(self.tenant, bytes) => Ok((self.into_bytes()?, parser)),
        }
    }

    /// Takes `count` of `resource`, if necessary from the tenants that use most of it.
    fn take(&self, resource: Resource, count: usize) -> Result<(), BodyLimitReached> {
        let at = resource as usize;
        let mut ledger = self.limits.ledger();
        let wanted = ledger.used_by(self.tenant)[at] + count;
        if !self.is_anyone && wanted > self.limits.of_tenant[at] {
            return Err(BodyLimitReached::Tenant);
        }
        let limit = self.limits.of_server[at];
        if ledger.used[at] + count > limit {
            // If this tenant stays below its share, another one is above: the shares of those that
            // use the resource add up to the limit.
            if wanted > ledger.share(self.tenant, resource, limit) {
                return Err(BodyLimitReached::Server);
            }
            while ledger.used[at] + count > limit {
                ledger.take_back(resource);
            }
        }
        let has_room = ledger.add(self.tenant, self.number, resource, count);
        has_room.then_some(()).ok_or(BodyLimitReached::Tenant)
    }
}

impl Drop for ArrivingBody<'_> {
    fn drop(&mut self) {
        self.limits.ledger().remove(self.tenant, self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::tenants::{Deadlines, Tenants};

    const CONNECTIONS: usize = 100;
    const QUOTA: usize = MAX_BUFFERED_BYTES / TENANT_DIVISOR;

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
        assert_eq!(many.len(), CONNECTIONS / TENANT_DIVISOR);
        let last = &many[0];
        assert!(last.add(&vec![0; QUOTA - many.len()]).is_ok());
        assert_eq!(last.add(b"x"), Err(BodyLimitReached::Tenant));
        let other = limits.begin(&tenant(2)).ok().unwrap();
        assert!(other.add(&vec![0; QUOTA]).is_ok());
        drop(many);
        let again = limits.begin(&tenant(1)).ok().unwrap();
        assert!(again.add(&vec![0; QUOTA]).is_ok());
        drop((other, again));
        assert_eq!(limits.ledger().used, [0; 3]);
        assert!(limits.ledger().tenants.is_empty());
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
            assert_eq!(newest.add(b"x"), Err(BodyLimitReached::Tenant));
            assert!(!is_taken_back(oldest));
            let whole_share = MAX_BUFFERED_BYTES / (floods + 1);
            assert_eq!(small.add(&vec![0; whole_share - 4000]), Ok(()));
            let left = MAX_BUFFERED_BYTES - limits.ledger().used[Resource::Bytes as usize];
            assert!(
                small.add(&vec![0; left + 1]).is_err(),
                "it is above its share"
            );
            assert!(limits.ledger().used[Resource::Bytes as usize] <= MAX_BUFFERED_BYTES);
        }
    }

    #[test]
    fn tenants_whose_bodies_never_end_leave_connections_for_another_tenant() {
        let limits = BodyLimits::new(CONNECTIONS);
        let floods: Vec<_> = (1..=4).map(|number| flood(&limits, number, 1)).collect();
        let used = limits.ledger().used[Resource::Arriving as usize];
        assert_eq!(used, CONNECTIONS - CONNECTIONS / TENANT_DIVISOR);
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
        assert_eq!(more.add(b"x"), Err(BodyLimitReached::Server));
        all.discard();
        assert!(more.add(&vec![0; MAX_BUFFERED_BYTES]).is_ok());
        assert!(!is_taken_back(&all));
    }

    #[test]
    fn a_tenants_many_bodies_share_the_parsers_with_another_tenant() {
        let limits = BodyLimits::new(CONNECTIONS);
        let begin = |number| limits.begin(&tenant(number)).ok().unwrap();
        let mut flood: Vec<_> = (0..20)
            .map(|_| Box::pin(begin(1).wait_for_parser()))
            .collect();
        let parsing = flood.iter_mut().filter_map(FutureExt::now_or_never);
        let mut parsing: Vec<_> = parsing.map(|parsing| parsing.ok().unwrap()).collect();
        assert_eq!(
            parsing.len(),
            MAX_PARSERS as usize,
            "alone, a tenant uses all parsers"
        );
        let mut waiting = Box::pin(begin(2).wait_for_parser());
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
            Box::pin(body.wait_for_parser())
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
            .map(|body| Box::pin(begin(1 + body as u32 % 5).wait_for_parser()))
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
        let mut late = Box::pin(begin(9).wait_for_parser());
        assert!(
            (&mut late).now_or_never().is_none(),
            "it waits for a parser"
        );
        let lost = floods.iter_mut().filter_map(FutureExt::now_or_never);
        let lost: Vec<_> = lost.map(Result::err).collect();
        assert_eq!(lost, [Some(BodyLimitReached::Tenant)]);
    }
}
