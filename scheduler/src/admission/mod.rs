//! What happens to a request before it runs: `submit` accepts or rejects it, `admit` starts it.

mod admit;
mod submit;

#[cfg(debug_assertions)]
pub(crate) use admit::LONG_PATIENCE;
pub(crate) use submit::Deadline;
