//! One connection: its limits, its requests, and how the server notices that the client has left.
//!
//! Invariant: a connection is limited in time and memory.
//!
//! Invariant: the server notices a client that disconnects while its response is being produced.
//! The server reads the connection all the while and keeps what arrives for the next request. The
//! end of the input means that the client has left. A client that closes only its sending direction
//! counts as gone, and so does a client that sends more ahead than the server buffers.
//!
//! Every error has OpenAI's shape, with one exception: the HTTP library answers input that is not
//! HTTP/1 (400) and a request head that is too large (431). Those responses have neither a body nor
//! an `x-request-id`.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::response::Response;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};
use tower::ServiceExt;

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
    /// The time limit for a request's head, and for an idle connection.
    pub header_timeout: Duration,
    /// The time limit in which the client must read some of a waiting response.
    pub stall_timeout: Duration,
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
            stall_timeout: Duration::from_secs(30),
            grace: Duration::from_secs(5),
        }
    }
}

/// Serves the requests of one connection until it ends or the sender of `stopped` is dropped.
pub(super) async fn serve_connection(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    limits: &ConnectionLimits,
    mut stopped: watch::Receiver<()>,
) {
    let awaited = ResponseAwaited::default();
    let of_service = awaited.clone();
    let service = service_fn(move |request| respond(router.clone(), request, of_service.clone()));
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_buf_size(limits.buffer_bytes);
    let io = TokioIo::new(MonitoredIo {
        io,
        stall_timeout: limits.stall_timeout,
        stall_timer: None,
        awaited,
        ahead: Vec::new(),
        ahead_limit: limits.buffer_bytes,
    });
    let mut connection = std::pin::pin!(builder.serve_connection(io, service));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

async fn respond(
    router: Router,
    request: Request<Incoming>,
    awaited: ResponseAwaited,
) -> Result<Response, Infallible> {
    let request = request.map(|body| {
        awaited.set(body.is_end_stream());
        let awaited = awaited.clone();
        Body::new(RequestBody { body, awaited })
    });
    let response = router.oneshot(request).await?;
    Ok(response.map(|body| Body::new(ResponseBody { body, awaited })))
}

/// Whether the client has sent its complete request and now waits for the response.
#[derive(Clone, Default)]
struct ResponseAwaited(Arc<AtomicBool>);

impl ResponseAwaited {
    fn set(&self, awaited: bool) {
        self.0.store(awaited, Ordering::Relaxed); // Only the connection's own task uses it.
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A request's body. The client awaits the response as soon as the body has ended; until then, all
/// input belongs to the body.
struct RequestBody {
    body: Incoming,
    awaited: ResponseAwaited,
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() || self.body.is_end_stream() {
            self.awaited.set(true);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A response's body. After it, the client awaits no response.
struct ResponseBody {
    body: Body,
    awaited: ResponseAwaited,
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        self.awaited.set(false);
    }
}

/// A connection's input and output, which fails in two cases:
///
/// - The client reads nothing for too long. So a stalled client costs no more than its buffers, and
///   its request is cancelled.
/// - The client leaves while it awaits a response. The HTTP library looks for that only while it
///   holds no unread input, and a line break behind the request would hide it.
struct MonitoredIo<I> {
    io: I,
    stall_timeout: Duration,
    stall_timer: Option<Pin<Box<Sleep>>>, // Runs while a write waits for the client.
    awaited: ResponseAwaited,
    ahead: Vec<u8>, // Input read while the client awaited a response.
    ahead_limit: usize,
}

impl<I: AsyncRead + Unpin> MonitoredIo<I> {
    /// Reads ahead while the client awaits a response, to notice that it leaves.
    ///
    /// Each write and each flush calls this, and so does each poll of the connection.
    fn read_ahead(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let mut bytes = [0; 1024];
        while self.awaited.get() {
            let mut buffer = ReadBuf::new(&mut bytes);
            match Pin::new(&mut self.io).poll_read(context, &mut buffer) {
                Poll::Pending => return Ok(()),
                Poll::Ready(read) => read?,
            }
            let read = buffer.filled();
            if read.is_empty() || self.ahead.len() + read.len() > self.ahead_limit {
                let why = "the client left or sent too much ahead";
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, why));
            }
            self.ahead.extend_from_slice(read);
        }
        Ok(())
    }

    /// Returns `written`, or an error if the client has left or has stalled for too long.
    fn monitor<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        self.read_ahead(context)?;
        if written.is_ready() {
            self.stall_timer = None;
            return written;
        }
        let timeout = self.stall_timeout;
        let timer = self
            .stall_timer
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + timeout)));
        ready!(timer.as_mut().poll(context));
        let why = "the client read nothing for too long";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, why)))
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for MonitoredIo<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.ahead.is_empty() {
            let count = self.ahead.len().min(buffer.remaining());
            buffer.put_slice(&self.ahead[..count]);
            self.ahead.drain(..count);
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<I: AsyncRead + AsyncWrite + Unpin> AsyncWrite for MonitoredIo<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(context, bytes);
        self.monitor(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(context, slices);
        self.monitor(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(context);
        self.monitor(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.io).poll_shutdown(context);
        self.monitor(context, shut)
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use futures_util::stream;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::task::JoinHandle;

    use super::*;

    /// Returns the client's end of a connection whose buffer holds 1024 bytes.
    fn connect(router: Router) -> (DuplexStream, JoinHandle<()>, watch::Sender<()>) {
        let (client, server) = duplex(1024);
        let (stopping, stopped) = watch::channel(());
        let connection = async move {
            serve_connection(server, router, &ConnectionLimits::default(), stopped).await
        };
        (client, tokio::spawn(connection), stopping)
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_that_arrives_too_slowly_ends_the_connection() {
        for beginning in ["", "GET / HTTP/1.1\r\nhost: x\r\nx-slow: "] {
            let (mut client, connection, _stopping) = connect(Router::new());
            let start = Instant::now();
            client.write_all(beginning.as_bytes()).await.unwrap();
            connection.await.unwrap();
            assert_eq!(start.elapsed().as_secs(), 10, "{beginning:?}");
        }
    }

    #[tokio::test]
    async fn a_head_that_is_too_large_is_rejected() {
        let (client, connection, _stopping) = connect(Router::new());
        let head = format!(
            "GET / HTTP/1.1\r\nhost: x\r\nx-long: {}\r\n\r\n",
            "x".repeat(17 << 10)
        );
        let (mut reader, mut writer) = tokio::io::split(client);
        let writing = tokio::spawn(async move { writer.write_all(head.as_bytes()).await });
        let mut response = String::new();
        reader.read_to_string(&mut response).await.unwrap();
        assert!(response.starts_with("HTTP/1.1 431 "), "{response}");
        drop(reader);
        connection.await.unwrap();
        drop(writing.await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_stalls_is_disconnected_and_its_response_dropped() {
        let alive = Arc::new(());
        let held = Arc::downgrade(&alive);
        let endless = move || {
            let alive = Arc::clone(&alive);
            async move {
                let frames = stream::repeat_with(move || {
                    let _held_by_the_body = &alive;
                    Ok::<_, Infallible>(Bytes::from_static(&[b'x'; 100]))
                });
                Body::from_stream(frames)
            }
        };
        let (mut client, connection, _stopping) = connect(Router::new().route("/", get(endless)));
        let start = Instant::now();
        client
            .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .unwrap();
        connection.await.unwrap();
        assert_eq!(start.elapsed().as_secs(), 30);
        assert_eq!(held.strong_count(), 0);
    }

    #[tokio::test]
    async fn stopping_ends_idle_connections_at_once() {
        let (_client, connection, stopping) = connect(Router::new());
        drop(stopping);
        connection.await.unwrap();
    }
}
