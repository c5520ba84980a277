//! A conversation with tools, as the chat template reads it.
//!
//! A model whose template has no tools reads them in its system message, its own calls in the text
//! of its messages, and their results in messages of the user.

use serde_json::{Value, json};

use super::format::ToolFormat;
use super::tool::{CalledTool, Tool, Turn};
use crate::text::{Message, spaced_json};

impl ToolFormat {
    /// Returns the messages and the tools for the chat template.
    pub fn conversation(&self, turns: Vec<Turn>, tools: &[Tool]) -> (Vec<Message>, Vec<Value>) {
        let tools: Vec<Value> = tools.iter().map(Tool::to_json).collect();
        let mut messages = Vec::with_capacity(turns.len());
        for turn in turns {
            match turn {
                Turn::Said(message) => messages.push(message),
                Turn::Called(message, calls) => messages.push(self.called(message, &calls)),
                Turn::Result(id, text) if self.is_in_template() => messages.push(Message {
                    role: "tool".to_owned(),
                    content: text,
                    tool_call_id: Some(id),
                    ..Message::default()
                }),
                Turn::Result(_, text) => add_result(&mut messages, &text),
            }
        }
        if self.is_in_template() || tools.is_empty() {
            return (messages, tools);
        }
        describe(&mut messages, &tools);
        (messages, Vec::new())
    }

    fn called(&self, message: Message, calls: &[CalledTool]) -> Message {
        if self.is_in_template() {
            let calls = calls.iter().map(|call| self.call_to_json(call));
            return Message {
                tool_calls: calls.collect(),
                ..message
            };
        }
        let mut content = message.content;
        for call in calls {
            let json = json!({"name": call.name, "arguments": call.arguments});
            if !content.is_empty() {
                content.push('\n');
            }
            content += &format!("<tool_call>\n{}\n</tool_call>", spaced_json(&json));
        }
        Message { content, ..message }
    }
}

/// Adds a result to the message of results at the end, or begins one.
fn add_result(messages: &mut Vec<Message>, text: &str) {
    let result = format!("{RESULT}\n{text}\n</tool_response>");
    match messages.last_mut() {
        Some(last) if last.role == "user" && last.content.starts_with(RESULT) => {
            last.content.push('\n');
            last.content += &result;
        }
        _ => messages.push(Message {
            role: "user".to_owned(),
            content: result,
            ..Message::default()
        }),
    }
}

const RESULT: &str = "<tool_response>";

/// Describes the tools in the system message.
fn describe(messages: &mut Vec<Message>, tools: &[Value]) {
    let tools: Vec<String> = tools.iter().map(spaced_json).collect();
    let text = format!(
        "# Tools\n\n\
         You may call functions to answer the user. Each line in <tools></tools> describes one:\n\
         <tools>\n{}\n</tools>\n\n\
         To call a function, write its name and arguments as JSON in <tool_call></tool_call>:\n\
         <tool_call>\n\
         {{\"name\": \"function name\", \"arguments\": {{\"argument name\": \"value\"}}}}\n\
         </tool_call>",
        tools.join("\n")
    );
    match messages.first_mut() {
        Some(first) if first.role == "system" => {
            first.content += "\n\n";
            first.content += &text;
        }
        _ => messages.insert(
            0,
            Message {
                role: "system".to_owned(),
                content: text,
                ..Message::default()
            },
        ),
    }
}
