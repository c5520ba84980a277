//! The limits for connections.

use std::time::Duration;

/// The limits for connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// The maximum number of open connections.
    pub connections: usize,
    /// The maximum number of open connections from one address. Loopback addresses are exempt,
    /// because behind a local proxy every client has such an address.
    pub connections_per_ip: usize,
    /// The maximum size of a request's head. The same number of response bytes may wait for the
    /// client, in addition to the operating system's buffer.
    pub buffer_bytes: usize,
    /// The time limit for a request's head, from its first byte. The first head's time begins with
    /// the connection.
    pub header_timeout: Duration,
    /// The time limit between a response and the next request.
    pub idle_timeout: Duration,
    /// A client for which a response waits must read `buffer_bytes` of it, or all of it, in each
    /// period of this length.
    pub stall_timeout: Duration,
    /// The time that one response may wait for its client, in total.
    pub waiting_timeout: Duration,
    /// The time limit for running responses after the listener has stopped.
    pub grace: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> ConnectionLimits {
        ConnectionLimits {
            connections: 4096,
            connections_per_ip: 256,
            buffer_bytes: 16 << 10,
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(75),
            stall_timeout: Duration::from_secs(30),
            waiting_timeout: Duration::from_mins(5),
            grace: Duration::from_secs(5),
        }
    }
}
