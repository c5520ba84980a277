//! How far a connection is, for its input and output, its requests and the accept loop.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::engine::TenantId;

/// What a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::api) enum Phase {
    /// The next request. Nothing of it has arrived.
    Idle,
    /// The rest of a request's head.
    Head,
    /// The rest of a request's body.
    Body,
    /// The response: the client has sent its complete request.
    Response,
    /// The end: the server has responded and discards what the client still sends.
    Lingering,
}

const PHASES: [Phase; 5] = [
    Phase::Idle,
    Phase::Head,
    Phase::Body,
    Phase::Response,
    Phase::Lingering,
];

/// The progress of one connection. Only the connection's own task changes it, except `evicted`.
pub(in crate::api) struct Progress {
    opened: Instant,
    phase: AtomicU8,
    since_micros: AtomicU64,   // Since `opened`.
    request_micros: AtomicU64, // When the latest request began, since `opened`.
    requests: AtomicU64,
    scanned: AtomicU64,
    ambiguous: AtomicU64,
    tenant: AtomicU32, // 0 if no request has named a tenant.
    evicted: Notify,
    is_evicted: AtomicBool, // A request has found that the place is taken.
}

impl Progress {
    /// Returns the progress of a connection that has just been opened.
    pub(in crate::api) fn new() -> Progress {
        Progress {
            opened: Instant::now(),
            phase: AtomicU8::new(Phase::Idle as u8),
            since_micros: AtomicU64::new(0),
            request_micros: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            scanned: AtomicU64::new(0),
            ambiguous: AtomicU64::new(u64::MAX),
            tenant: AtomicU32::new(0),
            evicted: Notify::new(),
            is_evicted: AtomicBool::new(false),
        }
    }

    pub(in crate::api) fn phase(&self) -> Phase {
        PHASES[usize::from(self.phase.load(Ordering::Relaxed))]
    }

    /// Returns when the connection was opened.
    pub(in crate::api) fn opened(&self) -> Instant {
        self.opened
    }

    /// Returns when the connection entered its phase.
    pub(in crate::api) fn since(&self) -> Instant {
        self.opened + Duration::from_micros(self.since_micros.load(Ordering::Relaxed))
    }

    /// Returns the number of requests whose head has arrived.
    pub(in crate::api) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Enters `phase`.
    pub(in crate::api) fn enter(&self, phase: Phase) {
        let micros = u64::try_from(self.opened.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.since_micros.store(micros, Ordering::Relaxed);
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// Notes that the first bytes of a request have arrived. If they were `there_at_opening`, they
    /// may have arrived with the connection, and only the server was late.
    pub(in crate::api) fn begin_head(&self, there_at_opening: bool) {
        self.enter(Phase::Head);
        let began = match there_at_opening {
            true => 0,
            false => self.since_micros.load(Ordering::Relaxed),
        };
        self.request_micros.store(began, Ordering::Relaxed);
    }

    /// Returns when the latest request began to arrive.
    pub(in crate::api) fn request_began(&self) -> Instant {
        self.opened + Duration::from_micros(self.request_micros.load(Ordering::Relaxed))
    }

    /// Notes that the head of a request has arrived, and enters `phase`.
    pub(in crate::api) fn begin_request(&self, phase: Phase) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.enter(phase);
    }

    /// Notes of how many requests the heads have been scanned.
    pub(in crate::api) fn set_scanned(&self, requests: u64) {
        self.scanned.store(requests, Ordering::Relaxed);
    }

    /// Returns whether the head of the latest request has not been scanned.
    pub(in crate::api) fn is_unscanned(&self) -> bool {
        self.requests() > self.scanned.load(Ordering::Relaxed)
    }

    /// Notes that the head of request `number`, counted from 1, has two lengths for its body.
    pub(in crate::api) fn set_ambiguous(&self, number: u64) {
        self.ambiguous.store(number, Ordering::Relaxed);
    }

    /// Returns whether the head of the latest request has two lengths for its body.
    pub(in crate::api) fn is_ambiguous(&self) -> bool {
        self.ambiguous.load(Ordering::Relaxed) == self.requests()
    }

    /// Notes which tenant of the tenants file sends requests.
    pub(in crate::api) fn set_tenant(&self, tenant: TenantId) {
        self.tenant.store(tenant.0, Ordering::Relaxed);
    }

    /// Returns the tenant of the latest request that named one.
    pub(in crate::api) fn tenant(&self) -> Option<TenantId> {
        let number = self.tenant.load(Ordering::Relaxed);
        (number != 0).then_some(TenantId(number))
    }

    /// Takes the connection's place: its request is answered with an error, and it ends.
    pub(in crate::api) fn evict(&self) {
        self.evicted.notify_one();
    }

    /// Waits until the connection's place is taken.
    pub(in crate::api) async fn evicted(&self) {
        self.evicted.notified().await;
        self.is_evicted.store(true, Ordering::Relaxed);
    }

    /// Returns whether a request has ended because the connection's place was taken.
    pub(in crate::api) fn is_evicted(&self) -> bool {
        self.is_evicted.load(Ordering::Relaxed)
    }
}
