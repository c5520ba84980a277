//! The orders that are tried: jobs from a caller to one or two workers, and the end of the pool.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use super::handoff::Handoff;
use super::wake::BetweenChecks;

/// Memory of the caller, and of each worker. A relaxed load returns any value that no other
/// operation has ordered away, so an old value shows that the handoff orders too little.
struct Memory {
    handoff: Handoff,
    input: AtomicU64,
    outputs: Vec<AtomicU64>,
}

/// Hands `jobs` jobs to `workers` threads. Each job adds the caller's input to every output.
fn run_jobs(workers: usize, jobs: u64, between: BetweenChecks) {
    let memory = Arc::new(Memory {
        handoff: Handoff::new(workers as u64, between),
        input: AtomicU64::new(0),
        outputs: (0..workers).map(|_| AtomicU64::new(0)).collect(),
    });
    let work = |worker: usize| {
        let memory = Arc::clone(&memory);
        move || {
            let mut number = 0;
            while memory.handoff.next(number).is_some() {
                number += 1;
                let output = &memory.outputs[worker];
                let sum = output.load(Ordering::Relaxed) + memory.input.load(Ordering::Relaxed);
                output.store(sum, Ordering::Relaxed);
                memory.handoff.finish(number);
            }
            number
        }
    };
    let threads: Vec<_> = (0..workers)
        .map(|worker| thread::spawn(work(worker)))
        .collect();
    for number in 1..=jobs {
        memory.input.store(10 * number, Ordering::Relaxed);
        memory.handoff.publish(number, std::ptr::null_mut());
        memory.handoff.wait_finished(number);
        let expected = (1..=number).map(|job| 10 * job).sum::<u64>();
        for output in &memory.outputs {
            assert_eq!(output.load(Ordering::Relaxed), expected);
        }
    }
    memory.handoff.stop();
    for thread in threads {
        assert_eq!(thread.join().expect("a worker ends"), jobs);
    }
}

/// Tries the orders of `run` with at most two preemptions, unless the environment says more.
fn check(run: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = model.preemption_bound.or(Some(2));
    model.check(run);
}

#[test]
fn one_worker_runs_each_job_once_and_both_sides_see_what_the_other_wrote() {
    check(|| run_jobs(1, 2, BetweenChecks::Spin));
}

#[test]
fn two_workers_run_each_job_once_and_the_caller_waits_for_both() {
    check(|| run_jobs(2, 1, BetweenChecks::Spin));
}

#[test]
fn workers_that_yield_miss_no_job() {
    check(|| run_jobs(1, 1, BetweenChecks::Yield));
}

#[test]
fn workers_end_when_the_pool_stops_before_any_job() {
    check(|| run_jobs(2, 0, BetweenChecks::Spin));
}
