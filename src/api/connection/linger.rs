//! The end of a connection whose client may still be sending.
//!
//! If the server closed such a connection at once, the system would answer the rest of the request
//! with a reset. The client's next write would then fail, and many clients would report a broken
//! connection instead of the answer that they were sent. So the server ends its own direction, and
//! reads and discards what still arrives.
//!
//! Invariant: what is discarded is limited in bytes and in time.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

const MAX_BYTES: usize = 8 << 20;
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// In each period the client must send this much. So a client that has sent everything, or that
/// sends slowly, holds its connection for one period.
const PERIOD: Duration = Duration::from_secs(2);
const MIN_PERIOD_BYTES: usize = 64 << 10;

/// The end of a connection.
pub(in crate::api) struct Linger {
    has_shut: bool,
    total: usize,
    in_period: usize,
    end: Instant,
    period: Pin<Box<Sleep>>,
}

impl Linger {
    pub(in crate::api) fn new() -> Linger {
        let now = Instant::now();
        Linger {
            has_shut: false,
            total: 0,
            in_period: 0,
            end: now + TIME_LIMIT,
            period: Box::pin(sleep_until(now + PERIOD)),
        }
    }

    /// Ends the output of `io` and discards its input, until the client closes the connection or a
    /// limit is reached.
    pub(in crate::api) fn poll<I>(&mut self, io: &mut I, context: &mut Context<'_>) -> Poll<()>
    where
        I: AsyncRead + AsyncWrite + Unpin,
    {
        if !self.has_shut {
            if ready!(Pin::new(&mut *io).poll_shutdown(context)).is_err() {
                return Poll::Ready(());
            }
            self.has_shut = true;
        }
        let mut bytes = [0; 8 << 10];
        loop {
            let mut buffer = ReadBuf::new(&mut bytes);
            if let Poll::Ready(read) = Pin::new(&mut *io).poll_read(context, &mut buffer) {
                let count = buffer.filled().len();
                self.total += count;
                self.in_period += count;
                if read.is_err() || count == 0 || self.total > MAX_BYTES {
                    return Poll::Ready(());
                }
                continue;
            }
            ready!(self.period.as_mut().poll(context));
            let now = Instant::now();
            if self.in_period < MIN_PERIOD_BYTES || now >= self.end {
                return Poll::Ready(());
            }
            self.in_period = 0;
            self.period.as_mut().reset((now + PERIOD).min(self.end));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::time::sleep;

    use super::*;

    /// Returns how long a client lingers that calls `send` again and again, and what was discarded.
    async fn lingers(send: impl AsyncFn(&mut DuplexStream) -> bool) -> (u64, usize) {
        let (mut client, mut server) = duplex(1 << 10);
        let start = Instant::now();
        let discarding = tokio::spawn(async move {
            let mut linger = Linger::new();
            poll_fn(|context| linger.poll(&mut server, context)).await;
            linger.total
        });
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).await.unwrap();
        assert!(
            rest.is_empty(),
            "the client sees the end before it has sent"
        );
        while send(&mut client).await && !discarding.is_finished() {}
        let total = discarding.await.unwrap();
        (start.elapsed().as_secs(), total)
    }

    #[tokio::test(start_paused = true)]
    async fn the_rest_is_discarded_within_limits_of_bytes_and_time() {
        let piece = vec![0; 64 << 10];
        let fast = lingers(async |client| client.write_all(&piece).await.is_ok()).await;
        assert!(
            fast.0 == 0 && fast.1 > MAX_BYTES && fast.1 < MAX_BYTES + (9 << 10),
            "{fast:?}"
        );
        let steady = lingers(async |client| {
            sleep(Duration::from_secs(1)).await;
            client.write_all(&piece).await.is_ok()
        });
        assert_eq!(steady.await.0, 10);
        let slow = lingers(async |client| {
            sleep(Duration::from_millis(100)).await;
            client.write_all(b"x").await.is_ok()
        });
        assert_eq!(slow.await.0, 2);
        let silent = lingers(async |_| false).await;
        assert_eq!(silent, (2, 0));
        let closed = lingers(async |client| {
            client.write_all(b"the end").await.unwrap();
            client.shutdown().await.unwrap();
            false
        });
        assert_eq!(closed.await, (0, 7));
    }
}
