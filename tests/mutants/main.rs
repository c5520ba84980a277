//! Each mutant is a part of this workspace with one mistake, and the tests of that part must fail
//! on it.
//!
//! A test copies the sources, replaces a text in the copy, and runs the copy's tests with cargo.
//! The sources themselves contain nothing for it. A copy without a mistake must pass.
//!
//! All mutants take minutes, so `STERNA_MUTANTS` chooses: `all`, or the paths of changed files.
//! `.ci/run` passes the files that have changed since its last success, and `.ci/nightly` `all`.
//! Without the variable, the tests only check that each mutant can be made.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

mod copies;
mod scheduler;
mod text;
