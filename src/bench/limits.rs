//! What the machine can do, measured: how fast it reads memory, and how fast it multiplies small integers.
//!
//! Memory that is shared with other machines is faster and slower by the minute, so a figure means something only beside limits that
//! were sampled within seconds of it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::cores;
use serde::Serialize;
use sterna_kernels::{HugeSlice, Kernels};

/// Memory read in a pass: more than caches hold.
pub const PROBE_BYTES: usize = 1 << 30;

/// How long a pass of the multiplier takes, about.
const INT8_PASS: Duration = Duration::from_millis(30);
/// Rounds that tell how long a pass of them takes.
const FEW_ROUNDS: u64 = 20_000;

/// The limits of some threads at some moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Limits {
    /// Bytes read from memory.
    pub gigabytes_per_second: f64,
    /// Multiplications and additions of 8-bit integers.
    pub gigaops_per_second: f64,
}

impl Limits {
    /// The better of both, each limit for itself.
    #[must_use]
    pub fn best(self, other: Limits) -> Limits {
        Limits {
            gigabytes_per_second: self.gigabytes_per_second.max(other.gigabytes_per_second),
            gigaops_per_second: self.gigaops_per_second.max(other.gigaops_per_second),
        }
    }
}

/// Samples the limits, again and again.
pub struct Probe {
    kernels: Kernels,
    threads: usize,
    cores: Vec<usize>, // One for each thread, or none.
    memory: HugeSlice<u8>,
    passes: usize,
    rounds: u64,
}

impl Probe {
    /// For `threads` threads that read `bytes` in a pass, each bound to a core if there are as many. It must be made by a thread that
    /// is bound to none itself.
    ///
    /// # Panics
    /// If there are no threads.
    #[must_use]
    pub fn new(kernels: Kernels, threads: usize, bytes: usize) -> Probe {
        assert!(threads > 0, "somebody measures");
        let started = Instant::now();
        kernels.probe_int8(FEW_ROUNDS);
        let few = started.elapsed().as_secs_f64().max(1e-9);
        let cores = cores::physical();
        let mut memory = HugeSlice::new(bytes); // As weights are kept.
        memory.fill(1); // Zeros would all be the same page.
        Probe {
            kernels,
            threads,
            cores: if cores.len() == threads {
                cores
            } else {
                Vec::new()
            },
            memory,
            passes: 5,
            rounds: (FEW_ROUNDS as f64 * INT8_PASS.as_secs_f64() / few) as u64 + 1,
        }
    }

    /// One that is over at once, and whose figures mean nothing: to see that everything runs.
    #[must_use]
    pub fn smoke(kernels: Kernels, threads: usize) -> Probe {
        Probe {
            passes: 1,
            rounds: 1000,
            ..Probe::new(kernels, threads, 1 << 16)
        }
    }

    /// Bytes read in a pass.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// The limits now: the best pass of several; of reading, plain and prefetching, on 1, 2, 4, … and all threads, for a few may be
    /// faster than all.
    #[must_use]
    pub fn sample(&self) -> Limits {
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
        Limits {
            gigabytes_per_second: per_nanosecond(self.memory.len() as f64, read),
            gigaops_per_second: per_nanosecond(operations as f64, multiplied),
        }
    }

    /// The shortest pass of `work(thread)` on so many threads at once.
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
            // The caller may be bound to a core, so all threads are new ones.
            let passes = &passes;
            let threads: Vec<_> = (0..threads)
                .map(|thread| scope.spawn(move || passes(thread)))
                .collect();
            let times = threads
                .into_iter()
                .map(|thread| thread.join().expect("nothing panics"));
            // Each saw the same passes; the longest view has seen both ends.
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
                let probe = Probe::smoke(Kernels::new(isa).unwrap(), threads);
                let limits = probe.sample();
                assert!(limits.gigabytes_per_second > 0.0, "{isa}");
                assert!(limits.gigaops_per_second > 0.0, "{isa}");
            }
        }
    }

    #[test]
    fn the_best_of_two_samples_has_the_better_of_each_limit() {
        let limits = |gigabytes_per_second, gigaops_per_second| Limits {
            gigabytes_per_second,
            gigaops_per_second,
        };
        let best = limits(40.0, 1900.0).best(limits(35.0, 2000.0));
        assert_eq!(best, limits(40.0, 2000.0));
    }
}
