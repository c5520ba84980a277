//! The accept loop: who may connect, how long a head may take, when a reader has stalled, and how all of it ends.
//!
//! Invariants: no connection is without a limit in number, time or memory; no task outlives `serve`. A client that leaves is noticed
//! while its answer is being made, because its connection is read all the while: what comes after its request is kept for later, and
//! the end of it means that nobody waits. One that closes only its own direction counts as gone, and so does one that sends more
//! ahead than is kept.
//!
//! Every error has OpenAI's shape with one exception: what is no HTTP/1 (400) and a head that is too large (431) are answered by the
//! HTTP library, without a body or an `x-request-id`.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::io::{self, Write};
use std::net::IpAddr;
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
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{Id, JoinSet};
use tokio::time::{Instant, Sleep, sleep, timeout};
use tower::ServiceExt;

/// What connections may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Connections at a time.
    pub connections: usize,
    /// Connections at a time from one address. Not for this machine's own: behind a local proxy everybody has that address.
    pub connections_per_ip: usize,
    /// Bytes of a request's head; also those of an answer that wait for its reader, beside the system's own buffer.
    pub buffer_bytes: usize,
    /// Time for a request's head, and for a connection without a request.
    pub header_timeout: Duration,
    /// Time in which a reader must take something.
    pub stall_timeout: Duration,
    /// Time for answers under way once the listener has been told to stop.
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

/// Answers connections until `stop` is done and the answers under way have been given.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: ConnectionLimits,
    stop: impl Future<Output = ()>,
) {
    let mut stop = std::pin::pin!(stop);
    let (stopping, stopped) = watch::channel(());
    let mut connections = JoinSet::new();
    let mut guests = OpenConnections::new(&limits);
    loop {
        tokio::select! {
            () = &mut stop => break,
            Some(ended) = connections.join_next_with_id() => guests.left(task_id(&ended)),
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) if guests.may_enter(peer.ip()) => {
                    let connection = converse(stream, router.clone(), limits.clone(), stopped.clone());
                    let task = connections.spawn(connection);
                    guests.entered(task.id(), peer.ip());
                }
                Ok((stream, _)) => turn_away(stream),
                Err(error) => pause_after(&error).await,
            },
        }
    }
    drop(listener);
    drop(stopping);
    let all_done = async { while connections.join_next().await.is_some() {} };
    if timeout(limits.grace, all_done).await.is_err() {
        tracing::warn!("connections were cut: they did not end in time");
    }
}

fn task_id<T>(ended: &Result<(Id, T), tokio::task::JoinError>) -> Id {
    match ended {
        Ok((id, _)) => *id,
        Err(error) => error.id(),
    }
}

async fn converse(
    stream: TcpStream,
    router: Router,
    limits: ConnectionLimits,
    stopped: watch::Receiver<()>,
) {
    // Tokens are small and each is awaited; without it they would lie here until the client has acknowledged the last.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "no TCP_NODELAY");
    }
    serve_connection(stream, router, &limits, stopped).await;
}

/// Answers the requests of one connection until it ends, or `stopped`'s sender is gone.
async fn serve_connection<I>(
    io: I,
    router: Router,
    limits: &ConnectionLimits,
    mut stopped: watch::Receiver<()>,
) where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let awaited = ResponseAwaited::default();
    let heard = awaited.clone();
    let service = service_fn(move |request| answer(router.clone(), request, heard.clone()));
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_buf_size(limits.buffer_bytes);
    let io = TokioIo::new(MonitoredIo {
        io,
        limit: limits.stall_timeout,
        waiting: None,
        awaited,
        ahead: Vec::new(),
        most_ahead: limits.buffer_bytes,
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

async fn answer(
    router: Router,
    request: Request<Incoming>,
    awaited: ResponseAwaited,
) -> Result<Response, Infallible> {
    let request = request.map(|body| Body::new(RequestBody::new(body, awaited.clone())));
    let response = router.oneshot(request).await?;
    Ok(response.map(|body| Body::new(ResponseBody { body, awaited })))
}

/// Whether a connection's client has said all of its request and now waits for the answer.
#[derive(Clone, Default)]
struct ResponseAwaited(Arc<AtomicBool>);

impl ResponseAwaited {
    fn set(&self, awaited: bool) {
        self.0.store(awaited, Ordering::Relaxed); // Always the connection's own task.
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A request's body, after whose end the answer is awaited. Not before: until then what comes is the body.
struct RequestBody {
    body: Incoming,
    awaited: ResponseAwaited,
}

impl RequestBody {
    fn new(body: Incoming, awaited: ResponseAwaited) -> RequestBody {
        awaited.set(body.is_end_stream());
        RequestBody { body, awaited }
    }
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

/// An answer's body, after which none is awaited.
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

/// Out of file descriptors, say: waiting is better than spinning. A connection that broke before it was accepted needs no pause.
async fn pause_after(error: &io::Error) {
    tracing::warn!(%error, "accept failed");
    let broken = matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset
    );
    if !broken {
        sleep(Duration::from_millis(100)).await;
    }
}

const FULL: &str = "\
    {\"error\":{\"message\":\"Too many connections.\",\"type\":\"overloaded_error\",\"param\":null,\"code\":\"too_many_connections\"}}";

fn full() -> String {
    format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\n\
         connection: close\r\n{}: {}\r\ncontent-length: {}\r\n\r\n{FULL}",
        super::REQUEST_ID,
        super::random_id("req-"),
        FULL.len()
    )
}

/// Says why, as far as that goes at once, and hangs up.
fn turn_away(stream: TcpStream) {
    let told = stream
        .into_std()
        .and_then(|mut stream| stream.write_all(full().as_bytes()));
    if let Err(error) = told {
        tracing::debug!(%error, "a connection was refused without a word");
    }
}

/// Who is connected.
struct OpenConnections {
    most: usize,
    most_per_ip: usize,
    by_task: HashMap<Id, IpAddr>,
    by_ip: HashMap<IpAddr, usize>,
}

impl OpenConnections {
    fn new(limits: &ConnectionLimits) -> OpenConnections {
        OpenConnections {
            most: limits.connections,
            most_per_ip: limits.connections_per_ip,
            by_task: HashMap::new(),
            by_ip: HashMap::new(),
        }
    }

    fn may_enter(&self, ip: IpAddr) -> bool {
        let from_there = self.by_ip.get(&ip).copied().unwrap_or(0);
        self.by_task.len() < self.most
            && (ip.to_canonical().is_loopback() || from_there < self.most_per_ip)
    }

    fn entered(&mut self, task: Id, ip: IpAddr) {
        self.by_task.insert(task, ip);
        *self.by_ip.entry(ip).or_default() += 1;
    }

    fn left(&mut self, task: Id) {
        let ip = self
            .by_task
            .remove(&task)
            .expect("each task that ends has entered");
        let from_there = self.by_ip.get_mut(&ip).expect("as its address was counted");
        *from_there -= 1;
        if *from_there == 0 {
            self.by_ip.remove(&ip);
        }
    }
}

/// A connection that fails when nothing can be written for too long: so a reader that stalls costs no more than its buffers, and its
/// request is cancelled. It fails too when the client leaves while it is being answered: the HTTP library looks for that only while it
/// holds nothing unread, and a line break behind the request would hide it.
struct MonitoredIo<I> {
    io: I,
    limit: Duration,
    waiting: Option<Pin<Box<Sleep>>>, // Since the reader took nothing.
    awaited: ResponseAwaited,
    ahead: Vec<u8>, // Read while an answer was awaited, and not handed out yet.
    most_ahead: usize,
}

impl<I: AsyncRead + Unpin> MonitoredIo<I> {
    /// While an answer is awaited, reads on, to find out whether the client is still there. Called with each write and flush, and so
    /// whenever the connection is polled.
    fn look_ahead(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let mut bytes = [0; 1024];
        while self.awaited.get() {
            let mut buffer = ReadBuf::new(&mut bytes);
            match Pin::new(&mut self.io).poll_read(context, &mut buffer) {
                Poll::Pending => return Ok(()),
                Poll::Ready(read) => read?,
            }
            let read = buffer.filled();
            if read.is_empty() || self.ahead.len() + read.len() > self.most_ahead {
                let why = "the client left or sent too much ahead";
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, why));
            }
            self.ahead.extend_from_slice(read);
        }
        Ok(())
    }

    fn judge<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        self.look_ahead(context)?;
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let limit = self.limit;
        let waiting = self
            .waiting
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + limit)));
        ready!(waiting.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the reader stalled",
        )))
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
        self.judge(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(context, slices);
        self.judge(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(context);
        self.judge(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.io).poll_shutdown(context);
        self.judge(context, shut)
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use futures_util::stream;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::task::JoinHandle;

    use super::*;

    /// A connection of which this is the client's end, with little room for what is not read.
    fn connect(router: Router) -> (DuplexStream, JoinHandle<()>, watch::Sender<()>) {
        let (client, server) = duplex(1024);
        let (stopping, stopped) = watch::channel(());
        let connection = async move {
            serve_connection(server, router, &ConnectionLimits::default(), stopped).await
        };
        (client, tokio::spawn(connection), stopping)
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_that_dribbles_is_cut_off() {
        for beginning in ["", "GET / HTTP/1.1\r\nhost: x\r\nx-slow: "] {
            let (mut client, connection, _stopping) = connect(Router::new());
            let began = Instant::now();
            client.write_all(beginning.as_bytes()).await.unwrap();
            connection.await.unwrap();
            assert_eq!(began.elapsed().as_secs(), 10, "{beginning:?}");
        }
    }

    #[tokio::test]
    async fn a_head_that_is_too_large_is_refused() {
        let (client, connection, _stopping) = connect(Router::new());
        let head = format!(
            "GET / HTTP/1.1\r\nhost: x\r\nx-long: {}\r\n\r\n",
            "x".repeat(17 << 10)
        );
        let (mut reader, mut writer) = tokio::io::split(client);
        let writing = tokio::spawn(async move { writer.write_all(head.as_bytes()).await });
        let mut answer = String::new();
        reader.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
        drop(reader);
        connection.await.unwrap();
        drop(writing.await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_stalls_is_cut_off_and_its_answer_dropped() {
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
        let began = Instant::now();
        client
            .write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .unwrap();
        connection.await.unwrap();
        assert_eq!(began.elapsed().as_secs(), 30);
        assert_eq!(held.strong_count(), 0);
    }

    #[tokio::test]
    async fn stopping_ends_idle_connections_at_once() {
        let (_client, connection, stopping) = connect(Router::new());
        drop(stopping);
        connection.await.unwrap();
    }

    #[tokio::test]
    async fn guests_are_counted_by_address_and_all_together() {
        let limits = ConnectionLimits {
            connections: 4,
            connections_per_ip: 2,
            ..ConnectionLimits::default()
        };
        let mut guests = OpenConnections::new(&limits);
        let mut tasks = JoinSet::new();
        let mut enter = |guests: &mut OpenConnections, ip: &str| {
            let ip = ip.parse().unwrap();
            let may = guests.may_enter(ip);
            let task = tasks.spawn(async {}).id();
            if may {
                guests.entered(task, ip);
            }
            may.then_some(task)
        };
        let first = enter(&mut guests, "192.0.2.1").unwrap();
        assert!(enter(&mut guests, "192.0.2.1").is_some());
        assert!(enter(&mut guests, "192.0.2.1").is_none());
        guests.left(first);
        assert!(enter(&mut guests, "192.0.2.1").is_some());
        let local = enter(&mut guests, "127.0.0.1").unwrap();
        assert!(enter(&mut guests, "::ffff:127.0.0.1").is_some());
        assert!(enter(&mut guests, "192.0.2.2").is_none());
        guests.left(local);
        assert!(enter(&mut guests, "192.0.2.2").is_some());
    }

    #[test]
    fn the_refusal_is_a_whole_answer() {
        let answer = full();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())));
        assert!(head.contains("\r\nx-request-id: req-"));
        assert!(serde_json::from_str::<serde_json::Value>(body).is_ok());
    }
}
