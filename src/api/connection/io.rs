//! A connection's input and output: how long they may take, and how the server notices that the
//! client has left.
//!
//! Invariant: the server notices a client that disconnects while its response is being produced.
//! The server reads the connection all the while and keeps what arrives for the next request. The
//! end of the input means that the client has left. A client counts as gone if it closes only its
//! sending direction, or if it sends more ahead than the server buffers.
//!
//! Invariant: an idle connection, an incomplete head, and a response that waits for its client have
//! time limits, however many bytes arrive or leave meanwhile.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::head_scan::HeadScan;
use super::limits::ConnectionLimits;
use super::linger::Linger;
use super::progress::{Phase, Progress};

/// A connection's input and output, which fails in three cases:
///
/// - The next request takes too long to begin, or its head takes too long.
/// - The client reads too little of a waiting response. So a slow client costs no more than its
///   buffers, for a limited time, and its request is cancelled.
/// - The client leaves while it awaits a response. The HTTP library looks for that only while it
///   holds no unread input, and a line break behind the request would hide it.
pub(super) struct ConnectionIo<I> {
    io: I,
    limits: InputLimits,
    progress: Arc<Progress>,
    scan: HeadScan,
    has_waited: bool,                       // For input, at any time.
    request_timer: Option<Pin<Box<Sleep>>>, // Runs while a request is awaited.
    ahead: Vec<u8>,                         // Input read while the client awaited a response.
    output: OutputPace,
    linger: Option<Linger>,
}

struct InputLimits {
    buffer_bytes: usize,
    header_timeout: Duration,
    idle_timeout: Duration,
}

impl<I> ConnectionIo<I> {
    pub(super) fn new(io: I, limits: &ConnectionLimits, progress: Arc<Progress>) -> Self {
        ConnectionIo {
            io,
            limits: InputLimits {
                buffer_bytes: limits.buffer_bytes,
                header_timeout: limits.header_timeout,
                idle_timeout: limits.idle_timeout,
            },
            progress,
            scan: HeadScan::default(),
            has_waited: false,
            request_timer: None,
            ahead: Vec::new(),
            output: OutputPace::new(limits),
            linger: None,
        }
    }

    /// Notes that `bytes` have arrived.
    fn arrived(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let phase = self.progress.phase();
        if phase == Phase::Idle {
            self.progress.begin_head(!self.has_waited);
        }
        if let Some(number) = self.scan.scan(bytes, phase == Phase::Body) {
            self.progress.set_ambiguous(number);
        }
        self.progress.set_scanned(self.scan.heads());
    }

    /// Fails if the connection has waited too long for a request's head.
    fn check_request_time(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let limit = match self.progress.phase() {
            Phase::Body | Phase::Response | Phase::Lingering => {
                self.request_timer = None;
                return Ok(());
            }
            Phase::Idle if self.progress.requests() > 0 && !self.scan.is_in_head() => {
                self.limits.idle_timeout
            }
            Phase::Idle | Phase::Head => self.limits.header_timeout,
        };
        let end = self.progress.since() + limit;
        let timer = (self.request_timer).get_or_insert_with(|| Box::pin(sleep_until(end)));
        if timer.deadline() != end {
            timer.as_mut().reset(end);
        }
        match timer.as_mut().poll(context) {
            Poll::Pending => Ok(()),
            Poll::Ready(()) => Err(timed_out("no request came in time")),
        }
    }
}

fn timed_out(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, why)
}

impl<I: AsyncRead + Unpin> ConnectionIo<I> {
    /// Reads ahead while the client awaits a response, to notice that it leaves.
    ///
    /// Each write and each flush calls this, and so does each poll of the connection.
    fn read_ahead(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let mut bytes = [0; 1024];
        while self.progress.phase() == Phase::Response {
            let mut buffer = ReadBuf::new(&mut bytes);
            match Pin::new(&mut self.io).poll_read(context, &mut buffer) {
                Poll::Pending => return Ok(()),
                Poll::Ready(read) => read?,
            }
            let read = buffer.filled();
            if read.is_empty() || self.ahead.len() + read.len() > self.limits.buffer_bytes {
                let why = "the client left or sent too much ahead";
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, why));
            }
            self.ahead.extend_from_slice(read);
        }
        Ok(())
    }

    /// Returns `written`, or an error if the client has left or reads too slowly.
    fn monitor(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        self.read_ahead(context)?;
        match written {
            Poll::Ready(Ok(count)) => self.output.wrote(count),
            Poll::Ready(Err(_)) => {}
            Poll::Pending => self.output.check(&self.progress, context)?,
        }
        written
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for ConnectionIo<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        if !this.ahead.is_empty() {
            let count = this.ahead.len().min(buffer.remaining());
            buffer.put_slice(&this.ahead[..count]);
            this.ahead.drain(..count);
        } else if Pin::new(&mut this.io)
            .poll_read(context, buffer)?
            .is_pending()
        {
            this.has_waited = true;
            this.check_request_time(context)?;
            return Poll::Pending;
        }
        this.arrived(&buffer.filled()[before..]);
        this.has_waited = true;
        Poll::Ready(Ok(()))
    }
}

impl<I: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ConnectionIo<I> {
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

    /// The HTTP library flushes after it has written all that it has.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.read_ahead(context)?;
        ready!(Pin::new(&mut self.io).poll_flush(context))?;
        self.output.caught_up();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        match this.progress.phase() {
            Phase::Head | Phase::Body => this.progress.enter(Phase::Lingering),
            Phase::Lingering => {}
            Phase::Idle | Phase::Response => {
                return Pin::new(&mut this.io).poll_shutdown(context);
            }
        }
        let linger = this.linger.get_or_insert_with(Linger::new);
        linger.poll(&mut this.io, context).map(Ok)
    }
}

/// How fast the client reads what the server has for it.
struct OutputPace {
    min_bytes: usize,
    stall_timeout: Duration,
    waiting_timeout: Duration,
    period: Option<Pin<Box<Sleep>>>, // Runs while output waits for the client.
    period_bytes: usize,
    waiting_since: Option<Instant>,
    waited: Duration, // By the responses to request `of_request`, before `waiting_since`.
    of_request: u64,
}

impl OutputPace {
    fn new(limits: &ConnectionLimits) -> OutputPace {
        OutputPace {
            min_bytes: limits.buffer_bytes,
            stall_timeout: limits.stall_timeout,
            waiting_timeout: limits.waiting_timeout,
            period: None,
            period_bytes: 0,
            waiting_since: None,
            waited: Duration::ZERO,
            of_request: 0,
        }
    }

    /// Notes that the system has taken `count` bytes.
    fn wrote(&mut self, count: usize) {
        self.period_bytes += count;
        if let Some(since) = self.waiting_since.take() {
            self.waited += since.elapsed();
        }
    }

    /// Notes that nothing waits for the client.
    fn caught_up(&mut self) {
        self.period = None;
    }

    /// Fails if output has waited too long for the client.
    fn check(&mut self, progress: &Progress, context: &mut Context<'_>) -> io::Result<()> {
        if self.of_request != progress.requests() {
            self.of_request = progress.requests();
            self.waited = Duration::ZERO;
        }
        let now = Instant::now();
        let since = *self.waiting_since.get_or_insert(now);
        let left = self
            .waiting_timeout
            .saturating_sub(self.waited + (now - since));
        let end = now + self.stall_timeout.min(left);
        let period_bytes = &mut self.period_bytes;
        let period = self.period.get_or_insert_with(|| {
            *period_bytes = 0;
            Box::pin(sleep_until(end))
        });
        while period.as_mut().poll(context).is_ready() {
            if *period_bytes < self.min_bytes || left.is_zero() {
                return Err(timed_out("the client reads too slowly"));
            }
            *period_bytes = 0;
            period.as_mut().reset(end);
        }
        Ok(())
    }
}
