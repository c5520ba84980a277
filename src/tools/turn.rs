//! The messages of a conversation in which tools may be called.

use serde_json::{Map, Value};

use crate::text::Message;

/// A call in an earlier message of the assistant.
#[derive(Clone, Debug, PartialEq)]
pub struct CalledTool {
    /// The id that the result names.
    pub id: String,
    /// The name of the tool.
    pub name: String,
    /// The arguments.
    pub arguments: Map<String, Value>,
}

/// A message of a conversation in which tools may be called.
#[derive(Clone, Debug, PartialEq)]
pub enum Turn {
    /// A message without calls.
    Said(Message),
    /// A message of the assistant with calls.
    Called(Message, Vec<CalledTool>),
    /// The result of a call: its id, and the text.
    Result(String, String),
}
