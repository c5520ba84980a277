//! Measures what the machine can do: how fast it reads memory and multiplies small integers.
//!
//! The speed of memory that other machines share changes by the minute. So a figure is compared
//! with limits that were sampled within seconds of it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::cores;
use serde::Serialize;
use sterna_kernels::{HugeSlice, Kernels};

/// The memory that one pass reads; more than caches hold.
pub const PROBE_BYTES: usize = 1 << 30;

/// The approximate duration of one pass of multiplications.
const INT8_PASS: Duration = Duration::from_millis(30);
/// Rounds timed once, to choose how many rounds make a pass of `INT8_PASS`.
const TRIAL_ROUNDS: u64 = 20_000;

/// The limits of a number of threads at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct MachineLimits {
    /// Bytes read from memory.
    pub gigabytes_per_second: f64,
    /// Multiplications and additions of 8-bit integers.
    pub gigaops_per_second: f64,
}

impl MachineLimits {
    /// Returns the higher of both values for each limit.
    #[must_use]
    pub fn best(self, other: MachineLimits) -> MachineLimits {
        MachineLimits {
            gigabytes_per_second: self.gigabytes_per_second.max(other.gigabytes_per_second),
            gigaops_per_second: self.gigaops_per_second.max(other.gigaops_per_second),
        }
    }
}

/// Samples the machine's limits.
pub struct LimitsProbe {
    kernels: Kernels,
    threads: usize,
    cores: Vec<usize>, // One for each thread, or empty.
    memory: HugeSlice<u8>,
    passes: usize,
    rounds: u64,
}

impl LimitsProbe {
    /// Returns a probe for `threads` threads that read `bytes` in a pass. If there are as many
    /// cores, each thread is pinned to one. The calling thread must not be pinned.
    ///
    /// # Panics
    /// If `threads` is 0.
    pub fn new(kernels: Kernels, threads: usize, bytes: usize) -> LimitsProbe {
        assert!(threads > 0, "a probe needs a thread");
        let started = Instant::now();
        kernels.probe_int8(TRIAL_ROUNDS);
        let trial = started.elapsed().as_secs_f64().max(1e-9);
        let cores = cores::physical();
        let mut memory = HugeSlice::new(bytes); // Huge pages, as weights have.
        memory.fill(1); // The system would map all pages of zeros to one page.
        LimitsProbe {
            kernels,
            threads,
            cores: if cores.len() == threads {
                cores
            } else {
                Vec::new()
            },
            memory,
            passes: 5,
            rounds: (TRIAL_ROUNDS as f64 * INT8_PASS.as_secs_f64() / trial) as u64 + 1,
        }
    }

    /// Returns a probe for tests: it ends at once, and its values mean nothing.
    pub fn smoke(kernels: Kernels, threads: usize) -> LimitsProbe {
        LimitsProbe {
            passes: 1,
            rounds: 1000,
            ..LimitsProbe::new(kernels, threads, 1 << 16)
        }
    }

    /// Returns the number of bytes that a pass reads.
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Samples the limits: the best of several passes. Reading is tried with and without
    /// prefetching on 1, 2, 4, … and all threads, because a few threads may be faster than all.
    pub fn sample(&self) -> MachineLimits {
        let counts = (0..).map(|power| 1 << power);
        let counts = counts
            .take_while(|&threads| threads < self.threads)
            .chain([self.threads]);
        let read = counts.map(|threads| {
            let part = self.memory.len().div_ceil(threads);
            let read = |ahead: bool| {
                self.fastest(threads, |thread| {
                    let end = self.memory.len().min((thread + 1) * part);
                    self.kernels
                        .probe_read(&self.memory[end.min(thread * part)..end], ahead);
                })
            };
            read(true).min(read(false))
        });
        let read = read.min().expect("at least one count of threads");
        let multiplied = self.fastest(self.threads, |_| {
            self.kernels.probe_int8(self.rounds);
        });
        let operations = self.kernels.probe_int8(1) * self.rounds * self.threads as u64;
        MachineLimits {
            gigabytes_per_second: per_nanosecond(self.memory.len() as f64, read),
            gigaops_per_second: per_nanosecond(operations as f64, multiplied),
        }
    }

    /// Returns the duration of the shortest pass of `work(thread)` on `threads` threads at once.
    fn fastest(&self, threads: usize, work: impl Fn(usize) + Sync) -> Duration {
        let arrived = AtomicUsize::new(0);
        let meet = |meeting: usize| {
            arrived.fetch_add(1, Ordering::SeqCst);
            while arrived.load(Ordering::SeqCst) < meeting * threads {
                thread::yield_now();
            }
        };
        let passes = |thread: usize| {
            if let Some(core) = self.cores.get(thread) {
                cores::pin(*core);
            }
            let times = (0..self.passes).map(|pass| {
                meet(2 * pass + 1);
                let started = Instant::now();
                work(thread);
                meet(2 * pass + 2);
                started.elapsed()
            });
            times.min().expect("at least one pass")
        };
        thread::scope(|scope| {
            // The calling thread may be pinned to a core, so all threads are new.
            let passes = &passes;
            let threads: Vec<_> = (0..threads)
                .map(|thread| scope.spawn(move || passes(thread)))
                .collect();
            let times = threads
                .into_iter()
                .map(|thread| thread.join().expect("nothing panics"));
            // All threads timed the same passes. The longest time includes both ends.
            times.max().expect("at least one thread")
        })
    }
}

fn per_nanosecond(count: f64, time: Duration) -> f64 {
    count / time.as_nanos().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_kernels::Isa;

    #[test]
    fn every_instruction_set_has_limits() {
        for isa in Isa::available() {
            for threads in [1, 3] {
                let probe = LimitsProbe::smoke(Kernels::new(isa).unwrap(), threads);
                let limits = probe.sample();
                assert!(limits.gigabytes_per_second > 0.0, "{isa}");
                assert!(limits.gigaops_per_second > 0.0, "{isa}");
            }
        }
    }

    #[test]
    fn the_best_of_two_samples_has_the_better_of_each_limit() {
        let limits = |gigabytes_per_second, gigaops_per_second| MachineLimits {
            gigabytes_per_second,
            gigaops_per_second,
        };
        let best = limits(40.0, 1900.0).best(limits(35.0, 2000.0));
        assert_eq!(best, limits(40.0, 2000.0));
    }
}
