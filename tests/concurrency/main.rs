//! What concurrency must not change: each answer equals the answer to the request alone, no tenant
//! learns of another, every page comes back, and a stream says the same as a whole answer.
//!
//! `cargo test` runs the short forms. An environment variable sets the length of each long form;
//! `tests/README.md` lists them.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot unwrap a value has failed"
)]

mod cache_audit;
mod canaries;
mod cancel;
#[path = "../harness/client.rs"]
mod client;
#[path = "../harness/grammars.rs"]
mod grammars;
mod model;
mod requests;
mod resets;
mod server;
mod streams;
mod traces;

use std::time::Duration;

/// A time limit that only a hanging request reaches.
const PATIENCE: Duration = Duration::from_secs(120);

/// Returns the number that the environment variable `name` sets, or `short`, the number of the
/// short form.
fn effort(name: &str, short: u64) -> u64 {
    let set = std::env::var(name).ok();
    set.map_or(short, |number| number.parse().expect("a whole number"))
}
