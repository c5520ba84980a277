//! The open connections: how many there may be, and which one gives way to a new one.
//!
//! Invariant: a new connection finds a place, if need be by taking another connection's, as long as
//! - a connection waits for a request, or
//! - the new connection's client has fewer connections than another client.
//!
//! A client is a tenant, once a request has named its key, and before that an address: an IPv4
//! address or an IPv6 network of 64 bits, because one machine has all addresses of such a network.
//! Each connection from a loopback address counts as a client of its own, because behind a local
//! proxy every client has such an address.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use tokio::task::{AbortHandle, Id};

use super::{ConnectionLimits, Phase, Progress};
use crate::engine::{Ledger, Share, TenantId};

/// The bits of an IPv6 address that name its network.
const NETWORK_BITS: u128 = !0 << 64;
/// This many connections that have lost their place may still send an error to their client.
pub(super) const MAX_LEAVING: usize = 64;

/// Where a connection comes from; `None` for loopback addresses.
type Origin = Option<IpAddr>;

/// The open connections.
pub(super) struct OpenConnections {
    limit: usize,
    of_address: Share,
    open: HashMap<Id, OpenConnection>,
    by_address: Ledger<IpAddr>,
    leaving: HashSet<Id>, // Tasks that have lost their place and have not ended.
}

struct OpenConnection {
    origin: Origin,
    progress: Arc<Progress>,
    task: AbortHandle,
}

/// Who owns a connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Client {
    Tenant(TenantId),
    Address(IpAddr),
    Local(Option<Id>), // `None` before the connection is accepted.
}

impl OpenConnection {
    fn client(&self) -> Client {
        match (self.progress.tenant(), self.origin) {
            (Some(tenant), _) => Client::Tenant(tenant),
            (None, Some(address)) => Client::Address(address),
            (None, None) => Client::Local(Some(self.task.id())),
        }
    }
}

impl OpenConnections {
    pub(in crate::api) fn new(limits: &ConnectionLimits) -> OpenConnections {
        OpenConnections {
            limit: limits.connections,
            of_address: Share::with_quota(limits.connections_per_ip),
            open: HashMap::new(),
            by_address: Ledger::new(usize::MAX),
            leaving: HashSet::new(),
        }
    }

    /// Makes room for a connection from `ip`. Returns whether there is room now.
    pub(super) fn make_room(&mut self, ip: IpAddr) -> bool {
        let origin = origin(ip);
        let room = |address| self.by_address.room_for(address, self.of_address, 1);
        if origin.is_some_and(|address| room(address).is_err())
            && !self.close_waiting(|connection| connection.origin == origin)
        {
            return false;
        }
        let client = origin.map_or(Client::Local(None), Client::Address);
        self.open.len() < self.limit
            || self.close_waiting(|_| true)
            || self.close_newest_of_largest(client)
    }

    /// Adds a connection from `ip` that runs as `task`.
    pub(in crate::api) fn add(&mut self, task: AbortHandle, ip: IpAddr, progress: Arc<Progress>) {
        let origin = origin(ip);
        if let Some(address) = origin {
            self.by_address.take(address, self.of_address, 1);
        }
        let connection = OpenConnection {
            origin,
            progress,
            task,
        };
        self.open.insert(connection.task.id(), connection);
    }

    /// Removes a connection whose task has ended.
    pub(in crate::api) fn remove(&mut self, task: Id) {
        if !self.leaving.remove(&task) {
            self.take(task);
        }
    }

    fn take(&mut self, task: Id) -> OpenConnection {
        let connection = self.open.remove(&task);
        let connection = connection.expect("each task that ends has been added");
        if let Some(address) = connection.origin {
            self.by_address.give_back(address, 1);
        }
        connection
    }

    /// Counts the connections of each client now: a request may have named another tenant.
    fn by_client(&self) -> Ledger<Client> {
        let mut clients = Ledger::new(self.limit);
        for connection in self.open.values() {
            clients.take(connection.client(), Share::EQUAL, 1);
        }
        clients
    }

    /// Closes one of the connections that wait for a request and that `may_close` accepts. Of their
    /// clients, the one with most connections loses the connection that has waited longest. Returns
    /// whether there was such a connection.
    fn close_waiting(&mut self, may_close: impl Fn(&OpenConnection) -> bool) -> bool {
        let clients = self.by_client();
        self.close_last_by(|connection| {
            let phase = connection.progress.phase();
            let waits = matches!(phase, Phase::Idle | Phase::Head | Phase::Lingering);
            let count = clients.used_by(connection.client());
            let order = (count, Reverse(connection.progress.since()));
            (waits && may_close(connection)).then_some(order)
        })
    }

    /// Closes the newest connection of the client that has most, if `newcomer` has fewer even with
    /// the new one. A connection that is sending a body gives way before one that awaits its
    /// response. Returns whether there is one.
    fn close_newest_of_largest(&mut self, newcomer: Client) -> bool {
        let clients = self.by_client();
        let Ok(Some(largest)) = clients.room_for(newcomer, Share::EQUAL, 1) else {
            return false;
        };
        // Its first request may name the tenant that has its address's other connections.
        if let Client::Address(address) = newcomer
            && self.by_address.used_by(address) + 1 >= clients.used_by(largest)
        {
            return false;
        }
        self.close_last_by(|connection| {
            let progress = &connection.progress;
            let order = (progress.phase() == Phase::Body, progress.opened());
            (connection.client() == largest).then_some(order)
        })
    }

    /// Closes the connection that is last in an order. Connections without a place in the order
    /// stay.
    fn close_last_by<K: Ord>(&mut self, order: impl Fn(&OpenConnection) -> Option<K>) -> bool {
        let ordered = self.open.iter();
        let ordered = ordered.filter_map(|(&task, connection)| Some((order(connection)?, task)));
        let last = ordered.max().map(|(_, task)| task);
        last.map(|task| self.close(task)).is_some()
    }

    /// Takes a connection's place. A client that is sending a body gets an error first.
    fn close(&mut self, task: Id) {
        let connection = self.take(task);
        let is_sending = connection.progress.phase() == Phase::Body;
        if is_sending && self.leaving.len() < MAX_LEAVING {
            connection.progress.evict();
        } else {
            connection.task.abort();
        }
        self.leaving.insert(task);
    }
}

/// Returns where a connection from `ip` comes from.
fn origin(ip: IpAddr) -> Origin {
    let ip = ip.to_canonical();
    match ip {
        ip if ip.is_loopback() => None,
        IpAddr::V4(_) => Some(ip),
        IpAddr::V6(ip) => Some(Ipv6Addr::from_bits(ip.to_bits() & NETWORK_BITS).into()),
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::task::JoinSet;

    use super::*;

    /// A server whose connections wait for ever.
    struct Connections {
        open: OpenConnections,
        tasks: JoinSet<()>,
    }

    impl Connections {
        fn new(connections: usize, connections_per_ip: usize) -> Connections {
            let limits = ConnectionLimits {
                connections,
                connections_per_ip,
                ..ConnectionLimits::default()
            };
            Connections {
                open: OpenConnections::new(&limits),
                tasks: JoinSet::new(),
            }
        }

        /// Opens a connection from `ip`, if there is room.
        fn connect(&mut self, ip: &str, phase: Phase) -> Option<Arc<Progress>> {
            let ip = ip.parse().unwrap();
            self.open.make_room(ip).then(|| {
                let progress = Arc::new(Progress::new());
                progress.enter(phase);
                let task = self.tasks.spawn(pending());
                self.open.add(task, ip, Arc::clone(&progress));
                progress
            })
        }

        fn is_open(&self, progress: &Arc<Progress>) -> bool {
            let mut open = self.open.open.values();
            open.any(|connection| Arc::ptr_eq(&connection.progress, progress))
        }
    }

    #[tokio::test]
    async fn connections_are_limited_in_total_and_by_address() {
        let mut server = Connections::new(5, 2);
        let first = server.connect("192.0.2.1", Phase::Response).unwrap();
        assert!(
            server
                .connect("::ffff:192.0.2.1", Phase::Response)
                .is_some()
        );
        assert!(server.connect("192.0.2.1", Phase::Response).is_none());
        let (&task, _) = (server.open.open.iter())
            .find(|(_, connection)| Arc::ptr_eq(&connection.progress, &first))
            .unwrap();
        server.open.remove(task);
        assert!(server.connect("192.0.2.1", Phase::Response).is_some());
        assert!(server.connect("2001:db8::1", Phase::Response).is_some());
        assert!(
            server
                .connect("2001:db8::ffff:1", Phase::Response)
                .is_some()
        );
        let network = server.connect("2001:db8:0:0:2::", Phase::Response);
        assert!(network.is_none(), "it is the same network of 64 bits");
        assert!(server.connect("2001:db8:0:1::1", Phase::Response).is_some());
        assert!(
            server.connect("127.0.0.1", Phase::Response).is_some(),
            "from one that has two"
        );
        assert!(server.connect("127.0.0.1", Phase::Response).is_some());
        assert!(
            server.connect("::1", Phase::Response).is_none(),
            "each client has one"
        );
        assert_eq!(server.open.open.len(), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn connections_without_a_request_give_way_first() {
        let mut server = Connections::new(4, 3);
        let small = server.connect("192.0.2.1", Phase::Idle).unwrap();
        let large = [Phase::Response, Phase::Head, Phase::Idle]
            .map(|phase| server.connect("192.0.2.2", phase).unwrap());
        assert!(
            server.connect("192.0.2.2", Phase::Response).is_some(),
            "in its own place"
        );
        assert!(server.is_open(&large[0]) && server.is_open(&small));
        assert!(server.connect("192.0.2.3", Phase::Response).is_some());
        assert!(!large[1..].iter().any(|idle| server.is_open(idle)));
        assert!(server.connect("192.0.2.4", Phase::Response).is_some());
        assert!(!server.is_open(&small), "the last idle connection");
        assert_eq!(server.open.open.len(), 4);
        assert!(
            server.connect("192.0.2.5", Phase::Response).is_some(),
            "from one that has two"
        );
        assert!(
            server.connect("192.0.2.6", Phase::Response).is_none(),
            "each client has one"
        );
    }

    #[tokio::test]
    async fn however_many_clients_flood_another_one_gets_in() {
        for floods in [4, 1000] {
            let mut server = Connections::new(4096, 2048);
            let each = 4096_usize.div_ceil(floods);
            let mut flooding = Vec::new();
            for number in 0..floods {
                let ip = format!("10.0.{}.{}", number / 256, number % 256);
                for _ in 0..each {
                    flooding.extend(server.connect(&ip, Phase::Body));
                }
            }
            assert!(flooding.len() >= 4096);
            let late = server.connect("192.0.2.1", Phase::Body).unwrap();
            let again = server.connect("192.0.2.1", Phase::Response).unwrap();
            assert!(server.is_open(&late) && server.is_open(&again));
            assert_eq!(server.open.open.len(), 4096);
        }
    }

    #[tokio::test]
    async fn a_tenant_with_its_share_displaces_no_other() {
        let mut server = Connections::new(4, 4);
        let of_tenant = |server: &mut Connections, ip, number| {
            let connection = server.connect(ip, Phase::Response).unwrap();
            connection.set_tenant(TenantId(number));
            connection
        };
        let first = [0, 1].map(|_| of_tenant(&mut server, "192.0.2.1", 1));
        let second = [0, 1].map(|_| of_tenant(&mut server, "192.0.2.2", 2));
        assert!(server.connect("192.0.2.1", Phase::Response).is_none());
        assert!(server.connect("192.0.2.2", Phase::Response).is_none());
        assert!(first.iter().chain(&second).all(|one| server.is_open(one)));
    }

    #[tokio::test]
    async fn behind_a_proxy_the_tenant_with_most_connections_gives_way() {
        let mut server = Connections::new(10, 1);
        let of_tenant = |server: &mut Connections, number| {
            let connection = server.connect("127.0.0.1", Phase::Body).unwrap();
            connection.set_tenant(TenantId(number));
            connection
        };
        let many: Vec<_> = (0..9).map(|_| of_tenant(&mut server, 1)).collect();
        let few = of_tenant(&mut server, 2);
        let late = server.connect("127.0.0.1", Phase::Body).unwrap();
        assert!(server.is_open(&few) && server.is_open(&late));
        assert_eq!(many.iter().filter(|one| server.is_open(one)).count(), 8);
    }
}
