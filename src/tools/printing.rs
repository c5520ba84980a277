//! What a chat template prints of tools, calls and their results.
//!
//! The words of a template do not say this: one may read `tools` and print nothing, or print calls
//! only if their arguments are a text. So the server renders a conversation with a call and looks
//! for it.

use serde_json::{Map, Value, json};

use crate::text::{ChatTemplate, Message, spaced_json};

/// A name, an argument and a result that no template has.
const TOOL: &str = "sterna_probe";
const ARGUMENT: &str = "sterna_argument";
const RESULT: &str = "sterna_result";
const ID: &str = "call_sterna_probe01";

/// The length of ids in templates that refuse others, such as Mistral's.
const SHORT_ID: usize = 9;

/// What a template prints, and in which form it reads calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Printing {
    /// Whether it prints the tools.
    pub(super) tools: bool,
    /// Whether it prints calls and results in earlier messages.
    pub(super) calls: bool,
    has_text_arguments: bool,
    has_short_ids: bool,
}

impl Printing {
    /// Finds out what a template prints of a conversation with or without tools.
    pub(super) fn find(template: &ChatTemplate, has_tools: bool) -> Printing {
        let tools: &[Value] = if has_tools { &[tool()] } else { &[] };
        let ways = [(false, false), (false, true), (true, false), (true, true)];
        let ways = ways.map(|(has_text_arguments, has_short_ids)| Printing {
            tools: false,
            calls: true,
            has_text_arguments,
            has_short_ids,
        });
        let prints_call = |way: &Printing| {
            let printed = template.render_with_tools(&way.conversation(), tools);
            printed.is_ok_and(|text| {
                [TOOL, ARGUMENT, RESULT]
                    .iter()
                    .all(|one| text.contains(one))
            })
        };
        let printing = ways.into_iter().find(prints_call).unwrap_or_default();
        let user = [message("user", "Hi")];
        let printed = template.render_with_tools(&user, tools);
        Printing {
            tools: printed.is_ok_and(|text| text.contains(TOOL)),
            ..printing
        }
    }

    /// Returns a user's question, a call and its result, as the template reads them.
    fn conversation(self) -> Vec<Message> {
        let arguments = Map::from_iter([(ARGUMENT.to_owned(), json!(1))]);
        let call = json!({"id": self.id(ID), "type": "function", "name": TOOL,
            "arguments": self.arguments(&arguments),
            "function": {"name": TOOL, "arguments": self.arguments(&arguments)}});
        vec![
            message("user", "Hi"),
            Message {
                tool_calls: vec![call],
                ..message("assistant", "")
            },
            Message {
                tool_call_id: Some(self.id(ID)),
                ..message("tool", RESULT)
            },
        ]
    }

    /// Returns the arguments of a call in the form that the template reads.
    pub(super) fn arguments(self, arguments: &Map<String, Value>) -> Value {
        let arguments = Value::Object(arguments.clone());
        match self.has_text_arguments {
            true => spaced_json(&arguments).into(),
            false => arguments,
        }
    }

    /// Returns the id of a call in the form that the template reads.
    pub(super) fn id(self, id: &str) -> String {
        if !self.has_short_ids {
            return id.to_owned();
        }
        let letters: Vec<char> = id.chars().filter(char::is_ascii_alphanumeric).collect();
        let start = letters.len().saturating_sub(SHORT_ID);
        let short: String = letters[start..].iter().collect();
        format!("{short:0>SHORT_ID$}")
    }
}

fn tool() -> Value {
    json!({"type": "function", "function": {
        "name": TOOL,
        "description": "Does it.",
        "parameters": {
            "type": "object",
            "properties": {ARGUMENT: {"type": "integer", "description": "A number."}},
            "required": [ARGUMENT],
        },
    }})
}

fn message(role: &str, content: &str) -> Message {
    Message {
        role: role.to_owned(),
        content: content.to_owned(),
        ..Message::default()
    }
}
