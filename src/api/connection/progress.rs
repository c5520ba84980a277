//! How far a connection is, for its input and output, its requests and the accept loop.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// What a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Phase {
    /// The next request. Nothing of it has arrived.
    Idle,
    /// The rest of a request's head.
    Head,
    /// The rest of a request's body.
    Body,
    /// The response: the client has sent its complete request.
    Response,
}

const PHASES: [Phase; 4] = [Phase::Idle, Phase::Head, Phase::Body, Phase::Response];

/// The progress of one connection. Only the connection's own task changes it.
pub(super) struct Progress {
    opened: Instant,
    phase: AtomicU8,
    since_micros: AtomicU64, // Since `opened`.
    requests: AtomicU64,
    ambiguous: AtomicU64,
}

impl Progress {
    /// Returns the progress of a connection that has just been opened.
    pub(super) fn new() -> Progress {
        Progress {
            opened: Instant::now(),
            phase: AtomicU8::new(Phase::Idle as u8),
            since_micros: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            ambiguous: AtomicU64::new(u64::MAX),
        }
    }

    pub(super) fn phase(&self) -> Phase {
        PHASES[usize::from(self.phase.load(Ordering::Relaxed))]
    }

    /// Returns when the connection entered its phase.
    pub(super) fn since(&self) -> Instant {
        self.opened + Duration::from_micros(self.since_micros.load(Ordering::Relaxed))
    }

    /// Returns the number of requests whose head has arrived.
    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Enters `phase`.
    pub(super) fn enter(&self, phase: Phase) {
        let micros = u64::try_from(self.opened.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.since_micros.store(micros, Ordering::Relaxed);
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// Notes that the head of a request has arrived, and enters `phase`.
    pub(super) fn begin_request(&self, phase: Phase) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.enter(phase);
    }

    /// Notes that the head of request `number`, counted from 1, has two lengths for its body.
    pub(super) fn set_ambiguous(&self, number: u64) {
        self.ambiguous.store(number, Ordering::Relaxed);
    }

    /// Returns whether the head of the latest request has two lengths for its body.
    pub(super) fn is_ambiguous(&self) -> bool {
        self.ambiguous.load(Ordering::Relaxed) == self.requests()
    }
}
