//! Waiting for an event that is near: check repeatedly, then sleep until notified.

use std::time::Duration;

use super::sync::{
    AtomicUsize, CHECKS, Condvar, Instant, Mutex, Ordering, order_for_all, spin_loop, yield_now,
};

/// How long a thread checks before it sleeps.
///
/// Waking a sleeping thread takes 20 to 45 µs on a virtual machine, so a wait costs at most about
/// twice what it would cost with foresight. Longer checking was not faster.
pub(super) const SPIN: Duration = Duration::from_micros(50);

/// What a thread does between two checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BetweenChecks {
    /// Nothing: no other thread of the pool needs this core.
    Spin,
    /// Lets another thread run on this core, perhaps the one that is waited for.
    Yield,
}

/// Wakes threads that wait for a condition.
#[derive(Default)]
pub(super) struct WakeSignal {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    notified: Condvar,
}

impl WakeSignal {
    /// Waits until `condition` holds. The thread that makes it true must do so by a sequentially
    /// consistent write and then call [`WakeSignal::notify`].
    pub(super) fn wait_until(&self, between: BetweenChecks, condition: impl Fn() -> bool) {
        let mut start = None;
        loop {
            match between {
                BetweenChecks::Spin => {
                    for _ in 0..CHECKS {
                        if condition() {
                            return;
                        }
                        spin_loop();
                    }
                }
                BetweenChecks::Yield => {
                    if condition() {
                        return;
                    }
                    yield_now();
                }
            }
            if start.get_or_insert_with(Instant::now).elapsed() > SPIN {
                break;
            }
        }
        // This thread registers as a sleeper before its last check. `notify` looks for sleepers
        // after the condition was made true. So one of the two sees the other.
        let mut guard = self.lock.lock();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        order_for_all();
        while !condition() {
            self.notified.wait(&mut guard);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes the sleepers. Call it after the condition was made true.
    pub(super) fn notify(&self) {
        order_for_all();
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock());
            self.notified.notify_all();
        }
    }
}
