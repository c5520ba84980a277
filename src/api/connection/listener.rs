//! The accept loop: accepts connections within the limits, and ends all of them on shutdown.
//!
//! Invariant: no connection task outlives `serve`.

use std::future::{Future, poll_fn};
use std::io;
use std::io::ErrorKind::{ConnectionAborted, ConnectionReset};
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{Id, JoinSet};
use tokio::time::{sleep, timeout};

use super::open_connections::OpenConnections;
use super::{ConnectionLimits, Linger, Progress, serve_connection};
use crate::api::error::ApiError;
use crate::api::ids::{REQUEST_ID, random_id};

/// This many connections beyond the limit may be told so at the same time.
const MAX_REJECTING: usize = 64;

/// Serves connections until `stop` completes. Running responses may then end within
/// `limits.grace`.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: ConnectionLimits,
    stop: impl Future<Output = ()>,
) {
    serve_all(vec![listener], router, limits, stop).await;
}

/// Serves the connections of several listeners, as [`serve`] does.
pub async fn serve_all(
    listeners: Vec<TcpListener>,
    router: Router,
    limits: ConnectionLimits,
    stop: impl Future<Output = ()>,
) {
    let mut stop = std::pin::pin!(stop);
    let (stopping, stopped) = watch::channel(());
    let mut tasks = JoinSet::new();
    let mut rejecting = JoinSet::new();
    let mut open = OpenConnections::new(&limits);
    loop {
        tokio::select! {
            () = &mut stop => break,
            Some(ended) = tasks.join_next_with_id() => open.remove(task_id(&ended)),
            Some(_) = rejecting.join_next() => {}
            accepted = accept(&listeners) => match accepted {
                Ok((stream, peer)) if open.make_room(peer.ip()) => {
                    let progress = Arc::new(Progress::new());
                    let task = tasks.spawn(serve_stream(
                        stream,
                        router.clone(),
                        limits.clone(),
                        Arc::clone(&progress),
                        stopped.clone(),
                    ));
                    open.add(task, peer.ip(), progress);
                }
                Ok((stream, _)) if rejecting.len() < MAX_REJECTING => {
                    rejecting.spawn(reject(stream));
                }
                Ok(_) => {}
                Err(error) => pause_after(&error).await,
            },
        }
    }
    drop(listeners);
    drop(stopping);
    let all_ended = async { while tasks.join_next().await.is_some() {} };
    if timeout(limits.grace, all_ended).await.is_err() {
        tracing::warn!("closed connections whose responses did not end within the grace period");
    }
}

async fn accept(listeners: &[TcpListener]) -> io::Result<(TcpStream, SocketAddr)> {
    let accept = poll_fn(|context| {
        let mut polled = listeners
            .iter()
            .map(|listener| listener.poll_accept(context));
        polled.find(Poll::is_ready).unwrap_or(Poll::Pending)
    });
    accept.await
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
    progress: Arc<Progress>,
    stopped: watch::Receiver<()>,
) {
    // Each token is a small write. With Nagle's algorithm it would wait until the client has
    // acknowledged the previous token.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    serve_connection(stream, router, &limits, progress, stopped).await;
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

fn too_many_connections() -> String {
    let body = ApiError::too_many_connections().body().to_string();
    format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n\
         retry-after: 5\r\nconnection: close\r\n{REQUEST_ID}: {}\r\ncontent-length: {}\r\n\r\n\
         {body}",
        random_id("req-"),
        body.len()
    )
}

/// Tells a client that there are too many connections, and closes its connection.
async fn reject(mut stream: TcpStream) {
    match stream.write_all(too_many_connections().as_bytes()).await {
        Ok(()) => {
            let mut linger = Linger::new();
            poll_fn(|context| linger.poll(&mut stream, context)).await;
        }
        Err(error) => {
            tracing::debug!(%error, "cannot tell a client that there are too many connections");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rejection_is_a_complete_response() {
        let response = too_many_connections();
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())));
        assert!(head.contains("\r\nx-request-id: req-"));
        assert!(serde_json::from_str::<serde_json::Value>(body).is_ok());
    }
}
