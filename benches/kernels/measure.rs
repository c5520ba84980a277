//! Selecting, running and printing measurements.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use sterna::bench::MachineLimits;
use sterna::cores;
use sterna_kernels::Kernels;

/// The measurements of one instruction set with some threads.
#[derive(Clone, Copy)]
pub(crate) struct KernelBench<'a> {
    pub(crate) kernels: Kernels,
    pub(crate) threads: usize,
    /// Only kernels whose names contain all of these words are measured.
    pub(crate) words: &'a [&'a str],
    /// The number of kernels that were measured, of all instruction sets.
    pub(crate) measured: &'a AtomicUsize,
    /// The size of the weights of one pass.
    pub(crate) stream_bytes: usize,
    pub(crate) passes: usize,
    /// Whether everything runs once on small shapes.
    pub(crate) smoke: bool,
}

/// What a measured kernel does.
pub(crate) struct Work {
    /// Bytes that it reads from memory.
    pub(crate) bytes: usize,
    /// Multiplications and additions.
    pub(crate) operations: usize,
}

impl KernelBench<'_> {
    /// Returns whether the kernel of this name is measured, and counts it if so.
    pub(crate) fn measures(&self, name: &str) -> bool {
        let is_wanted = self.words.iter().all(|word| name.contains(word));
        self.measured
            .fetch_add(usize::from(is_wanted), Ordering::Relaxed);
        is_wanted
    }

    /// Runs `work(thread)` on all threads at once, `passes` times, and returns the shortest time.
    /// Each thread has its own core if the system allows it.
    pub(crate) fn best(&self, passes: usize, work: impl Fn(usize) + Sync) -> Duration {
        let own = cores::physical();
        let pass = || {
            let start = Instant::now();
            thread::scope(|scope| {
                for thread in 0..self.threads {
                    let (work, own) = (&work, own.get(thread));
                    scope.spawn(move || {
                        own.map(|core| cores::pin(*core));
                        work(thread);
                    });
                }
            });
            start.elapsed()
        };
        (0..passes)
            .map(|_| pass())
            .min()
            .expect("at least one pass")
    }

    /// Returns the part of `count` items that a thread works on.
    pub(crate) fn share(&self, count: usize, thread: usize) -> Range<usize> {
        thread * count / self.threads..(thread + 1) * count / self.threads
    }

    pub(crate) fn print(&self, limits: &MachineLimits, name: &str, work: Work, time: Duration) {
        let read = per_nanosecond(work.bytes, time);
        let computed = per_nanosecond(work.operations, time);
        if self.smoke {
            return;
        }
        println!(
            "  {name:<36} {:>9.3} ms {read:>7.1} GB/s, {:>3.0} % of {:>4.1} \
             {computed:>7.0} Gop/s, {:>3.0} % of {:>4.0}",
            time.as_secs_f64() * 1e3,
            100.0 * read / limits.gigabytes_per_second,
            limits.gigabytes_per_second,
            100.0 * computed / limits.gigaops_per_second,
            limits.gigaops_per_second,
        );
    }
}

/// Returns how many of `count` things a nanosecond has.
pub(crate) fn per_nanosecond(count: usize, time: Duration) -> f64 {
    count as f64 / time.as_nanos() as f64
}
