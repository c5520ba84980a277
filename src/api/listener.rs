//! The accept loop: accepts connections within the limits, and ends all of them on shutdown.
//!
//! Invariant: no connection task outlives `serve`.
//!
//! Invariant: the number of open connections is limited, in total and for each address.

use std::collections::HashMap;
use std::future::Future;
use std::io::ErrorKind::{ConnectionAborted, ConnectionReset};
use std::io::{self, Write};
use std::net::IpAddr;
use std::time::Duration;

use axum::Router;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{Id, JoinSet};
use tokio::time::{sleep, timeout};

use super::connection::{ConnectionLimits, serve_connection};
use super::request_id::{REQUEST_ID, random_id};

/// Serves connections until `stop` completes. Running responses may then end within
/// `limits.grace`.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: ConnectionLimits,
    stop: impl Future<Output = ()>,
) {
    let mut stop = std::pin::pin!(stop);
    let (stopping, stopped) = watch::channel(());
    let mut tasks = JoinSet::new();
    let mut open = OpenConnections::new(&limits);
    loop {
        tokio::select! {
            () = &mut stop => break,
            Some(ended) = tasks.join_next_with_id() => open.remove(task_id(&ended)),
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) if open.has_capacity_for(peer.ip()) => {
                    let connection =
                        serve_stream(stream, router.clone(), limits.clone(), stopped.clone());
                    let task = tasks.spawn(connection);
                    open.add(task.id(), peer.ip());
                }
                Ok((stream, _)) => reject(stream),
                Err(error) => pause_after(&error).await,
            },
        }
    }
    drop(listener);
    drop(stopping);
    let all_ended = async { while tasks.join_next().await.is_some() {} };
    if timeout(limits.grace, all_ended).await.is_err() {
        tracing::warn!("closed connections whose responses did not end within the grace period");
    }
}

fn task_id<T>(ended: &Result<(Id, T), tokio::task::JoinError>) -> Id {
    match ended {
        Ok((id, _)) => *id,
        Err(error) => error.id(),
    }
}

async fn serve_stream(
    stream: TcpStream,
    router: Router,
    limits: ConnectionLimits,
    stopped: watch::Receiver<()>,
) {
    // Each token is a small write. With Nagle's algorithm it would wait until the client has
    // acknowledged the previous token.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    serve_connection(stream, router, &limits, stopped).await;
}

/// Pauses after a failed accept.
///
/// If the process has no free file descriptors, for example, retrying at once would spin. A
/// connection that broke before the server accepted it needs no pause.
async fn pause_after(error: &io::Error) {
    tracing::warn!(%error, "cannot accept a connection");
    let broken = matches!(error.kind(), ConnectionAborted | ConnectionReset);
    if !broken {
        sleep(Duration::from_millis(100)).await;
    }
}

const TOO_MANY_CONNECTIONS: &str = concat!(
    "{\"error\":{\"message\":\"The server has too many open connections. ",
    "Close idle connections or retry later.\",",
    "\"type\":\"overloaded_error\",\"param\":null,\"code\":\"too_many_connections\"}}"
);

fn too_many_connections() -> String {
    format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n\
         retry-after: 5\r\nconnection: close\r\n{REQUEST_ID}: {}\r\ncontent-length: {}\r\n\r\n\
         {TOO_MANY_CONNECTIONS}",
        random_id("req-"),
        TOO_MANY_CONNECTIONS.len()
    )
}

/// Closes a connection beyond the limits. Sends the error if the socket takes it without blocking.
fn reject(stream: TcpStream) {
    let sent = stream
        .into_std()
        .and_then(|mut stream| stream.write_all(too_many_connections().as_bytes()));
    if let Err(error) = sent {
        tracing::debug!(%error, "cannot tell a client that there are too many connections");
    }
}

/// Counts the open connections, in total and by address.
struct OpenConnections {
    limit: usize,
    limit_per_ip: usize,
    by_task: HashMap<Id, IpAddr>,
    by_ip: HashMap<IpAddr, usize>,
}

impl OpenConnections {
    fn new(limits: &ConnectionLimits) -> OpenConnections {
        OpenConnections {
            limit: limits.connections,
            limit_per_ip: limits.connections_per_ip,
            by_task: HashMap::new(),
            by_ip: HashMap::new(),
        }
    }

    fn has_capacity_for(&self, ip: IpAddr) -> bool {
        let from_ip = self.by_ip.get(&ip).copied().unwrap_or(0);
        self.by_task.len() < self.limit
            && (ip.to_canonical().is_loopback() || from_ip < self.limit_per_ip)
    }

    fn add(&mut self, task: Id, ip: IpAddr) {
        self.by_task.insert(task, ip);
        *self.by_ip.entry(ip).or_default() += 1;
    }

    fn remove(&mut self, task: Id) {
        let ip = self.by_task.remove(&task);
        let ip = ip.expect("each task that ends has been added");
        let from_ip = self.by_ip.get_mut(&ip);
        let from_ip = from_ip.expect("the connection's address has been counted");
        *from_ip -= 1;
        if *from_ip == 0 {
            self.by_ip.remove(&ip);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connections_are_limited_in_total_and_by_address() {
        let limits = ConnectionLimits {
            connections: 4,
            connections_per_ip: 2,
            ..ConnectionLimits::default()
        };
        let mut open = OpenConnections::new(&limits);
        let mut tasks = JoinSet::new();
        let mut connect = |open: &mut OpenConnections, ip: &str| {
            let ip = ip.parse().unwrap();
            let accepted = open.has_capacity_for(ip);
            let task = tasks.spawn(async {}).id();
            if accepted {
                open.add(task, ip);
            }
            accepted.then_some(task)
        };
        let first = connect(&mut open, "192.0.2.1").unwrap();
        assert!(connect(&mut open, "192.0.2.1").is_some());
        assert!(connect(&mut open, "192.0.2.1").is_none());
        open.remove(first);
        assert!(connect(&mut open, "192.0.2.1").is_some());
        let local = connect(&mut open, "127.0.0.1").unwrap();
        assert!(connect(&mut open, "::ffff:127.0.0.1").is_some());
        assert!(connect(&mut open, "192.0.2.2").is_none());
        open.remove(local);
        assert!(connect(&mut open, "192.0.2.2").is_some());
    }

    #[test]
    fn the_rejection_is_a_complete_response() {
        let response = too_many_connections();
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())));
        assert!(head.contains("\r\nx-request-id: req-"));
        assert!(serde_json::from_str::<serde_json::Value>(body).is_ok());
    }
}
