//! Answers that follow a grammar: they always do, and nothing else changes.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

mod budgets;
#[path = "../harness/grammars.rs"]
mod grammars;
mod lab;
mod neighbours;
mod processes;
mod random_grammars;
mod rules;
