//! Waiting for a moment that is near: look, and look again, then sleep until the bell is rung.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// How long a thread looks before it sleeps. Waking a sleeper takes 20 to 45 µs (two cores of a virtual machine), so this
/// long a wait costs at most twice what it would with foresight. Forward passes of the 2B shape, as shares of the least time
/// that two Zen 4 cores allow, two runs each: with 5 µs 0.82 and 0.77 (1 stream), 0.71 and 0.72 (16); with 50 µs 0.89 (and a
/// run whose memory was half as fast again, so not to be compared), 0.74 and 0.73; with 500 µs 0.89 and 0.89, 0.74 and 0.73.
/// A neighbour that has taken one worker's core costs the other's only this little of it.
pub(super) const SPIN: Duration = Duration::from_micros(50);

/// What a thread does between two looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// Nothing: its core has nobody else of this pool to run.
    Spin,
    /// Lets another thread have its core: perhaps the one that is waited for.
    Yield,
}

/// Wakes threads that wait for a condition.
#[derive(Default)]
pub(super) struct Bell {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    rung: Condvar,
}

impl Bell {
    /// Waits until `condition` holds. Whoever makes it true must do so with a sequentially consistent
    /// write and then ring.
    pub(super) fn wait_until(&self, patience: Patience, condition: impl Fn() -> bool) {
        let mut start = None;
        loop {
            match patience {
                Patience::Spin => {
                    for _ in 0..64 {
                        if condition() {
                            return;
                        }
                        std::hint::spin_loop();
                    }
                }
                Patience::Yield => {
                    if condition() {
                        return;
                    }
                    std::thread::yield_now();
                }
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

    /// Call it after the condition was made true.
    pub(super) fn ring(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock());
            self.rung.notify_all();
        }
    }
}
