//! The output of both subcommands: the report on stdout, and the progress on stderr.

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// Prints `report` as JSON, or `text` without `--json`.
pub(crate) fn print(json: bool, report: &impl Serialize, text: &str) {
    if json {
        let json = serde_json::to_string_pretty(report);
        println!("{}", json.expect("a report has only numbers and strings"));
    } else {
        print!("{text}");
    }
}

/// Creates a progress bar. It is visible only if stderr is a terminal.
pub(crate) fn progress_bar(requests: u64) -> ProgressBar {
    let style = "{prefix}{elapsed_precise} {bar:40} {pos}/{len} requests, {msg}";
    let style = ProgressStyle::with_template(style).expect("the template is well formed");
    ProgressBar::new(requests).with_style(style)
}
