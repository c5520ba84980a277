//! Hands a job to the workers and waits until all have finished it.
//!
//! Invariant: what the caller wrote before [`publish`](Handoff::publish) is visible to a worker
//! after [`next`](Handoff::next). What the workers wrote before [`finish`](Handoff::finish) is
//! visible to the caller after [`wait_finished`](Handoff::wait_finished).
//!
//! `tests/interleavings` checks this file and `wake.rs` in every order of their atomic operations.

use super::sync::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use super::wake::{BetweenChecks, WakeSignal};

/// What the caller and the worker threads share to pass jobs.
pub(super) struct Handoff {
    threads: u64,
    between_checks: BetweenChecks,
    current: OwnLine<CurrentJob>,
    /// How often a thread has finished a job. It sums over all jobs, so that no job resets it.
    finished: OwnLine<AtomicU64>,
    stop: AtomicBool,
    job_published: WakeSignal,
    job_finished: WakeSignal,
}

/// The job that the workers run.
struct CurrentJob {
    /// The number of jobs published so far. A change starts the workers.
    number: AtomicU64,
    /// Points to the caller's job until all workers have finished it.
    job: AtomicPtr<()>,
}

/// A value with a cache line of its own, and the line that is fetched with it. No other core writes
/// beside a value that a thread reads in a loop.
#[repr(align(128))]
struct OwnLine<T>(T);

impl Handoff {
    /// Returns a handoff from a caller to `threads` threads.
    pub(super) fn new(threads: u64, between_checks: BetweenChecks) -> Handoff {
        Handoff {
            threads,
            between_checks,
            current: OwnLine(CurrentJob {
                number: AtomicU64::new(0),
                job: AtomicPtr::new(std::ptr::null_mut()),
            }),
            finished: OwnLine(AtomicU64::new(0)),
            stop: AtomicBool::new(false),
            job_published: WakeSignal::default(),
            job_finished: WakeSignal::default(),
        }
    }

    /// Publishes job `number`. The caller counts its jobs from 1 and waits for each before the
    /// next.
    pub(super) fn publish(&self, number: u64, job: *mut ()) {
        self.current.0.job.store(job, Ordering::Relaxed);
        self.current.0.number.store(number, Ordering::SeqCst);
        self.job_published.notify();
    }

    /// Waits until every thread has finished job `number`.
    pub(super) fn wait_finished(&self, number: u64) {
        let all = number * self.threads;
        self.job_finished.wait_until(self.between_checks, || {
            self.finished.0.load(Ordering::SeqCst) == all
        });
    }

    /// Tells the threads to end.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.job_published.notify();
    }

    /// Waits for the job after job `number`. Returns `None` if the threads shall end.
    pub(super) fn next(&self, number: u64) -> Option<*mut ()> {
        let current = &self.current.0;
        self.job_published.wait_until(self.between_checks, || {
            current.number.load(Ordering::SeqCst) != number || self.stop.load(Ordering::SeqCst)
        });
        let stops = self.stop.load(Ordering::SeqCst);
        (!stops).then(|| current.job.load(Ordering::Relaxed))
    }

    /// Notes that a thread has finished job `number`.
    pub(super) fn finish(&self, number: u64) {
        if self.finished.0.fetch_add(1, Ordering::SeqCst) + 1 == number * self.threads {
            self.job_finished.notify();
        }
    }
}
