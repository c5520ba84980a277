//! Why a checkpoint cannot be loaded.

use std::fmt;

/// Why a checkpoint cannot be loaded. The message names the file, the field of `config.json` or
/// the tensor, and what is wrong with it.
#[derive(Debug)]
pub struct LoadError {
    /// The field of `config.json`, if the message is about one, or else the file or the tensor.
    subject: ErrorSubject,
    problem: String,
}

#[derive(Debug)]
enum ErrorSubject {
    Field(String),
    Other(String),
}

/// What loading a part of a checkpoint returns.
pub(crate) type LoadResult<T> = Result<T, LoadError>;

impl LoadError {
    /// A file is missing, unreadable or malformed. `file` is its path, or its name if it is not on
    /// disk.
    pub(crate) fn file(file: impl fmt::Display, problem: impl fmt::Display) -> LoadError {
        LoadError::new(ErrorSubject::Other(file.to_string()), problem)
    }

    /// `config.json` is contradictory, or asks for something that this engine does not compute.
    pub(crate) fn config(field: &str, problem: impl fmt::Display) -> LoadError {
        LoadError::new(ErrorSubject::Field(field.to_owned()), problem)
    }

    /// A tensor is missing, unknown, or at odds with the configuration.
    pub(crate) fn tensor(name: &str, problem: impl fmt::Display) -> LoadError {
        LoadError::new(ErrorSubject::Other(format!("tensor {name}")), problem)
    }

    fn new(subject: ErrorSubject, problem: impl fmt::Display) -> LoadError {
        let problem = problem.to_string();
        LoadError { subject, problem }
    }

    /// Returns the field of `config.json` that the error is about, if it is about one, and the
    /// problem.
    pub(super) fn field(&self) -> Option<(&str, &str)> {
        match &self.subject {
            ErrorSubject::Field(field) => Some((field, &self.problem)),
            ErrorSubject::Other(_) => None,
        }
    }

    pub(crate) fn missing_tensor(name: &str) -> LoadError {
        LoadError::tensor(name, "missing in the files of the checkpoint")
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let problem = &self.problem;
        match &self.subject {
            ErrorSubject::Field(field) => write!(f, "config.json: {field}: {problem}"),
            ErrorSubject::Other(place) => write!(f, "{place}: {problem}"),
        }
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
