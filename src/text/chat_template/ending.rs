//! Where the prompt of a conversation ends.

/// Where the prompt of a conversation ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConversationEnd {
    /// Where the assistant's next message begins.
    #[default]
    NextMessage,
    /// After the final message, without the beginning of a next one.
    LastMessage,
    /// Inside of the final message, after its text. The model continues that text.
    Continued,
}

impl ConversationEnd {
    /// Returns whether the template should write the beginning of the assistant's next message.
    pub(super) fn opens_next_message(self) -> bool {
        self == ConversationEnd::NextMessage
    }

    /// Cuts what a template wrote behind the text `last` of a message that is to be continued.
    /// Returns `None` if the template did not write that text.
    ///
    /// As in `transformers`, spaces at the end of the text stay if the template wrote them.
    pub(super) fn cut(self, mut rendered: String, last: &str) -> Option<String> {
        if self != ConversationEnd::Continued {
            return Some(rendered);
        }
        let text = last.trim();
        if text.is_empty() {
            return None;
        }
        let start = rendered.rfind(text)?;
        let whole = last.trim_start();
        let kept = if rendered[start..].starts_with(whole) {
            whole
        } else {
            text
        };
        rendered.truncate(start + kept.len());
        Some(rendered)
    }
}
