//! The signals that stop the server.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and Ctrl-C.
pub(crate) struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    /// Starts to listen. Call it inside the runtime.
    pub(crate) fn listen() -> io::Result<StopSignals> {
        Ok(StopSignals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Returns the result of `work`, or `None` if a signal comes first.
    pub(crate) async fn before<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            done = work => Some(done),
            _ = self.terminate.recv() => None,
            _ = self.interrupt.recv() => None,
        }
    }
}
