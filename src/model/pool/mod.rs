//! Worker threads that run one job at a time: fork, work, join.
//!
//! Invariant: the calling thread is worker 0. [`Pool::run`] returns only after every worker has
//! finished, even if one of them panics, so a job may borrow from its caller.
//!
//! Invariant: [`Pool::run_parts`] hands each part to one worker, so what a worker may write is its
//! own.
//!
//! Invariant: a job that soon follows another takes no lock, no memory and no system call.
#![expect(
    unsafe_code,
    reason = "a job borrows from its caller, and a long-lived thread cannot have that lifetime"
)]

mod handoff;
mod shares;
mod slots;
mod sync;
#[cfg(test)]
mod tests;
mod wake;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;

use crate::cores;
use crate::fault::{self, Place};
use handoff::Handoff;
pub(super) use shares::{ranges, split_rows};
use slots::{SlotMemory, Slots};
use wake::BetweenChecks;

type Job<'a> = &'a (dyn Fn(usize) + Sync);

/// A fixed number of workers, one of which is the caller.
pub(super) struct Pool {
    shared: Arc<PoolShared>,
    threads: Vec<JoinHandle<()>>,
    /// The number of jobs so far.
    jobs: u64,
    /// The memory of the slots of a job's parts. Every job reuses it.
    slot_memory: SlotMemory,
}

/// What the caller and the worker threads share.
struct PoolShared {
    handoff: Handoff,
    panic: Mutex<Option<Panic>>,
    /// Whether `panic` is set. Checking this avoids the lock.
    has_panicked: AtomicBool,
}

impl Pool {
    /// Starts `workers - 1` threads. With `pin`, binds each thread to a physical core of its own,
    /// if this process may use as many. If the system refuses to bind, the thread runs unbound.
    ///
    /// # Panics
    /// If `workers` is zero or a thread cannot be started.
    pub(super) fn new(workers: usize, pin: bool) -> Pool {
        assert!(workers > 0, "a pool has at least one worker");
        let available = || std::thread::available_parallelism().map_or(1, usize::from);
        let between_checks = if workers == 1 || workers <= available() {
            BetweenChecks::Spin
        } else {
            BetweenChecks::Yield
        };
        let shared = Arc::new(PoolShared {
            handoff: Handoff::new(workers as u64 - 1, between_checks),
            panic: Mutex::new(None),
            has_panicked: AtomicBool::new(false),
        });
        let cores = if pin { cores::physical() } else { Vec::new() };
        let has_enough_cores = workers <= cores.len();
        let start = |worker: usize| {
            let shared = Arc::clone(&shared);
            let core = cores.get(worker).copied().filter(|_| has_enough_cores);
            let thread = std::thread::Builder::new().name(format!("sterna-worker-{worker}"));
            let body = move || {
                if let Some(core) = core {
                    cores::pin(core);
                }
                shared.run_worker(worker);
            };
            thread.spawn(body).expect("the system starts a thread")
        };
        let threads = (1..workers).map(start).collect();
        Pool {
            shared,
            threads,
            jobs: 0,
            slot_memory: SlotMemory::default(),
        }
    }

    /// Returns the number of workers, including the caller.
    pub(super) fn workers(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `job(worker)` once on every worker and waits for all.
    ///
    /// # Panics
    /// With the panic of a worker, after all have finished. The pool stays usable.
    pub(super) fn run(&mut self, job: Job<'_>) {
        self.jobs += 1;
        let shared = &*self.shared;
        let pointer = (&raw const job).cast_mut().cast();
        shared.handoff.publish(self.jobs, pointer);
        let own = run_part(job, 0);
        shared.handoff.wait_finished(self.jobs);
        let mut panic = own.err();
        if shared.has_panicked.load(Ordering::Relaxed) {
            shared.has_panicked.store(false, Ordering::Relaxed);
            keep_first(&mut panic, shared.panic.lock().take());
        }
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Hands part i to worker i, and returns the result of each part, in order. Results of type
    /// `()` take no memory. The caller computes a single part alone.
    ///
    /// # Panics
    /// If there are more parts than workers, or with the panic of a worker.
    pub(super) fn run_parts<T: Send, R: Send>(
        &mut self,
        parts: impl IntoIterator<Item = T>,
        work: impl Fn(usize, T) -> R + Sync,
    ) -> Vec<R> {
        let workers = self.workers();
        let mut parts = parts.into_iter();
        let Some(first) = parts.next() else {
            return Vec::new();
        };
        let Some(second) = parts.next() else {
            return vec![work(0, first)];
        };
        // A panic loses the memory; the next job allocates it again.
        let mut memory = std::mem::take(&mut self.slot_memory);
        let mut slots = Slots::new(&mut memory, workers);
        for part in [first, second].into_iter().chain(parts) {
            slots.push(part);
        }
        let filled = slots.filled();
        self.run(&|worker| {
            if let Some(slot) = filled.get(worker) {
                // SAFETY: a job runs once on each worker, and only worker i accesses slot i.
                unsafe { slot.work(|part| work(worker, part)) };
            }
        });
        let results = slots.results();
        self.slot_memory = memory;
        results
    }
}

/// A panic that a job raised.
type Panic = Box<dyn Any + Send>;

/// Runs the part of a job that a worker has.
fn run_part(job: Job<'_>, worker: usize) -> Result<(), Panic> {
    catch_unwind(AssertUnwindSafe(|| {
        fault::pass(Place::JobBegun);
        job(worker);
        fault::pass(Place::JobEnded);
    }))
}

/// Sets `first` to `other` if it is not set. Otherwise leaks `other`: dropping it may panic again,
/// and a worker that unwinds never finishes its job.
fn keep_first(first: &mut Option<Panic>, other: Option<Panic>) {
    if first.is_none() {
        *first = other;
    } else {
        std::mem::forget(other);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.handoff.stop();
        for thread in self.threads.drain(..) {
            thread
                .join()
                .expect("a worker catches the panics of its jobs");
        }
    }
}

impl PoolShared {
    /// Runs jobs on a worker thread until the pool stops.
    fn run_worker(&self, worker: usize) {
        let mut number = 0;
        while let Some(job) = self.handoff.next(number) {
            number += 1; // The caller publishes the next job only after this one is finished.
            // SAFETY: `run` published a pointer to its own `job` argument. It neither returns nor
            // unwinds before this thread has finished the job below.
            let job = unsafe { *job.cast::<Job<'_>>() };
            if let Err(payload) = run_part(job, worker) {
                keep_first(&mut self.panic.lock(), Some(payload));
                self.has_panicked.store(true, Ordering::Relaxed);
            }
            self.handoff.finish(number);
        }
    }
}
