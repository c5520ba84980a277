//! Why a checkpoint cannot be loaded.

use std::fmt;
use std::path::Path;

/// Why a checkpoint cannot be loaded. Each variant names what is wrong.
#[derive(Debug)]
pub enum LoadError {
    /// A file is missing, unreadable or malformed.
    File {
        /// Its path, or its name if it is not on disk.
        file: String,
        /// What is wrong with it.
        problem: String,
    },
    /// `config.json` is contradictory, or asks for something that this engine does not compute.
    Config {
        /// The field.
        field: String,
        /// What is wrong with its value.
        problem: String,
    },
    /// A tensor is missing, unknown, or at odds with the configuration.
    Tensor {
        /// The tensor.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl LoadError {
    pub(crate) fn file(path: &Path, problem: impl fmt::Display) -> LoadError {
        LoadError::named_file(&path.display().to_string(), problem)
    }

    pub(crate) fn named_file(name: &str, problem: impl fmt::Display) -> LoadError {
        LoadError::File {
            file: name.to_owned(),
            problem: problem.to_string(),
        }
    }

    pub(crate) fn config(field: &str, problem: impl fmt::Display) -> LoadError {
        LoadError::Config {
            field: field.to_owned(),
            problem: problem.to_string(),
        }
    }

    pub(crate) fn tensor(name: impl Into<String>, problem: impl fmt::Display) -> LoadError {
        LoadError::Tensor {
            name: name.into(),
            problem: problem.to_string(),
        }
    }

    pub(crate) fn missing_tensor(name: impl Into<String>) -> LoadError {
        LoadError::tensor(name, "missing in the files of the checkpoint")
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::File { file, problem } => write!(f, "{file}: {problem}"),
            LoadError::Config { field, problem } => write!(f, "config.json: {field}: {problem}"),
            LoadError::Tensor { name, problem } => write!(f, "tensor {name}: {problem}"),
        }
    }
}

impl std::error::Error for LoadError {}
