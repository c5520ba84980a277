//! What the fuzz targets check. `README.md` says how to run them.

#[allow(
    dead_code,
    clippy::unwrap_used,
    reason = "the harness of the tests has more than the targets use"
)]
#[path = "../tests/harness/mod.rs"]
mod harness;

pub mod checks;

/// Becomes the process that workers of grammars are forked from, if the server in another process
/// of this program has started this one for it.
pub fn run_template_if_asked() {
    if std::env::args().any(|argument| argument == sterna::constraint::COMMAND) {
        let is_done = sterna::constraint::run_template().is_ok();
        std::process::exit(i32::from(!is_done));
    }
}
