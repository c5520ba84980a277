//! A limit on the processor time that `llguidance` takes for one mask.
//!
//! The budgets of the library do not count all of its work: it pushes the bytes that a grammar
//! forces without an end and without a cost. It asks a cancellation handle meanwhile, and another
//! thread sets the handle when the time is over.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use llguidance::{CancellationHandle, Matcher};
use rustix::time::{ClockId, clock_gettime};

/// The longest time for one mask. The budgets allow some 10 ms of work, so only work that they do
/// not count takes so long.
const MASK_TIME: Duration = Duration::from_millis(500);

/// Cancels the work that takes too long. The watch ends when this end is dropped.
pub(super) struct TimeLimit {
    shared: Arc<Watched>,
}

/// The end of the thread that watches.
pub(super) struct TimeWatch {
    shared: Arc<Watched>,
}

struct Watched {
    state: Mutex<WatchState>,
    changed: Condvar,
}

#[derive(Default)]
struct WatchState {
    running: Option<TimedMask>,
    is_parked: bool, // The watching thread waits without a deadline.
    has_ended: bool,
}

struct TimedMask {
    ends: Duration, // In processor time of the process.
    cancel: CancellationHandle,
}

impl TimeLimit {
    /// Returns both ends.
    pub(super) fn new() -> (TimeLimit, TimeWatch) {
        let shared = Arc::new(Watched {
            state: Mutex::new(WatchState::default()),
            changed: Condvar::new(),
        });
        let watch = TimeWatch {
            shared: Arc::clone(&shared),
        };
        (TimeLimit { shared }, watch)
    }

    /// Does one piece of work with a parser, which fails for good if it takes too long.
    ///
    /// # Errors
    /// If the work fails, or takes too long.
    pub(super) fn run<T>(
        &self,
        matcher: &mut Matcher,
        work: impl FnOnce(&mut Matcher) -> Result<T, String>,
    ) -> Result<T, String> {
        let cancel = matcher.cancellation_handle();
        self.begin(cancel.expect("parsers are cancellable"));
        let done = work(matcher);
        self.shared.state().running = None;
        match matcher.is_cancelled() {
            true => Err(over_time()),
            false => done,
        }
    }

    fn begin(&self, cancel: CancellationHandle) {
        let ends = processor_time() + MASK_TIME;
        let mut state = self.shared.state();
        state.running = Some(TimedMask { ends, cancel });
        // A thread that is not parked wakes before this work's time is over.
        if state.is_parked {
            state.is_parked = false;
            self.shared.changed.notify_one();
        }
    }
}

fn over_time() -> String {
    let limit = MASK_TIME.as_millis();
    format!("the tokens that may follow took longer than the limit of {limit} ms to compute")
}

impl Drop for TimeLimit {
    fn drop(&mut self) {
        self.shared.state().has_ended = true;
        self.shared.changed.notify_one();
    }
}

impl Watched {
    /// No method panics halfway through a change, so the state is right even if the lock is
    /// poisoned.
    fn state(&self) -> MutexGuard<'_, WatchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TimeWatch {
    /// Watches until the other end is dropped.
    pub(super) fn run(self) {
        let mut state = self.shared.state();
        while !state.has_ended {
            let left = state.running.as_ref().map(|running| {
                let left = running.ends.saturating_sub(processor_time());
                if left.is_zero() {
                    running.cancel.cancel();
                }
                left
            });
            state = match left {
                // Wall time passes at least as fast as the time of the one thread that works.
                Some(left) if !left.is_zero() => {
                    let woken = self.shared.changed.wait_timeout(state, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
                _ => {
                    state.is_parked = true;
                    let woken = self.shared.changed.wait(state);
                    woken.unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
    }
}

/// Returns the processor time of this process.
pub(super) fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
