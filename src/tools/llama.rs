//! The format of Llama 3: the answer is a call, without tags.
//!
//! ```text
//! {"name": "get_weather", "parameters": {"city": "Paris"}}
//! ```
//!
//! Several calls have `; ` between them. The token `<|python_tag|>` may stand before the first.

use super::frame::CallFrame;

/// The token that may stand before the first call.
pub(super) const PYTHON_TAG: &str = "<|python_tag|>";

pub(super) const FRAME: CallFrame = CallFrame {
    open: "",
    begin: "",
    arguments: "parameters",
    separator: Some(";"),
    end: "",
    close: "",
    gap: "",
    between: " ",
};

/// Returns whether a chat template shows this format.
pub(super) fn is_in(template: &str) -> bool {
    template.contains("\"parameters\": ") && template.contains("\"name\": ")
}
