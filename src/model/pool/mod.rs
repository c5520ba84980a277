//! Worker threads that share one job at a time: fork, work, join.
//!
//! Always true: the calling thread is worker 0; [`Pool::run`] returns only when every worker has
//! finished, also when one of them panics, so a job may borrow from its caller. What a worker may write
//! is handed to it by [`Pool::run_parts`], each part to one worker. A job that follows soon after another
//! takes no lock, no memory and no system call.
#![expect(
    unsafe_code,
    reason = "a job borrows from its caller, which the type of a long-lived thread cannot say"
)]

mod bell;

use std::any::Any;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;

use crate::cores;
use bell::{Bell, Patience};

type Job<'a> = &'a (dyn Fn(usize) + Sync);

/// A fixed number of workers, one of which is whoever calls.
pub(super) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    jobs: u64,        // So far.
    lines: Vec<Line>, // What the slots of a job's parts are made of, used again by the next job.
}

struct Shared {
    threads: u64,
    patience: Patience,
    call: OwnLine<Call>,
    finished: OwnLine<AtomicU64>, // Adds up over all jobs, so that nobody has to set it back.
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    has_panicked: AtomicBool, // Spares the lock of `panic`.
    called: Bell,
    done: Bell,
}

/// What calls the workers to a job.
struct Call {
    jobs: AtomicU64,    // A change tells the workers to start.
    job: AtomicPtr<()>, // Points to the caller's `Job` until all workers have finished it.
}

/// A cache line for itself (and the one that is fetched with it): no other core writes beside what a thread
/// looks at over and over.
#[repr(align(128))]
struct OwnLine<T>(T);

impl Pool {
    /// Starts `workers - 1` threads. With `pin`, each is bound to a physical core of its own, provided this
    /// process may use as many; a system that refuses to bind is no error.
    ///
    /// # Panics
    /// If `workers` is zero or a thread cannot be started.
    #[must_use]
    pub(super) fn new(workers: usize, pin: bool) -> Pool {
        assert!(workers > 0, "a pool needs a worker");
        let room = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            threads: workers as u64 - 1,
            patience: if workers <= room {
                Patience::Spin
            } else {
                Patience::Yield
            },
            call: OwnLine(Call {
                jobs: AtomicU64::new(0),
                job: AtomicPtr::new(std::ptr::null_mut()),
            }),
            finished: OwnLine(AtomicU64::new(0)),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            has_panicked: AtomicBool::new(false),
            called: Bell::default(),
            done: Bell::default(),
        });
        let cores = if pin { cores::physical() } else { Vec::new() };
        let is_roomy = workers <= cores.len();
        let start = |worker: usize| {
            let shared = Arc::clone(&shared);
            let core = cores.get(worker).copied().filter(|_| is_roomy);
            let thread = std::thread::Builder::new().name(format!("sterna-worker-{worker}"));
            let body = move || {
                if let Some(core) = core {
                    cores::pin(core);
                }
                shared.work(worker);
            };
            thread
                .spawn(body)
                .expect("the system starts a worker thread")
        };
        let threads = (1..workers).map(start).collect();
        Pool {
            shared,
            threads,
            jobs: 0,
            lines: Vec::new(),
        }
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
        self.jobs += 1;
        let shared = &*self.shared;
        let call = &shared.call.0;
        call.job
            .store((&raw const job).cast_mut().cast(), Ordering::Relaxed);
        call.jobs.store(self.jobs, Ordering::SeqCst);
        shared.called.ring();
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        let all = self.jobs * shared.threads;
        shared.done.wait_until(shared.patience, || {
            shared.finished.0.load(Ordering::SeqCst) == all
        });
        let theirs = if shared.has_panicked.load(Ordering::Relaxed) {
            shared.has_panicked.store(false, Ordering::Relaxed);
            shared.panic.lock().take()
        } else {
            None
        };
        if let Some(payload) = own.err().or(theirs) {
            resume_unwind(payload);
        }
    }

    /// Hands part i to worker i and returns what each made of its part, in order; takes no memory where that
    /// is nothing, `()`. A single part is worked on by the caller alone.
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
        let mut lines = std::mem::take(&mut self.lines); // A panic loses them, and the next job takes new ones.
        let mut slots = Slots::new(&mut lines, workers);
        for part in [first, second].into_iter().chain(parts) {
            slots.push(part);
        }
        let filled = slots.filled();
        self.run(&|worker| {
            if let Some(slot) = filled.get(worker) {
                // SAFETY: a job runs once on each worker, and worker i alone looks at slot i.
                unsafe { slot.work(|part| work(worker, part)) };
            }
        });
        let results = slots.results();
        self.lines = lines;
        results
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.called.ring();
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
            self.called.wait_until(self.patience, || {
                self.call.0.jobs.load(Ordering::SeqCst) != seen || self.stop.load(Ordering::SeqCst)
            });
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            seen += 1; // The next job is not published before this one is finished.
            let job = self.call.0.job.load(Ordering::Relaxed).cast::<Job<'_>>();
            // SAFETY: `run` stored a pointer to its own `job` argument before it raised `jobs` to the number
            // that this thread has just seen, and does not return, nor unwind, before this thread has counted
            // itself in `finished` below.
            let job = unsafe { *job };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(worker))) {
                self.panic.lock().get_or_insert(payload);
                self.has_panicked.store(true, Ordering::Relaxed);
            }
            if self.finished.0.fetch_add(1, Ordering::SeqCst) + 1 == seen * self.threads {
                self.done.ring();
            }
        }
    }
}

/// Memory for slots of any kind.
#[repr(align(128))]
struct Line {
    _bytes: MaybeUninit<[u8; 128]>,
}

/// The parts of one job, and what becomes of them.
struct Slots<'a, T, R> {
    room: &'a mut [MaybeUninit<Slot<T, R>>],
    filled: usize, // So many of them are written.
}

/// Where one worker finds its part and leaves its result.
#[repr(align(128))]
struct Slot<T, R>(UnsafeCell<State<T, R>>);

enum State<T, R> {
    Given(T),
    Taken,
    Made(R),
}

// SAFETY: threads that share a slot reach its state by `work` alone, whose callers see to it that one of them at a time
// does; the part then moves to that thread, and the result back, which `Send` allows.
unsafe impl<T: Send, R: Send> Sync for Slot<T, R> {}

impl<'a, T, R> Slots<'a, T, R> {
    /// Room for `count` parts, in `lines`, of which there are more only if no job before needed as many.
    fn new(lines: &'a mut Vec<Line>, count: usize) -> Slots<'a, T, R> {
        const { assert!(align_of::<Slot<T, R>>() == align_of::<Line>()) }
        let needed = count * (size_of::<Slot<T, R>>() / size_of::<Line>());
        if lines.len() < needed {
            lines.resize_with(needed, || Line {
                _bytes: MaybeUninit::uninit(),
            });
        }
        // SAFETY: the lines are at least as many bytes, aligned as slots are, and borrowed for 'a by nobody else; of what
        // they hold, a `MaybeUninit` asks nothing.
        let room = unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), count) };
        Slots { room, filled: 0 }
    }

    fn push(&mut self, part: T) {
        let workers = self.room.len();
        let slot = self.room.get_mut(self.filled);
        let slot = slot.unwrap_or_else(|| panic!("more parts than the {workers} workers"));
        slot.write(Slot(UnsafeCell::new(State::Given(part))));
        self.filled += 1;
    }

    fn filled(&self) -> &[Slot<T, R>] {
        // SAFETY: `push` has written the first `filled` slots.
        unsafe { self.room[..self.filled].assume_init_ref() }
    }

    /// What was made of each part; every worker must have finished.
    fn results(self) -> Vec<R> {
        let filled = &mut self.room[..self.filled];
        // SAFETY: `push` has written the first `filled` slots.
        let filled = unsafe { filled.assume_init_mut() };
        let made = |slot: &mut Slot<T, R>| match std::mem::replace(slot.0.get_mut(), State::Taken) {
            State::Made(result) => result,
            State::Given(_) | State::Taken => unreachable!("every worker has finished"),
        };
        filled.iter_mut().map(made).collect()
    }
}

impl<T, R> Drop for Slots<'_, T, R> {
    /// After a panic parts or results may be left.
    fn drop(&mut self) {
        // SAFETY: `push` has written the first `filled` slots, and they are not looked at again.
        unsafe { self.room[..self.filled].assume_init_drop() };
    }
}

impl<T, R> Slot<T, R> {
    /// Takes the part and leaves what `work` makes of it.
    ///
    /// # Safety
    /// No other thread may call this at the same time.
    unsafe fn work(&self, work: impl FnOnce(T) -> R) {
        let state = self.0.get();
        // SAFETY: the caller promises that no other thread is here, and the reference ends with this statement.
        let given = std::mem::replace(unsafe { &mut *state }, State::Taken);
        let State::Given(part) = given else {
            unreachable!("each worker runs once a job");
        };
        let made = State::Made(work(part));
        // SAFETY: as above.
        unsafe { *state = made };
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
    use std::sync::atomic::AtomicUsize;
    use std::time::Instant;

    use super::bell::SPIN;
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
    fn every_part_and_result_is_dropped_once() {
        let mut pool = Pool::new(3, false);
        let marks: [Arc<()>; 3] = std::array::from_fn(|_| Arc::new(()));
        let held = || marks.each_ref().map(Arc::strong_count);
        let results = pool.run_parts(marks.clone(), |_, mark| (mark, [0; 50]));
        assert_eq!(held(), [2; 3], "in the results alone");
        drop(results);
        assert_eq!(held(), [1; 3]);
        for culprit in [0, 1, 2] {
            let run = catch_unwind(AssertUnwindSafe(|| {
                pool.run_parts(marks.clone(), |worker, mark| {
                    assert_ne!(worker, culprit, "worker {culprit} fails");
                    mark
                })
            }));
            assert!(run.is_err());
            assert_eq!(held(), [1; 3], "after a panic");
        }
        let too_many = marks.iter().cycle().take(4).cloned();
        let run = catch_unwind(AssertUnwindSafe(|| pool.run_parts(too_many, |_, _| {})));
        assert!(run.is_err());
        assert_eq!(held(), [1; 3], "after more parts than workers");
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
