//! Limits for request bodies.
//!
//! Four resources are limited, for the server and for each tenant of the tenants file:
//!
//! - connections that are receiving a body,
//! - bytes of bodies that have arrived and are not parsed yet (the body buffer),
//! - bodies that are being parsed or wait for a parser (the parse queue),
//! - parsers, which read, render and tokenize bodies off the async threads.
//!
//! Invariant: a tenant of the file may use at most a quarter of the first three. The server rejects
//! the tenant's further bodies at once with 429, so a tenant's slow or many bodies leave capacity
//! for other tenants.
//!
//! Invariant: the server rejects no body for lack of a parser. Bodies take parsers in the order of
//! their arrival, and at most as many bodies of one tenant as there are parsers wait in the
//! server's queue. So a tenant's body waits for few bodies of another tenant.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::engine::TenantId;
use crate::metrics::RejectionReason;
use crate::tenants::Tenant;

const MAX_PARSERS: usize = 2;
const MAX_PARSE_QUEUE: usize = MAX_PARSERS + 256;
const MAX_BUFFERED_BYTES: usize = 64 << 20;
/// A tenant of the file may use the server's limit divided by this.
const TENANT_DIVISOR: usize = 4;
/// A tenant may always receive this many bodies at the same time, even if connections are few.
const MIN_RECEIVING: usize = 8;

/// The limits of a server, and what of them is in use.
pub(super) struct BodyLimits {
    connections: usize,
    server: Arc<BodySemaphores>,
    tenants: Mutex<HashMap<TenantId, Arc<BodySemaphores>>>, // Only tenants that have sent a body.
}

/// The limit that a body exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyLimitReached {
    /// The tenant's own limit.
    Tenant,
    /// The limit of the server.
    Server,
}

impl BodyLimitReached {
    /// Returns the reason under which the metrics count the rejection.
    pub(super) fn reason(self) -> RejectionReason {
        match self {
            BodyLimitReached::Tenant => RejectionReason::TenantQueueFull,
            BodyLimitReached::Server => RejectionReason::QueueFull,
        }
    }
}

struct BodySemaphores {
    receiving: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    parse_queue: Arc<Semaphore>,
    parsers: Arc<Semaphore>,
}

impl BodySemaphores {
    fn new(receiving: usize, bytes: usize, parse_queue: usize) -> BodySemaphores {
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        BodySemaphores {
            receiving: semaphore(receiving),
            bytes: semaphore(bytes),
            parse_queue: semaphore(parse_queue),
            parsers: semaphore(MAX_PARSERS),
        }
    }
}

impl BodyLimits {
    /// Returns the limits of a server that accepts at most `connections` connections.
    pub(super) fn new(connections: usize) -> BodyLimits {
        let server = BodySemaphores::new(connections, MAX_BUFFERED_BYTES, MAX_PARSE_QUEUE);
        BodyLimits {
            connections,
            server: Arc::new(server),
            tenants: Mutex::default(),
        }
    }

    /// Returns the quota of `tenant`. On a server without API keys it is the whole server.
    pub(super) fn quota(&self, tenant: &Tenant) -> BodyQuota {
        let receiving = (self.connections / TENANT_DIVISOR).max(MIN_RECEIVING);
        let new_tenant = || {
            Arc::new(BodySemaphores::new(
                receiving,
                MAX_BUFFERED_BYTES / TENANT_DIVISOR,
                MAX_PARSE_QUEUE / TENANT_DIVISOR,
            ))
        };
        let own = (!tenant.is_anyone()).then(|| {
            // The lock's poison is harmless: no change of the map can panic halfway.
            let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
            let own = tenants.entry(tenant.number).or_insert_with(new_tenant);
            Arc::clone(own)
        });
        BodyQuota {
            tenant: own,
            server: Arc::clone(&self.server),
        }
    }
}

/// What one tenant may use.
pub(super) struct BodyQuota {
    tenant: Option<Arc<BodySemaphores>>,
    server: Arc<BodySemaphores>,
}

/// A part of a limited resource. Dropping the permit returns it.
pub(super) struct BodyPermit {
    tenant: Option<OwnedSemaphorePermit>,
    server: OwnedSemaphorePermit,
}

impl BodyPermit {
    /// Adds `more` of the same resource.
    pub(super) fn merge(&mut self, more: BodyPermit) {
        if let (Some(tenant), Some(more)) = (&mut self.tenant, more.tenant) {
            tenant.merge(more);
        }
        self.server.merge(more.server);
    }
}

impl BodyQuota {
    /// Takes a connection that is receiving a body.
    pub(super) fn receiving(&self) -> Result<BodyPermit, BodyLimitReached> {
        self.take(|semaphores| &semaphores.receiving, 1)
    }

    /// Takes `count` bytes of the body buffer.
    pub(super) fn bytes(&self, count: usize) -> Result<BodyPermit, BodyLimitReached> {
        self.take(|semaphores| &semaphores.bytes, count)
    }

    /// Takes a place in the parse queue.
    pub(super) fn queue_place(&self) -> Result<BodyPermit, BodyLimitReached> {
        self.take(|semaphores| &semaphores.parse_queue, 1)
    }

    /// Waits for a parser and takes it.
    pub(super) async fn parser(&self) -> BodyPermit {
        let acquire = async |semaphores: &BodySemaphores| {
            let parsers = Arc::clone(&semaphores.parsers);
            let permit = parsers.acquire_owned().await;
            permit.expect("the semaphore is never closed")
        };
        // The tenant's permit first: while a body waits for it, the body is not in the server's
        // queue, where other tenants would wait behind it.
        let tenant = match &self.tenant {
            Some(tenant) => Some(acquire(tenant).await),
            None => None,
        };
        let server = acquire(&self.server).await;
        BodyPermit { tenant, server }
    }

    fn take(
        &self,
        resource: fn(&BodySemaphores) -> &Arc<Semaphore>,
        count: usize,
    ) -> Result<BodyPermit, BodyLimitReached> {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let acquire = |semaphores: &BodySemaphores| {
            Arc::clone(resource(semaphores)).try_acquire_many_owned(count)
        };
        let tenant = self.tenant.as_deref().map(acquire).transpose();
        let tenant = tenant.map_err(|_| BodyLimitReached::Tenant)?;
        let server = acquire(&self.server).map_err(|_| BodyLimitReached::Server)?;
        Ok(BodyPermit { tenant, server })
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
    fn a_tenant_that_uses_its_quota_leaves_the_rest_to_others() {
        let limits = BodyLimits::new(CONNECTIONS);
        let [one, other] = [1, 2].map(|number| limits.quota(&tenant(number)));
        let mut held = one
            .bytes(MAX_BUFFERED_BYTES / TENANT_DIVISOR - 1)
            .ok()
            .unwrap();
        held.merge(one.bytes(1).ok().unwrap());
        assert_eq!(one.bytes(1).err(), Some(BodyLimitReached::Tenant));
        assert_eq!(
            limits.quota(&tenant(1)).bytes(1).err(),
            Some(BodyLimitReached::Tenant),
            "a tenant has one quota, however often it is looked up"
        );
        assert!(other.bytes(MAX_BUFFERED_BYTES / TENANT_DIVISOR).is_ok());
        let queued: Vec<BodyPermit> = std::iter::from_fn(|| one.queue_place().ok()).collect();
        assert_eq!(queued.len(), MAX_PARSE_QUEUE / TENANT_DIVISOR);
        assert!(other.queue_place().is_ok());
        let receiving: Vec<BodyPermit> = std::iter::from_fn(|| one.receiving().ok()).collect();
        assert_eq!(receiving.len(), CONNECTIONS / TENANT_DIVISOR);
        assert!(other.receiving().is_ok());
        drop((held, queued, receiving));
        assert!(one.bytes(MAX_BUFFERED_BYTES / TENANT_DIVISOR).is_ok());
        assert!(one.queue_place().is_ok());
        assert!(one.receiving().is_ok());
    }

    #[test]
    fn all_tenants_together_reach_the_servers_limit() {
        let limits = BodyLimits::new(CONNECTIONS);
        let quotas = (1..=4).map(|number| limits.quota(&tenant(number)));
        let held: Vec<BodyPermit> = quotas
            .map(|quota| {
                quota
                    .bytes(MAX_BUFFERED_BYTES / TENANT_DIVISOR)
                    .ok()
                    .unwrap()
            })
            .collect();
        let last = limits.quota(&tenant(5));
        assert_eq!(last.bytes(1).err(), Some(BodyLimitReached::Server));
        drop(held);
        assert!(last.bytes(1).is_ok());
    }

    #[test]
    fn without_api_keys_all_clients_share_the_servers_limit() {
        let quota = BodyLimits::new(CONNECTIONS).quota(&tenant(0));
        let all = quota.bytes(MAX_BUFFERED_BYTES).ok().unwrap();
        assert_eq!(quota.bytes(1).err(), Some(BodyLimitReached::Server));
        drop(all);
        assert!(quota.bytes(MAX_BUFFERED_BYTES).is_ok());
    }

    #[test]
    fn a_tenants_many_bodies_share_the_parsers_with_another_tenant() {
        let limits = BodyLimits::new(CONNECTIONS);
        let [many, one] = [1, 2].map(|number| limits.quota(&tenant(number)));
        let mut flood: Vec<_> = (0..20).map(|_| Box::pin(many.parser())).collect();
        let mut held: Vec<BodyPermit> = Vec::new();
        held.extend(flood.iter_mut().filter_map(FutureExt::now_or_never));
        assert_eq!(held.len(), MAX_PARSERS, "alone, a tenant uses all parsers");
        let mut waiting = Box::pin(one.parser());
        assert!((&mut waiting).now_or_never().is_none());
        held.pop();
        assert!(
            (&mut waiting).now_or_never().is_some(),
            "the other tenant waits for one body, not for the flood"
        );
    }
}
