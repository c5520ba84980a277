//! Worker threads that share one job at a time: fork, work, join.
//!
//! Always true: the calling thread is worker 0; [`Pool::run`] returns only when every worker has
//! finished, also when one of them panics, so a job may borrow from its caller. What a worker may write
//! is handed to it by [`Pool::run_parts`], each part to one worker.
#![expect(
    unsafe_code,
    reason = "a job borrows from its caller, which the type of a long-lived thread cannot say"
)]

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// How long a thread spins before it sleeps. Stages of a forward pass follow each other much faster than
/// this.
const SPIN: Duration = Duration::from_micros(50);

type Job<'a> = &'a (dyn Fn(usize) + Sync);

/// A fixed number of workers, one of which is whoever calls.
pub(super) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    job: AtomicPtr<()>, // Points to the caller's `Job` while `unfinished` is not zero.
    epoch: AtomicU64,   // Counts jobs; a change tells the workers to start.
    unfinished: AtomicUsize,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    started: Bell,
    finished: Bell,
}

impl Pool {
    /// Starts `workers - 1` threads. With `pin`, each is bound to one of the cores that this process may
    /// use, provided there are enough; a system that refuses to bind is no error.
    ///
    /// # Panics
    /// If `workers` is zero or a thread cannot be started.
    #[must_use]
    pub(super) fn new(workers: usize, pin: bool) -> Pool {
        assert!(workers > 0, "a pool needs a worker");
        let shared = Arc::new(Shared {
            job: AtomicPtr::new(std::ptr::null_mut()),
            epoch: AtomicU64::new(0),
            unfinished: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            started: Bell::default(),
            finished: Bell::default(),
        });
        let cores = pin
            .then(core_affinity::get_core_ids)
            .flatten()
            .unwrap_or_default();
        let cores = if workers <= cores.len() {
            cores
        } else {
            Vec::new()
        };
        let start = |worker: usize| {
            let (shared, core) = (Arc::clone(&shared), cores.get(worker).copied());
            let thread = std::thread::Builder::new().name(format!("sterna-worker-{worker}"));
            let body = move || {
                if let Some(core) = core {
                    core_affinity::set_for_current(core);
                }
                shared.work(worker);
            };
            thread
                .spawn(body)
                .expect("the system starts a worker thread")
        };
        let threads = (1..workers).map(start).collect();
        Pool { shared, threads }
    }

    /// How many workers there are, the caller included.
    #[must_use]
    pub(super) fn workers(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `job(worker)` once on every worker and waits for all.
    ///
    /// # Panics
    /// With the panic of a worker, after all have finished. The pool stays usable.
    pub(super) fn run(&mut self, job: Job<'_>) {
        let shared = &*self.shared;
        shared
            .job
            .store((&raw const job).cast_mut().cast(), Ordering::Relaxed);
        shared
            .unfinished
            .store(self.threads.len(), Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        shared.started.ring();
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        shared
            .finished
            .wait_until(|| shared.unfinished.load(Ordering::SeqCst) == 0);
        let theirs = shared.panic.lock().take();
        if let Some(payload) = own.err().or(theirs) {
            resume_unwind(payload);
        }
    }

    /// Hands part i to worker i and returns what each made of its part, in order. A single part is
    /// worked on by the caller alone.
    ///
    /// # Panics
    /// If there are more parts than workers, or with the panic of a worker.
    pub(super) fn run_parts<T: Send, R: Send>(
        &mut self,
        parts: impl IntoIterator<Item = T>,
        work: impl Fn(usize, T) -> R + Sync,
    ) -> Vec<R> {
        let mut parts = parts.into_iter();
        let Some(first) = parts.next() else {
            return Vec::new();
        };
        let Some(second) = parts.next() else {
            return vec![work(0, first)];
        };
        // No lock is ever contended: worker i alone takes from slot i.
        let slots = [first, second].into_iter().chain(parts);
        let slots: Vec<Mutex<(Option<T>, Option<R>)>> =
            slots.map(|part| Mutex::new((Some(part), None))).collect();
        assert!(
            slots.len() <= self.workers(),
            "{} parts for {} workers",
            slots.len(),
            self.workers()
        );
        self.run(&|worker| {
            if let Some(slot) = slots.get(worker) {
                let part = slot.lock().0.take().expect("each worker runs once a job");
                let result = work(worker, part);
                slot.lock().1 = Some(result);
            }
        });
        slots
            .into_iter()
            .map(|slot| slot.into_inner().1.expect("every worker has finished"))
            .collect()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.started.ring();
        for thread in self.threads.drain(..) {
            thread
                .join()
                .expect("a worker catches the panics of its jobs");
        }
    }
}

impl Shared {
    /// The life of a worker thread.
    fn work(&self, worker: usize) {
        let mut seen = 0;
        loop {
            self.started.wait_until(|| {
                self.epoch.load(Ordering::SeqCst) != seen || self.stop.load(Ordering::SeqCst)
            });
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            seen += 1; // The next job is not published before this one is finished.
            let job = self.job.load(Ordering::Relaxed).cast::<Job<'_>>();
            // SAFETY: `run` stored a pointer to its own `job` argument before it raised the epoch that
            // this thread has just seen, and does not return, nor unwind, before this thread has counted
            // itself out of `unfinished` below.
            let job = unsafe { *job };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(worker))) {
                self.panic.lock().get_or_insert(payload);
            }
            if self.unfinished.fetch_sub(1, Ordering::SeqCst) == 1 {
                self.finished.ring();
            }
        }
    }
}

/// Wakes threads that wait for a condition; waiting spins first.
#[derive(Default)]
struct Bell {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    rung: Condvar,
}

impl Bell {
    /// Waits until `condition` holds. Whoever makes it true must do so with a sequentially consistent
    /// write and then ring.
    fn wait_until(&self, condition: impl Fn() -> bool) {
        let mut start = None;
        loop {
            for _ in 0..64 {
                if condition() {
                    return;
                }
                std::hint::spin_loop();
            }
            if start.get_or_insert_with(Instant::now).elapsed() > SPIN {
                break;
            }
        }
        // Announced before the last look at the condition, as `ring` looks for sleepers after the
        // condition was made true: one of the two sees the other.
        let mut guard = self.lock.lock();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !condition() {
            self.rung.wait(&mut guard);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn ring(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock());
            self.rung.notify_all();
        }
    }
}

/// Shares `0..len` among at most `parts`: contiguous, in order, none empty, sizes differing by one at most.
pub(super) fn ranges(
    len: usize,
    parts: usize,
) -> impl ExactSizeIterator<Item = Range<usize>> + Clone {
    let parts = parts.min(len);
    (0..parts).map(move |part| part * len / parts..(part + 1) * len / parts)
}

/// Cuts `data`, rows of `row` values, at the given ranges of rows, which must be contiguous from 0. The
/// disjoint views that [`Pool::run_parts`] hands out.
pub(super) fn split_rows<T>(
    data: &mut [T],
    row: usize,
    ranges: impl IntoIterator<Item = Range<usize>>,
) -> impl Iterator<Item = &mut [T]> {
    let (mut rest, mut at) = (data, 0);
    ranges.into_iter().map(move |range| {
        assert_eq!(range.start, at, "ranges of rows are contiguous");
        at = range.end;
        let (part, after) = std::mem::take(&mut rest).split_at_mut(range.len() * row);
        rest = after;
        part
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_worker_runs_each_job_once() {
        for workers in [1, 2, 3, 5] {
            let mut pool = Pool::new(workers, false);
            let counts: Vec<AtomicUsize> = (0..workers).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..2000 {
                pool.run(&|worker| {
                    counts[worker].fetch_add(1, Ordering::Relaxed);
                });
            }
            assert!(
                counts
                    .iter()
                    .all(|count| count.load(Ordering::Relaxed) == 2000),
                "{workers} workers"
            );
        }
    }

    #[test]
    fn parked_workers_wake_up() {
        let mut pool = Pool::new(3, true);
        for _ in 0..20 {
            let start = Instant::now();
            while start.elapsed() < 3 * SPIN {
                std::hint::spin_loop();
            }
            assert_eq!(
                pool.run_parts(0..3, |worker, part| worker * 10 + part),
                [0, 11, 22]
            );
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_after_all_have_finished() {
        let mut pool = Pool::new(3, false);
        for culprit in [0, 1, 2] {
            let finished = AtomicUsize::new(0);
            let run = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|worker| {
                    assert_ne!(worker, culprit, "worker {culprit} fails");
                    finished.fetch_add(1, Ordering::Relaxed);
                });
            }));
            let payload = run.expect_err("the panic is passed on");
            let message = payload
                .downcast_ref::<String>()
                .expect("the worker's own message");
            assert!(
                message.contains(&format!("worker {culprit} fails")),
                "{message}"
            );
            assert_eq!(finished.load(Ordering::Relaxed), 2);
        }
        assert_eq!(pool.run_parts([1, 2, 3], |_, part| part * 2), [2, 4, 6]);
    }

    #[test]
    fn parts_write_disjoint_rows() {
        let mut pool = Pool::new(4, false);
        let mut data = vec![0; 10 * 3];
        let shares = ranges(10, pool.workers());
        let parts: Vec<_> = shares
            .clone()
            .zip(split_rows(&mut data, 3, shares))
            .collect();
        pool.run_parts(parts, |worker, (rows, part)| {
            for (row, values) in rows.zip(part.chunks_mut(3)) {
                values.fill(100 * worker + row);
            }
        });
        let expected =
            (0..10).flat_map(|row| [row + [0, 0, 100, 100, 100, 200, 200, 300, 300, 300][row]; 3]);
        assert_eq!(data, expected.collect::<Vec<_>>());
    }

    #[test]
    fn ranges_cover_all_without_empty_parts() {
        for (len, parts) in [(0, 3), (1, 3), (3, 3), (7, 3), (100, 7)] {
            let shares: Vec<_> = ranges(len, parts).collect();
            assert!(shares.iter().all(|share| !share.is_empty()) && shares.len() <= parts);
            let end = shares.iter().fold(0, |at, share| {
                assert_eq!(share.start, at);
                share.end
            });
            assert_eq!(end, len);
        }
    }
}
