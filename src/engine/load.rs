//! The engine's load in numbers, which every thread can read without waiting.
//!
//! The engine thread writes most of it in each turn. The egress thread writes the service time and
//! the throughput.

use std::time::{Duration, Instant};

use sterna_scheduler::{Limits, Micros, PAGE_TOKENS, Snapshot};

use super::clock::{Clock, micros};
use super::sync::{AtomicU32, AtomicU64, Ordering};

/// The throughput is measured over at least so much time.
const WINDOW: Duration = Duration::from_secs(1);
/// A throughput counts until this many times its window has passed again.
const WINDOWS_VALID: u32 = 3;
const MIN_RETRY: Micros = 1_000_000;
const MAX_RETRY: Micros = 120_000_000;

/// A reading of the engine's load, as sums over all tenants. Its numbers are of the last turn of
/// the engine thread, or some of the one before.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Sequences that hold pages.
    pub running: u32,
    /// Sequences that wait.
    pub queued: u32,
    /// The known tokens of the sequences that wait. Some may be in the prefix cache.
    pub queued_tokens: u64,
    /// Tokens in pages that running sequences use, unused places included.
    pub used_tokens: u64,
    /// Prompt tokens looked up in the prefix cache since the start.
    pub prefix_queries: u64,
    /// Prompt tokens found in the prefix cache since the start.
    pub prefix_hits: u64,
    /// Generated tokens in each second, lately.
    pub tokens_per_second: f64,
    /// What the scheduler may do at most.
    pub limits: Limits,
}

impl Load {
    /// Returns the number of tokens for which there are pages.
    pub fn total_tokens(&self) -> u64 {
        u64::from(self.limits.pages) * PAGE_TOKENS as u64
    }
}

/// The load, as threads share it.
pub(super) struct LoadCells {
    limits: Limits,
    running: AtomicU32,
    queued: AtomicU32,
    queued_tokens: AtomicU64,
    used_pages: AtomicU64,
    prefix_queries: AtomicU64,
    prefix_hits: AtomicU64,
    service_micros: AtomicU64, // From admission to the end of a request, a moving average.
    milli_rate: AtomicU64,     // Generated tokens in 1,000 seconds.
    rate_until: AtomicU64,     // When that no longer counts.
}

impl LoadCells {
    pub(super) fn new(limits: Limits) -> LoadCells {
        LoadCells {
            limits,
            running: AtomicU32::new(0),
            queued: AtomicU32::new(0),
            queued_tokens: AtomicU64::new(0),
            used_pages: AtomicU64::new(0),
            prefix_queries: AtomicU64::new(0),
            prefix_hits: AtomicU64::new(0),
            service_micros: AtomicU64::new(0),
            milli_rate: AtomicU64::new(0),
            rate_until: AtomicU64::new(0),
        }
    }

    /// Notes the state at the end of a turn.
    pub(super) fn publish(&self, now: &Snapshot) {
        let set = |cell: &AtomicU64, value| cell.store(value, Ordering::Relaxed);
        self.running.store(now.running as u32, Ordering::Relaxed);
        self.queued.store(now.queued as u32, Ordering::Relaxed);
        set(&self.queued_tokens, now.queued_tokens);
        set(&self.used_pages, (now.private + now.pinned) as u64);
        set(&self.prefix_queries, now.prefix_queries);
        set(&self.prefix_hits, now.prefix_hits);
    }

    pub(super) fn running(&self) -> u32 {
        self.running.load(Ordering::Relaxed)
    }

    pub(super) fn queued(&self) -> u32 {
        self.queued.load(Ordering::Relaxed)
    }

    pub(super) fn read(&self, clock: Clock) -> Load {
        let get = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        let is_recent = clock.micros(Instant::now()) < get(&self.rate_until);
        let milli_rate = if is_recent { get(&self.milli_rate) } else { 0 };
        Load {
            running: self.running(),
            queued: self.queued(),
            queued_tokens: get(&self.queued_tokens),
            used_tokens: get(&self.used_pages) * PAGE_TOKENS as u64,
            prefix_queries: get(&self.prefix_queries),
            prefix_hits: get(&self.prefix_hits),
            tokens_per_second: milli_rate as f64 / 1000.0,
            limits: self.limits.clone(),
        }
    }

    /// Notes that a request took `service` from its admission to its end.
    pub(super) fn served(&self, service: Duration) {
        let latest = service.as_micros() as u64;
        let mean = self.service_micros.load(Ordering::Relaxed);
        let mean = if mean == 0 {
            latest
        } else {
            mean - mean / 8 + latest / 8
        };
        self.service_micros.store(mean, Ordering::Relaxed);
    }

    /// Returns about how long a new request would wait. Assumes that a waiting request starts
    /// whenever a running one ends.
    pub(super) fn retry_after(&self) -> Micros {
        let running = u64::from(self.running()).max(1);
        let queued = u64::from(self.queued()) + 1;
        let service = self.service_micros.load(Ordering::Relaxed);
        (service.saturating_mul(queued) / running).clamp(MIN_RETRY, MAX_RETRY)
    }
}

/// Counts generated tokens, on the egress thread.
pub(super) struct TokenRate {
    began: Instant,
    tokens: u64,
}

impl TokenRate {
    pub(super) fn new(at: Instant) -> TokenRate {
        TokenRate {
            began: at,
            tokens: 0,
        }
    }

    /// Adds the tokens that were drawn `at` a time. Publishes the rate of a full window.
    pub(super) fn add(&mut self, tokens: usize, at: Instant, cells: &LoadCells, clock: Clock) {
        self.tokens += tokens as u64;
        let window = at.saturating_duration_since(self.began);
        if window < WINDOW {
            return;
        }
        let rate = self.tokens as f64 / window.as_secs_f64();
        let valid = micros(window.saturating_mul(WINDOWS_VALID));
        let until = clock.micros(at).saturating_add(valid);
        cells
            .milli_rate
            .store((rate * 1000.0) as u64, Ordering::Relaxed);
        cells.rate_until.store(until, Ordering::Relaxed);
        *self = TokenRate::new(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells() -> LoadCells {
        LoadCells::new(Limits {
            pages: 8,
            max_running: 1,
            max_queued: 1,
            max_queued_time: u64::MAX,
            step_tokens: 16,
            prefill_chunk: 16,
            max_sequence_tokens: 16,
            states: None,
            diffusion: None,
        })
    }

    #[test]
    fn the_throughput_is_that_of_a_second_and_ends_with_the_work() {
        let (cells, clock, began) = (cells(), Clock::start(), Instant::now());
        let mut rate = TokenRate::new(began);
        rate.add(30, began + WINDOW / 2, &cells, clock);
        assert_eq!(cells.read(clock).tokens_per_second, 0.0);
        rate.add(30, began + WINDOW * 2, &cells, clock);
        assert_eq!(cells.read(clock).tokens_per_second, 30.0);
        cells.rate_until.store(0, Ordering::Relaxed);
        assert_eq!(cells.read(clock).tokens_per_second, 0.0);
    }

    #[test]
    fn pages_in_use_count_with_all_their_tokens() {
        let cells = cells();
        cells.publish(&Snapshot {
            private: 2,
            pinned: 1,
            tree: 3,
            free: 2,
            queued_tokens: 5,
            ..Snapshot::default()
        });
        let load = cells.read(Clock::start());
        assert_eq!((load.used_tokens, load.total_tokens()), (48, 128));
        assert_eq!(load.queued_tokens, 5);
    }
}
