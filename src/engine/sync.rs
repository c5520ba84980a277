//! The threads, locks, atomics and channels of the engine. `tests/interleavings` replaces them by
//! shuttle's.

pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
pub(super) use std::sync::{Mutex, MutexGuard, OnceLock, mpsc};
pub(super) use std::thread;

pub(super) use crossbeam::channel;
pub(super) use tokio::sync::mpsc as events;
