//! The errors of a tenants file.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An error in a tenants file: where it is, what is wrong and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileError {
    path: PathBuf,
    line: Option<usize>,
    why: String,
}

impl FileError {
    /// Reports an error that concerns the whole file.
    pub(super) fn whole(path: &Path, why: impl Into<String>) -> FileError {
        FileError {
            path: path.to_owned(),
            line: None,
            why: why.into(),
        }
    }

    /// Reports a fault in the file with this text.
    pub(super) fn at(path: &Path, text: &str, fault: Fault) -> FileError {
        FileError {
            line: fault.at.map(|at| line(text, at.start)),
            ..FileError::whole(path, fault.why)
        }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FileError { path, line, why } = self;
        match line {
            Some(line) => write!(f, "{}, line {line}: {why}", path.display()),
            None => write!(f, "{}: {why}", path.display()),
        }
    }
}

impl std::error::Error for FileError {}

/// What is wrong with the text of a file, and the bytes that it concerns.
pub(super) struct Fault {
    pub(super) at: Option<Range<usize>>,
    pub(super) why: String,
}

/// Reports what is wrong with the bytes at `at`.
pub(super) fn fault(at: Range<usize>, why: impl Into<String>) -> Fault {
    Fault {
        at: Some(at),
        why: why.into(),
    }
}

/// Returns the line of a byte, counted from 1.
pub(super) fn line(text: &str, byte: usize) -> usize {
    let before = &text.as_bytes()[..byte.min(text.len())];
    1 + before.iter().filter(|byte| **byte == b'\n').count()
}
