//! Checks how the pool hands jobs to its workers, in every order of the atomic operations.
//!
//! loom (Norris and Demsky, 2013) runs each test once for each order that the memory model allows.
//! The files of the pool are compiled here with loom's atomics and locks.
//! `LOOM_MAX_PREEMPTIONS=4 cargo test -p sterna-interleavings --release` tries more orders than the
//! short form in `cargo test`.

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
