//! The format of Hermes and Qwen: each call in tags of its own.
//!
//! ```text
//! <tool_call>
//! {"name": "get_weather", "arguments": {"city": "Paris"}}
//! </tool_call>
//! ```
//!
//! Models whose template has no tools are told to write calls in this format too.

use super::frame::CallFrame;

pub(super) const FRAME: CallFrame = CallFrame {
    open: "<tool_call>",
    begin: "",
    arguments: "arguments",
    separator: None,
    end: "",
    close: "</tool_call>",
    gap: "\n",
    between: "\n",
};

/// Returns whether a chat template shows this format. Falcon's has the same tags.
pub(super) fn is_in(template: &str) -> bool {
    template.contains("<tool_call>") && template.contains("\"arguments\\\"")
        || template.contains("<tool_call>") && template.contains("\"arguments\"")
}
