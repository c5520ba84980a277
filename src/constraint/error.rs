//! Why a request gets no grammar.

use std::fmt;
use std::time::Duration;

/// How long a request waits for its grammar once the compilation has begun.
pub(super) const MAX_COMPILE: Duration = Duration::from_secs(5);

/// Why a request gets no grammar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrammarError {
    /// The grammar cannot be compiled, for this reason.
    Invalid(String),
    /// The grammar has exceeded this limit, in its compilation or in an answer.
    TooCostly(String),
    /// The grammar takes too long to compile.
    TooSlow,
    /// Too many other grammars wait to be compiled.
    Busy,
    /// The system gives no process for grammars, for this reason.
    NoProcess(String),
}

impl fmt::Display for GrammarError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GrammarError::Invalid(why) => write!(f, "cannot be compiled: {why}"),
            GrammarError::TooCostly(limit) => write!(f, "is too costly: {limit}; simplify it"),
            GrammarError::TooSlow => {
                let seconds = MAX_COMPILE.as_secs();
                write!(
                    f,
                    "takes more than {seconds} seconds to compile; simplify it"
                )
            }
            GrammarError::Busy => f.write_str("waits behind too many others; try again later"),
            GrammarError::NoProcess(why) => {
                write!(f, "needs a process, which the server does not have: {why}")
            }
        }
    }
}
