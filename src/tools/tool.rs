//! What a request says about its tools: which there are, and what was called before.

use serde_json::{Map, Value, json};

use crate::constraint::GrammarSource;
use crate::text::Message;

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Letters, digits and `_`, `-`, `.`.
    pub name: String,
    /// What the function does.
    pub description: Option<String>,
    /// The JSON schema of its arguments. Without one, it has no arguments.
    pub parameters: Option<Value>,
    /// The path of the field that holds the schema.
    pub path: String,
    /// Whether a keyword that a grammar cannot express is an error instead of ignored.
    pub is_strict: bool,
}

impl Tool {
    /// Returns the schema of the arguments as the compiler gets it, empty if there is none.
    pub(super) fn schema(&self) -> Map<String, Value> {
        match &self.parameters {
            Some(Value::Object(schema)) => GrammarSource::prepared(schema.clone(), !self.is_strict),
            _ => Map::new(),
        }
    }

    /// Returns the tool as templates read it.
    pub(super) fn to_json(&self) -> Value {
        let mut function = Map::new();
        function.insert("name".to_owned(), self.name.as_str().into());
        if let Some(description) = &self.description {
            function.insert("description".to_owned(), description.as_str().into());
        }
        let parameters = self.parameters.clone();
        let parameters = parameters.unwrap_or_else(|| json!({"type": "object", "properties": {}}));
        function.insert("parameters".to_owned(), parameters);
        json!({"type": "function", "function": function})
    }
}

/// Which tools the model has to call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// Any or none.
    Auto,
    /// At least one.
    Required,
    /// The one with this index, once.
    Named(usize),
}

/// The tools of a request, and how they may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolUse {
    /// At least one.
    pub tools: Vec<Tool>,
    /// Which of them the model has to call.
    pub choice: ToolChoice,
    /// Whether an answer may have several calls.
    pub is_parallel: bool,
}

impl ToolUse {
    /// Returns the tools that may be called, with their indices.
    pub(super) fn callable(&self) -> impl Iterator<Item = (usize, &Tool)> {
        let only = match self.choice {
            ToolChoice::Named(only) => Some(only),
            ToolChoice::Auto | ToolChoice::Required => None,
        };
        let tools = self.tools.iter().enumerate();
        tools.filter(move |(index, _)| only.is_none_or(|only| only == *index))
    }
}

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
