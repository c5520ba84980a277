//! How wide lines are.

use super::{root, text_files};

/// The most characters on a line.
const MAX_COLUMNS: usize = 100;

#[test]
fn lines_end_at_100_columns() {
    let mut wide = Vec::new();
    for file in text_files(&["rs", "py", "sh", "toml", "md", "js", "mjs", "css", "html"]) {
        let is_markdown = file.path.ends_with(".md");
        for (number, line) in file.text.lines().enumerate() {
            // A table's row and a link cannot be wrapped.
            let may_be_wide = line.contains("://") || (is_markdown && line.starts_with('|'));
            if !may_be_wide && line.chars().count() > MAX_COLUMNS {
                wide.push(format!("{}:{}", file.path, number + 1));
            }
        }
    }
    assert!(
        wide.is_empty(),
        "{} lines are wider than {MAX_COLUMNS} columns:\n{}",
        wide.len(),
        wide.join("\n")
    );
}

#[test]
fn the_walk_finds_files_of_every_kind() {
    let files: Vec<String> = text_files(&["rs", "py", "sh", "toml", "md"])
        .map(|file| file.path)
        .collect();
    for expected in [
        "src/main.rs",
        "README.md",
        "Cargo.toml",
        "benches/peer/run.sh",
    ] {
        assert!(files.iter().any(|path| path == expected), "{expected}");
    }
    assert!(root().join("tests/make_fixtures.py").exists());
}
