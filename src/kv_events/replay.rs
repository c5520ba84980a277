//! The socket that repeats earlier batches.
//!
//! It has a task of its own: a client that does not read must not delay the publisher.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::timeout;
use zeromq::{RouterSocket, SocketRecv, SocketSend, ZmqMessage};

use super::history::History;
use super::{frame, multipart};

/// The number after the last repeated batch.
const END: u64 = u64::MAX;
/// How long to wait for a client whose queue is full. The other clients wait as long.
const PATIENCE: Duration = Duration::from_secs(5);

/// The socket, and the batches that it repeats.
pub(super) struct Replay {
    pub(super) socket: RouterSocket,
    pub(super) history: Arc<Mutex<History>>,
}

impl Replay {
    /// Answers requests until the task is aborted or the socket fails.
    pub(super) async fn run(mut self) {
        let error = loop {
            match self.socket.recv().await {
                Ok(request) => self.repeat(request).await,
                Err(error) => break error,
            }
        };
        tracing::error!(%error, "earlier cache events are no longer repeated");
    }

    /// Answers a client that asks for the batches from a number on.
    async fn repeat(&mut self, request: ZmqMessage) {
        // The last frame is the number. The frames before it say whom to answer.
        let mut envelope = request.into_vec();
        let number = envelope.pop();
        let number = number.and_then(|frame| <[u8; 8]>::try_from(frame.as_ref()).ok());
        let Some(number) = number.map(u64::from_be_bytes) else {
            tracing::debug!("a request for earlier cache events has no number of 8 bytes");
            return;
        };
        let batches: Vec<_> = self.history.lock().since(number).collect();
        for (number, batch) in batches.into_iter().chain([(END, Bytes::new())]) {
            let frames = envelope.iter().cloned().chain([frame(number), batch]);
            match timeout(PATIENCE, self.socket.send(multipart(frames))).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::debug!(%error, "a client that asked for cache events has left");
                    return;
                }
                Err(_) => {
                    tracing::debug!("a client that asked for cache events does not read them");
                    return;
                }
            }
        }
    }
}
