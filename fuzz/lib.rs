//! What the fuzz targets check. `README.md` says how to run them.

#[allow(
    dead_code,
    clippy::unwrap_used,
    reason = "the harness of the tests has more than the targets use"
)]
#[path = "../tests/harness/mod.rs"]
mod harness;

pub mod checks;
