//! loom's atomics and locks, with the interface that the pool uses.

use std::ops::Deref;
use std::time::Duration;

pub(super) use loom::hint::spin_loop;
pub(super) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
pub(super) use loom::thread::yield_now;

/// Orders the operations before it and after it for all threads. loom takes sequentially consistent
/// operations for acquiring and releasing ones.
pub(super) fn order_for_all() {
    loom::sync::atomic::fence(Ordering::SeqCst);
}

/// The number of checks before a thread sleeps. More of them only repeat each other.
pub(super) const CHECKS: usize = 1;

/// A clock on which all waiting has taken long enough, so that threads sleep soon.
#[derive(Clone, Copy)]
pub(super) struct Instant;

impl Instant {
    pub(super) fn now() -> Instant {
        Instant
    }

    pub(super) fn elapsed(&self) -> Duration {
        Duration::MAX
    }
}

/// A lock that cannot be poisoned, because a panic ends the test.
#[derive(Default)]
pub(super) struct Mutex<T>(loom::sync::Mutex<T>);

/// The guard of a [`Mutex`].
pub(super) struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

impl<T> Mutex<T> {
    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().expect("no thread panics")))
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("set except inside wait")
    }
}

/// Threads that wait for a notification.
#[derive(Default)]
pub(super) struct Condvar(loom::sync::Condvar);

impl Condvar {
    pub(super) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let inner = guard.0.take().expect("set except inside wait");
        guard.0 = Some(self.0.wait(inner).expect("no thread panics"));
    }

    pub(super) fn notify_all(&self) {
        self.0.notify_all();
    }
}
