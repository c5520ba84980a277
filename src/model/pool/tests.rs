//! Tests of the pool.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::wake::SPIN;
use super::{Pool, ranges, split_rows};

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
fn sleeping_workers_wake_up() {
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
fn the_caller_gets_a_panic_after_all_workers_have_finished() {
    let mut pool = Pool::new(3, false);
    for culprit in [0, 1, 2] {
        let finished = AtomicUsize::new(0);
        let run = catch_unwind(AssertUnwindSafe(|| {
            pool.run(&|worker| {
                assert_ne!(worker, culprit, "worker {culprit} fails");
                finished.fetch_add(1, Ordering::Relaxed);
            });
        }));
        let payload = run.expect_err("the caller gets the panic");
        let message = payload
            .downcast_ref::<String>()
            .expect("the message of the worker");
        assert!(
            message.contains(&format!("worker {culprit} fails")),
            "{message}"
        );
        assert_eq!(finished.load(Ordering::Relaxed), 2);
    }
    assert_eq!(pool.run_parts([1, 2, 3], |_, part| part * 2), [2, 4, 6]);
}

/// A panic payload that panics again when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "the payload was dropped");
    }
}

#[test]
fn panics_of_several_workers_end_the_job_whatever_their_payloads_do() {
    let mut pool = Pool::new(4, false);
    for first_culprit in [0, 1] {
        let run = catch_unwind(AssertUnwindSafe(|| {
            pool.run(&|worker| {
                if worker >= first_culprit {
                    std::panic::panic_any(Bomb);
                }
            });
        }));
        std::mem::forget(run.expect_err("the caller gets a panic"));
    }
    assert_eq!(pool.run_parts([1, 2, 3], |_, part| part * 2), [2, 4, 6]);
}

#[test]
fn every_part_and_result_is_dropped_once() {
    let mut pool = Pool::new(3, false);
    let marks: [Arc<()>; 3] = std::array::from_fn(|_| Arc::new(()));
    let held = || marks.each_ref().map(Arc::strong_count);
    let results = pool.run_parts(marks.clone(), |_, mark| (mark, [0; 50]));
    assert_eq!(held(), [2; 3], "held only by the results");
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
fn ranges_cover_everything_and_none_is_empty() {
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
