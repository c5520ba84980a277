//! Where the server listens, and which hosts and origins it answers to.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::{TcpListener, TcpSocket};

use crate::api::{Access, AllowedHosts, AllowedOrigins, HostName, parse_origin};
use crate::config::NetworkFlags;

/// The bytes of responses that the system keeps for a client that does not read. The system doubles
/// the number, for its own use. It has to hold several segments of loopback, of 64 KiB each: a
/// client delays the acknowledgement of a single one by 40 ms.
const SEND_BUFFER_BYTES: u32 = 256 << 10;
/// Connections that the system may hold until the server accepts them.
const BACKLOG: u32 = 4096;
/// Files that the process needs beside its connections.
const OTHER_FILES: u64 = 256;
/// Files of the processes of grammars, three for each. With fewer, the last grammars get 503.
const GRAMMAR_FILES: u64 = 768;
/// Allows all hosts or origins.
const ANY: &str = "*";

/// Returns the addresses of `--host`.
///
/// # Errors
/// If it is neither an address nor a name that this machine can resolve.
pub(super) fn addresses(network: &NetworkFlags) -> Result<Vec<SocketAddr>, String> {
    let host = &network.host;
    let cannot = |why: String| {
        format!(
            "--host {host}: {why}. Give an address of this machine, or a name that it can resolve"
        )
    };
    let resolved = (host.as_str(), network.port).to_socket_addrs();
    let mut addresses: Vec<SocketAddr> = resolved.map_err(|e| cannot(e.to_string()))?.collect();
    addresses.sort();
    addresses.dedup();
    if addresses.is_empty() {
        return Err(cannot("the name has no address".into()));
    }
    Ok(addresses)
}

/// Returns whether only this machine can reach all of `addresses`.
pub(super) fn are_loopback(addresses: &[SocketAddr]) -> bool {
    let mut ips = addresses.iter().map(|address| address.ip().to_canonical());
    ips.all(|ip| ip.is_loopback())
}

/// Listens on all of `addresses`, at the same port. Call it inside the runtime.
///
/// # Errors
/// If an address is in use or does not belong to this machine. If a name has an address of a kind
/// that this machine does not have, such as `::1` without IPv6, its other addresses suffice.
pub(super) fn listen(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>, String> {
    let mut listeners: Vec<TcpListener> = Vec::new();
    let mut missing = None;
    for &address in addresses {
        let mut address = address;
        if let Some(first) = listeners.first() {
            let bound = first.local_addr().map_err(|error| error.to_string())?;
            address.set_port(bound.port()); // Else port 0 would mean another one for each.
        }
        match bind(address) {
            Ok(listener) => listeners.push(listener),
            Err(error) => {
                let message = format!("cannot listen on {address}: {error}{}", advice(&error));
                if error.kind() == io::ErrorKind::AddrInUse || addresses.len() == 1 {
                    return Err(message);
                }
                missing = Some(message);
            }
        }
    }
    match missing {
        Some(message) if listeners.is_empty() => Err(message),
        Some(message) => {
            tracing::warn!(message, "listening on the other addresses of --host only");
            Ok(listeners)
        }
        None => Ok(listeners),
    }
}

/// Returns what to do about an address that cannot be used.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            ". Another program listens there: end it, or choose another --port (0 takes a free one)"
        }
        io::ErrorKind::PermissionDenied => ". Choose a --port of 1024 or more",
        _ => ". Give a --host that belongs to this machine",
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()
    } else {
        TcpSocket::new_v6()
    }?;
    socket.set_reuseaddr(true)?;
    socket.set_send_buffer_size(SEND_BUFFER_BYTES)?; // Each connection inherits it.
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Raises this process's limit of open files to what `connections` connections need, as far as the
/// system allows. Returns how many connections the limit allows.
pub(super) fn allow_files(connections: u32) -> u32 {
    let wanted = u64::from(connections) + OTHER_FILES + GRAMMAR_FILES;
    let limit = getrlimit(Resource::Nofile);
    let allowed = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
    if allowed(limit.current) < wanted {
        let raised = Rlimit {
            current: Some(wanted.min(allowed(limit.maximum))),
            maximum: limit.maximum,
        };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%error, "cannot raise the limit of open files");
        }
    }
    let files = allowed(getrlimit(Resource::Nofile).current);
    let possible = files.saturating_sub(OTHER_FILES).max(1);
    let possible = u32::try_from(possible).unwrap_or(u32::MAX).min(connections);
    if possible < connections {
        tracing::warn!(
            files,
            connections = possible,
            "the limit of open files (ulimit -Hn) allows fewer connections than --max-connections"
        );
    }
    possible
}

/// Returns the hosts and origins that the server answers to.
///
/// # Errors
/// If a flag names no host or no origin.
pub(super) fn access(
    network: &NetworkFlags,
    addresses: &[SocketAddr],
    has_keys: bool,
) -> Result<Access, String> {
    // A page cannot know a key. And behind a proxy, the host is the proxy's public name.
    let is_open = has_keys && !are_loopback(addresses) && network.allowed_host.is_empty();
    let hosts = if is_open || network.allowed_host.iter().any(|host| host == ANY) {
        None
    } else {
        let named = network.allowed_host.iter().map(|host| {
            let name = host.parse::<HostName>();
            name.map_err(|error| format!("--allowed-host {error}"))
        });
        let mut hosts = named.collect::<Result<Vec<_>, _>>()?;
        hosts.extend(network.host.parse::<HostName>());
        let bound = addresses.iter().map(|address| address.ip().to_canonical());
        hosts.extend(bound.map(HostName::Address));
        let any_address = addresses
            .iter()
            .any(|address| address.ip().is_unspecified());
        Some(AllowedHosts { hosts, any_address })
    };
    let origins = if network.allowed_origin.iter().any(|origin| origin == ANY) {
        AllowedOrigins::Any
    } else {
        let origins = network.allowed_origin.iter().map(|origin| {
            let origin = parse_origin(origin);
            origin.map_err(|error| format!("--allowed-origin {error}"))
        });
        AllowedOrigins::Listed(origins.collect::<Result<_, _>>()?)
    };
    Ok(Access { hosts, origins })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::config::Cli;

    fn network(flags: &[&str]) -> NetworkFlags {
        let cli = Cli::try_parse_from(["sterna"].iter().chain(flags));
        cli.unwrap().serve.network
    }

    /// Returns which of these hosts a server with `flags` allows: a foreign name, a foreign
    /// address, the loopback address, and an allowed name.
    fn allowed(flags: &[&str], has_keys: bool) -> [bool; 4] {
        let network = network(flags);
        let addresses = addresses(&network).unwrap();
        let access = access(&network, &addresses, has_keys).unwrap();
        [
            "evil.example",
            "203.0.113.9",
            "127.0.0.1:30000",
            "good.example",
        ]
        .map(|host| {
            let host = host.parse().unwrap();
            access
                .hosts
                .as_ref()
                .is_none_or(|hosts| hosts.allows(&host))
        })
    }

    #[test]
    fn foreign_hosts_are_allowed_only_with_keys_on_a_public_address_or_by_a_flag() {
        const ALL: [bool; 4] = [true; 4];
        let public = ["--host", "0.0.0.0"];
        let named = ["--allowed-host", "Good.Example:443"];
        for (flags, has_keys, expected) in [
            (vec![], false, [false, false, true, false]),
            (vec![], true, [false, false, true, false]),
            (
                vec!["--host", "localhost"],
                false,
                [false, false, true, false],
            ),
            (public.to_vec(), false, [false, true, true, false]),
            (public.to_vec(), true, ALL),
            ([public, named].concat(), true, [false, true, true, true]),
            (
                vec!["--host", "203.0.113.9"],
                false,
                [false, true, true, false],
            ),
            (named.to_vec(), false, [false, false, true, true]),
            (vec!["--allowed-host", "*"], false, ALL),
        ] {
            assert_eq!(
                allowed(&flags, has_keys),
                expected,
                "{flags:?}, keys: {has_keys}"
            );
        }
        let nonsense = network(&["--allowed-host", "a b"]);
        assert!(access(&nonsense, &[], false).is_err());
        let nonsense = network(&["--allowed-origin", "example.com"]);
        assert!(access(&nonsense, &[], false).is_err());
    }

    #[tokio::test]
    async fn a_name_is_served_on_all_its_addresses_at_one_port() {
        let network = network(&["--host", "localhost", "--port", "0"]);
        let addresses = addresses(&network).unwrap();
        assert!(are_loopback(&addresses));
        let listeners = listen(&addresses).unwrap();
        let ports = listeners
            .iter()
            .map(|listener| listener.local_addr().unwrap().port());
        let ports: Vec<u16> = ports.collect();
        assert!(
            ports.iter().all(|port| *port == ports[0] && *port != 0),
            "{ports:?}"
        );
        assert!(
            listen(&[listeners[0].local_addr().unwrap()]).is_err(),
            "it is in use"
        );
    }

    #[test]
    fn the_limit_of_open_files_allows_the_default_connections_or_says_how_many() {
        assert!((1..=4096).contains(&allow_files(4096)));
        assert!(
            allow_files(u32::MAX) < u32::MAX,
            "no machine allows this many"
        );
    }
}
