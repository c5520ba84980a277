//! Checks concurrent code of the engine in many orders of its operations.
//!
//! loom (Norris and Demsky, 2013) runs each test once for each order that the memory model allows.
//! It checks how the pool hands jobs to its workers: the pool's files are compiled here with loom's
//! atomics and locks. `LOOM_MAX_PREEMPTIONS=4 cargo test -p sterna-interleavings --release` tries
//! more orders than the short form in `cargo test`.
//!
//! shuttle runs each test with random schedules of its threads. It checks the life of a request,
//! from its submission to its end: the files of `src/engine` are compiled here with shuttle's
//! threads, atomics, locks and channels, and `tests/requests.rs` uses them.
//! `STERNA_SCHEDULES=250000 cargo test -p sterna-interleavings --test requests` runs more
//! schedules. `STERNA_SEED` repeats a run.

#[cfg(not(test))]
pub mod engine;
#[cfg(not(test))]
#[path = "../../../src/fault.rs"]
pub mod fault;
#[cfg(test)]
#[path = "../../../src/model/pool/handoff.rs"]
mod handoff;
#[cfg(test)]
mod sync;
#[cfg(test)]
mod tests;
#[cfg(test)]
#[path = "../../../src/model/pool/wake.rs"]
mod wake;

// What the engine uses and no schedule of threads changes.
#[cfg(not(test))]
pub use sterna::{checkpoint, constraint, cores, metrics, model};
