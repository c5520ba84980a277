//! What stands around calls in an answer.

use crate::text::ReasoningTags;

/// What stands around calls. White space between the parts does not matter to the parser.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CallFrame {
    /// The tag before the first call. Without one, a call stands at the beginning of the answer.
    pub(super) open: &'static str,
    /// What stands between the tag and the first call.
    pub(super) begin: &'static str,
    /// The key of a call's arguments.
    pub(super) arguments: &'static str,
    /// What stands between two calls. Without it, each call has tags of its own.
    pub(super) separator: Option<&'static str>,
    /// What stands between the last call and the closing tag.
    pub(super) end: &'static str,
    /// The tag after the last call.
    pub(super) close: &'static str,
    /// The white space inside of the tags.
    pub(super) gap: &'static str,
    /// The white space before a call that follows another, and before the first of a list.
    pub(super) between: &'static str,
}

/// The tokens of tags. A tag without one is ordinary text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TagTokens {
    pub(super) open: Option<u32>,
    pub(super) close: Option<u32>,
    pub(super) python: Option<u32>,
    pub(super) reasoning: Option<ReasoningTags>,
}
