//! Checks that `loadtest/README.md` lists every flag and every workload.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::fs;
use std::path::Path;
use std::process::Command;

/// Returns what the program prints.
fn output(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_sterna-loadtest"))
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn readme() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    fs::read_to_string(path).unwrap()
}

#[test]
fn the_readme_lists_every_flag() {
    let readme = readme();
    for subcommand in ["drive", "sweep", "compare", "simulate"] {
        let help = output(&[subcommand, "--help"]);
        let flags: Vec<&str> = help
            .split_whitespace()
            .filter(|word| word.starts_with("--"))
            .map(|word| word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()))
            .filter(|flag| !["--help", "--version", "--list"].contains(flag))
            .collect();
        assert!(flags.len() > 10, "{help}");
        for flag in flags {
            let listed = readme
                .lines()
                .any(|line| line.starts_with('|') && line.contains(&format!("`{flag}")));
            assert!(listed, "README.md does not list {subcommand} {flag}");
        }
    }
}

#[test]
fn the_readme_lists_every_workload_with_its_load() {
    let readme = readme();
    for line in output(&["simulate", "--list"]).lines() {
        let (head, _) = line.split_once(": ").unwrap();
        let (name, load) = head.split_once(" load ").unwrap();
        let row = format!("| `{}` | {} | ", name.trim(), load.trim());
        assert!(readme.contains(&row), "README.md has no row {row}");
    }
}
