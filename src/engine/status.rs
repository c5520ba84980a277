//! What every thread may know of the engine without waiting for it: a few atomics that the engine thread writes once a turn.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sterna_scheduler::{Micros, Refusal, Snapshot};

use super::lane_quota::LaneQuota;
use super::{EngineConfig, SubmitError};

/// A reading of the engine's gauges. Never waits for a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The engine thread has not panicked. A thread that ended after a drain counts as alive.
    pub alive: bool,
    /// A drain has begun, and may have ended. The engine accepts no new request.
    pub draining: bool,
    /// Steps done since the start.
    pub steps: u64,
    /// Sequences that hold pages.
    pub running: u32,
    /// Sequences that wait.
    pub queued: u32,
    /// How long the engine has had work without finishing a step; zero when idle.
    pub stalled_for: Duration,
    /// `stalled_for` beyond which the engine counts as stuck.
    pub stall_limit: Duration,
}

impl Status {
    /// The engine makes progress, or has nothing to do.
    pub fn healthy(&self) -> bool {
        self.alive && self.stalled_for <= self.stall_limit
    }

    /// New requests are welcome.
    pub fn ready(&self) -> bool {
        self.alive && !self.draining
    }
}

/// What every thread may look at without waiting.
pub(super) struct Shared {
    started: Instant,
    pub(super) vocabulary: usize,
    stall_limit: Duration,
    pub(super) tickets: AtomicU64,
    pub(super) lane_quota: LaneQuota,
    /// The engine thread ended by a panic.
    pub(super) died: AtomicBool,
    /// The engine thread has ended and takes nothing from the lanes any more.
    pub(super) ended: AtomicBool,
    pub(super) draining: AtomicBool,
    steps: AtomicU64,
    running: AtomicU32,
    queued: AtomicU32,
    progress: AtomicU64,       // Micros of the last sign of progress, or IDLE.
    service_micros: AtomicU64, // From admission to the end of a request, a moving average.
}

/// `Shared::progress` while there is nothing to do.
const IDLE: u64 = u64::MAX;
const MIN_RETRY: Micros = 1_000_000;
const MAX_RETRY: Micros = 120_000_000;

impl Shared {
    pub(super) fn new(config: &EngineConfig, vocabulary: usize) -> Shared {
        Shared {
            started: Instant::now(),
            vocabulary,
            stall_limit: config.stall_limit,
            tickets: AtomicU64::new(0),
            lane_quota: LaneQuota::new(config.submit_lane),
            died: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            steps: AtomicU64::new(0),
            running: AtomicU32::new(0),
            queued: AtomicU32::new(0),
            progress: AtomicU64::new(IDLE),
            service_micros: AtomicU64::new(0),
        }
    }

    /// Microseconds since the start: the scheduler's clock.
    pub(super) fn micros(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.started).as_micros() as u64
    }

    pub(super) fn status(&self) -> Status {
        let progress = self.progress.load(Ordering::Relaxed);
        let stalled_micros = match progress {
            IDLE => 0,
            since => self.micros(Instant::now()).saturating_sub(since),
        };
        Status {
            alive: !self.died.load(Ordering::SeqCst),
            draining: self.draining.load(Ordering::SeqCst),
            steps: self.steps.load(Ordering::Relaxed),
            running: self.running.load(Ordering::Relaxed),
            queued: self.queued.load(Ordering::Relaxed),
            stalled_for: Duration::from_micros(stalled_micros),
            stall_limit: self.stall_limit,
        }
    }

    /// A step begins: from now on the engine should make progress.
    pub(super) fn begin_step(&self, at: Instant) {
        self.progress.store(self.micros(at), Ordering::Relaxed);
    }

    pub(super) fn end_turn(&self, at: Instant, stepped: bool, snapshot: &Snapshot) {
        self.steps.fetch_add(u64::from(stepped), Ordering::Relaxed);
        self.running
            .store(snapshot.running as u32, Ordering::Relaxed);
        self.queued.store(snapshot.queued as u32, Ordering::Relaxed);
        let idle = snapshot.running + snapshot.queued == 0;
        self.progress
            .store(if idle { IDLE } else { self.micros(at) }, Ordering::Relaxed);
    }

    /// Returns why an engine thread that has ended rejects a request.
    pub(super) fn gone(&self) -> SubmitError {
        if self.draining.load(Ordering::SeqCst) {
            Refusal::Draining.into()
        } else {
            SubmitError::Dead
        }
    }

    /// A request took `service` from admission to its end.
    pub(super) fn served(&self, service: Duration) {
        let latest = service.as_micros() as u64;
        let mean = self.service_micros.load(Ordering::Relaxed);
        let mean = if mean == 0 {
            latest
        } else {
            mean - mean / 8 + latest / 8
        };
        self.service_micros.store(mean, Ordering::Relaxed);
    }

    /// Returns about how long the queue takes: each waiting request takes the place of one that
    /// ends.
    pub(super) fn retry_after(&self) -> Micros {
        let running = u64::from(self.running.load(Ordering::Relaxed)).max(1);
        let queued = u64::from(self.queued.load(Ordering::Relaxed)) + 1;
        let service = self.service_micros.load(Ordering::Relaxed);
        (service.saturating_mul(queued) / running).clamp(MIN_RETRY, MAX_RETRY)
    }
}
