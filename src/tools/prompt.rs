//! A conversation with tools, as the chat template reads it.
//!
//! A model whose template prints no tools reads them in its system message. One whose template
//! prints no calls reads them in the text of its messages, and their results in messages of the
//! user.

use serde_json::{Value, json};

use super::format::ToolFormat;
use super::printing::Printing;
use super::tool::{CalledTool, Tool, ToolChoice, Turn};
use crate::text::{Message, spaced_json};

impl ToolFormat {
    /// Returns the messages and the tools for the chat template. `choice` says how the tools may be
    /// called.
    pub fn conversation(
        &self,
        turns: Vec<Turn>,
        tools: &[Tool],
        choice: ToolChoice,
    ) -> (Vec<Message>, Vec<Value>) {
        let printing = self.printing((!tools.is_empty()).then_some(choice));
        let tools: Vec<Value> = tools.iter().map(Tool::to_json).collect();
        let mut messages = Vec::with_capacity(turns.len());
        for turn in turns {
            match turn {
                Turn::Said(message) => messages.push(message),
                Turn::Called(message, calls) => {
                    messages.push(self.called(message, &calls, printing));
                }
                Turn::Result(id, text) if printing.calls => messages.push(Message {
                    role: "tool".to_owned(),
                    content: text,
                    tool_call_id: Some(printing.id(&id)),
                    ..Message::default()
                }),
                Turn::Result(_, text) => add_result(&mut messages, &text),
            }
        }
        if printing.tools || tools.is_empty() {
            return (messages, tools);
        }
        describe(&mut messages, &tools);
        (messages, Vec::new())
    }

    fn called(&self, message: Message, calls: &[CalledTool], printing: Printing) -> Message {
        if printing.calls {
            let calls = calls.iter().map(|call| self.call_to_json(call, printing));
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
