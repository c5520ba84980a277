//! Tools: how a model is told which functions it may call, and how its calls are read.
//!
//! Each family of models writes calls in a format of its own, which the chat template shows
//! (`format.rs`, `frame.rs`). A request's tools become a part of the prompt
//! (`prompt.rs`), a grammar of the calls (`grammar.rs`) and a parser of the answer (`parser.rs`).
//!
//! Invariant: once an answer has begun a call, the grammar makes the rest of the call follow the
//! schema of its tool.
//!
//! Invariant: the parser and the grammar begin a call at the same place of an answer.

mod format;
mod frame;
mod grammar;
mod json_parser;
mod parsed;
mod parser;
mod printing;
mod prompt;
#[cfg(test)]
mod tests;
mod tool;
mod xml_arguments;
mod xml_parser;

pub use format::{CallFormat, ToolFormat};
pub use parsed::{CallDelta, ParsedText};
pub use parser::CallParser;
pub use tool::{CalledTool, Tool, ToolChoice, ToolUse, Turn};
