//! The engine's state that every thread can read without waiting.
//!
//! The engine thread writes most of it in each turn. Handles write `draining` and `tickets`.

use std::time::{Duration, Instant};

use sterna_scheduler::{Micros, Refusal, Snapshot};

use super::clock::{Clock, micros};
use super::config::EngineConfig;
use super::load::LoadCells;
use super::refused_tenants::RefusedTenants;
use super::request::SubmitError;
use super::submit_queue::SubmitQueue;
use super::sync::{AtomicBool, AtomicU64, Ordering};

/// A reading of the engine's gauges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The engine thread has not panicked. A thread that ended after a drain counts as alive.
    pub alive: bool,
    /// A drain has begun, and may have ended. The engine accepts no new request.
    pub draining: bool,
    /// Steps since the start.
    pub steps: u64,
    /// Sequences that hold pages.
    pub running: u32,
    /// Sequences that wait.
    pub queued: u32,
    /// How long the engine has had work without finishing a step; zero when idle.
    pub stalled_for: Duration,
    /// The engine counts as stalled when `stalled_for` exceeds this limit: the limit of
    /// `EngineConfig`, or `SLOW_STEPS` times the predicted time of the step if that is longer.
    pub stall_limit: Duration,
}

impl Status {
    /// Returns whether the engine makes progress or is idle.
    pub fn healthy(&self) -> bool {
        self.alive && self.stalled_for <= self.stall_limit
    }

    /// Returns whether the engine accepts new requests.
    pub fn ready(&self) -> bool {
        self.alive && !self.draining
    }
}

/// State that the engine thread shares with handles, streams and the egress thread.
pub(super) struct SharedState {
    pub(super) clock: Clock,
    pub(super) vocabulary: usize,
    pub(super) tickets: AtomicU64,
    pub(super) submissions: SubmitQueue,
    pub(super) refused: RefusedTenants,
    /// The engine thread ended by a panic.
    pub(super) died: AtomicBool,
    /// The engine thread has ended and takes nothing from the queues any more.
    pub(super) ended: AtomicBool,
    pub(super) draining: AtomicBool,
    stall_limit: Duration,
    progress: AtomicU64, // When the engine last made progress, in microseconds, or IDLE.
    predicted: AtomicU64, // The time of the step that runs, in microseconds.
    steps: AtomicU64,
    pub(super) load: LoadCells,
}

/// The value of `SharedState::progress` while the engine has no work.
const IDLE: Micros = Micros::MAX;
/// A step counts as stalled only if it takes this many times as long as predicted. On a slow
/// machine, a step of a large model may take longer than any fixed limit.
const SLOW_STEPS: u32 = 10;

impl SharedState {
    pub(super) fn new(config: &EngineConfig, vocabulary: usize) -> SharedState {
        SharedState {
            clock: Clock::start(),
            vocabulary,
            tickets: AtomicU64::new(0),
            submissions: SubmitQueue::new(config.submit_queue, config.limits.pages),
            refused: RefusedTenants::new(),
            died: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            stall_limit: config.stall_limit,
            progress: AtomicU64::new(IDLE),
            predicted: AtomicU64::new(0),
            steps: AtomicU64::new(0),
            load: LoadCells::new(config.limits.clone()),
        }
    }

    pub(super) fn status(&self) -> Status {
        let stalled_for = match self.progress.load(Ordering::Relaxed) {
            IDLE => 0,
            since => self.clock.micros(Instant::now()).saturating_sub(since),
        };
        Status {
            alive: !self.died.load(Ordering::SeqCst),
            draining: self.draining.load(Ordering::SeqCst),
            steps: self.steps.load(Ordering::Relaxed),
            running: self.load.running(),
            queued: self.load.queued(),
            stalled_for: Duration::from_micros(stalled_for),
            stall_limit: self.stall_limit(),
        }
    }

    fn stall_limit(&self) -> Duration {
        let predicted = Duration::from_micros(self.predicted.load(Ordering::Relaxed));
        self.stall_limit.max(predicted.saturating_mul(SLOW_STEPS))
    }

    /// Notes that the engine has work from now on, so it should make progress.
    pub(super) fn begin_turn(&self, at: Instant) {
        self.begin_step(at, Duration::ZERO);
    }

    /// Notes that the engine computes a step, which should take as long as predicted.
    pub(super) fn begin_step(&self, at: Instant, predicted: Duration) {
        self.predicted.store(micros(predicted), Ordering::Relaxed);
        self.progress
            .store(self.clock.micros(at), Ordering::Relaxed);
    }

    /// Notes the end of a turn of the engine thread; `has_stepped` if it ran a step.
    pub(super) fn end_turn(&self, at: Instant, has_stepped: bool, snapshot: &Snapshot) {
        self.steps
            .fetch_add(u64::from(has_stepped), Ordering::Relaxed);
        self.load.publish(snapshot);
        let is_idle = snapshot.running + snapshot.queued == 0;
        let progress = if is_idle { IDLE } else { self.clock.micros(at) };
        self.progress.store(progress, Ordering::Relaxed);
    }

    /// Returns why an engine thread that has ended refuses a request.
    pub(super) fn gone(&self) -> SubmitError {
        if self.draining.load(Ordering::SeqCst) {
            Refusal::Draining.into()
        } else {
            SubmitError::Dead
        }
    }
}
