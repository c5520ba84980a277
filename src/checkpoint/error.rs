//! Why a checkpoint cannot be loaded.

use std::fmt;

/// Why a checkpoint cannot be loaded. The message names the file, the field of `config.json` or
/// the tensor, and what is wrong with it.
#[derive(Debug)]
pub struct LoadError(String);

/// What loading a part of a checkpoint returns.
pub(crate) type LoadResult<T> = Result<T, LoadError>;

impl LoadError {
    /// A file is missing, unreadable or malformed. `file` is its path, or its name if it is not on
    /// disk.
    pub(crate) fn file(file: impl fmt::Display, problem: impl fmt::Display) -> LoadError {
        LoadError(format!("{file}: {problem}"))
    }

    /// `config.json` is contradictory, or asks for something that this engine does not compute.
    pub(crate) fn config(field: &str, problem: impl fmt::Display) -> LoadError {
        LoadError(format!("config.json: {field}: {problem}"))
    }

    /// A tensor is missing, unknown, or at odds with the configuration.
    pub(crate) fn tensor(name: &str, problem: impl fmt::Display) -> LoadError {
        LoadError(format!("tensor {name}: {problem}"))
    }

    pub(crate) fn missing_tensor(name: &str) -> LoadError {
        LoadError::tensor(name, "missing in the files of the checkpoint")
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for LoadError {}

/// # Errors
/// Unless `holds`: a [`LoadError::config`].
pub(crate) fn require(holds: bool, field: &str, problem: impl fmt::Display) -> LoadResult<()> {
    holds
        .then_some(())
        .ok_or_else(|| LoadError::config(field, problem))
}
