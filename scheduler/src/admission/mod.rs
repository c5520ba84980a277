//! What happens to a request before it runs: `submit` accepts or rejects it, `admit` starts it.

mod admit;
mod load;
mod room;
mod submit;

pub(crate) use admit::Admission;
pub(crate) use submit::{places_for, submit, submit_prompts};
