//! Each mutant is a part of this workspace with one mistake, and the tests of that part must fail
//! on it.
//!
//! A test copies the sources, replaces a text in the copy, and runs the copy's tests with cargo.
//! The sources themselves contain nothing for it. A copy without a mistake must pass.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

mod copies;
mod scheduler;
mod text;
