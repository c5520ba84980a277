//! The format of Falcon 3: a list of calls in one pair of tags.
//!
//! ```text
//! <tool_call>
//! [
//!   {"name": "get_weather", "arguments": {"city": "Paris"}},
//!   {"name": "get_weather", "arguments": {"city": "Bern"}}
//! ]
//! </tool_call>
//! ```

use super::frame::CallFrame;

pub(super) const FRAME: CallFrame = CallFrame {
    open: "<tool_call>",
    begin: "[",
    arguments: "arguments",
    separator: Some(","),
    end: "]",
    close: "</tool_call>",
    gap: "\n",
    between: "\n  ",
};

/// Returns whether a chat template shows this format: a list opens after the tag. The line break
/// between them can be escaped.
pub(super) fn is_in(template: &str) -> bool {
    ["<tool_call>\n[", "<tool_call>\\n["]
        .iter()
        .any(|list| template.contains(list))
}
