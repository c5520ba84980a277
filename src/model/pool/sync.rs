//! The atomics and locks of the handoff. `tests/interleavings` uses loom's instead.

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
pub(super) use std::thread::yield_now;
pub(super) use std::time::Instant;

pub(super) use parking_lot::{Condvar, Mutex};

/// Nothing, because sequentially consistent operations have one order that all threads see. loom
/// lacks that order and needs a fence in its place.
#[inline(always)]
pub(super) fn order_for_all() {}

/// The number of checks between two looks at the clock.
pub(super) const CHECKS: usize = 64;
