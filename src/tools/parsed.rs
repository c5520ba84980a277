//! The parts of an answer that may call tools, and how a parser looks for them.

/// The longest beginning of a call: its tags, its name and white space.
pub(super) const MAX_HEAD_BYTES: usize = 512;

/// What a piece of an answer says about a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallDelta {
    /// A call of the tool with this name begins.
    Begins(String),
    /// The next part of the arguments of the last call.
    Arguments(String),
}

/// A piece of an answer, split.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParsedText {
    /// The text that is no call. It stands before the calls.
    pub text: String,
    /// The calls.
    pub calls: Vec<CallDelta>,
}

/// How a text begins with other texts, with white space before each.
pub(super) enum Beginning {
    /// The text begins with the others, in this many bytes.
    Whole(usize),
    /// The text may begin with the others, if more follows.
    Partial,
    No,
}

/// Matches the beginning of `text` with `pieces`, with any white space before each.
pub(super) fn begins_with(text: &str, pieces: &[&str]) -> Beginning {
    let mut rest = text;
    for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
        rest = rest.trim_start();
        match rest.strip_prefix(piece) {
            Some(after) => rest = after,
            None if piece.starts_with(rest) => return Beginning::Partial,
            None => return Beginning::No,
        }
    }
    Beginning::Whole(text.len() - rest.len())
}

/// Moves the text before the tag `open` to `text`. White space before the tag is a part of the
/// call. Returns whether the tag is there. What may become the tag stays.
pub(super) fn take_text(held: &mut String, open: &str, text: &mut String) -> bool {
    let (end, is_found) = match held.find(open) {
        Some(start) => (start, true),
        None => (held.len() - beginning_at_end(held, open), false),
    };
    let end = held[..end].trim_end().len();
    text.push_str(&held[..end]);
    // The tag stays: if this is no call, all of it is text.
    held.drain(..end);
    is_found
}

/// Returns the length of the longest end of `text` that is the beginning of `tag`.
pub(super) fn beginning_at_end(text: &str, tag: &str) -> usize {
    let mut lengths = (1..tag.len()).rev();
    let is_beginning = |length: &usize| text.ends_with(&tag[..*length]);
    lengths.find(is_beginning).unwrap_or(0)
}

/// Moves white space and the first character after it to `text`, because they begin no call.
pub(super) fn give_up_first(held: &mut String, text: &mut String) {
    let space = held.len() - held.trim_start().len();
    let first = held[space..].chars().next().map_or(0, char::len_utf8);
    text.extend(held.drain(..space + first));
}
