//! Named situations as small tables: the actions, the rows of the next step, and the events.
//!
//! `table.rs` explains the form.

mod admission;
mod endings;
mod forced;
mod full_memory;
mod prefixes;
mod shares;
mod states;
mod steps;
mod table;
