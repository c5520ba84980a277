//! Says which tokens are control tokens, and finds them in a text.
//!
//! A control token gives a prompt its structure, so no text of a user may become one. These are the
//! tokens that the checkpoint calls special, and added tokens that look or act like them. Other
//! added tokens, such as runs of spaces, `<table>` or words, are ordinary text. A word that a
//! template writes, such as `User:`, is ordinary text too, because users also write it, and it has
//! no other token.
//!
//! A model's configuration names tokens that begin and end a text. They are control tokens too if
//! they look like one, even if they are no added tokens. A line break that ends answers is not.
//!
//! Invariant: the tokens found are in the order of the text and do not overlap. Where several
//! tokens begin at one place, the longest is found.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::AddedToken;

/// The names of tokens with a role, in `<…>`.
const ROLES: [&str; 16] = [
    "s",
    "/s",
    "bos",
    "eos",
    "pad",
    "unk",
    "sep",
    "cls",
    "mask",
    "bot",
    "eot",
    "eom",
    "user",
    "assistant",
    "system",
    "endoftext",
];

/// Returns whether an added token is a control token. It is one if the checkpoint calls it special,
/// if its text has the form of one, or if it is in brackets and the chat template writes it.
pub(super) fn is_control(token: &AddedToken, chat_template: Option<&str>) -> bool {
    let text = token.content.trim();
    let written = || chat_template.is_some_and(|template| template.contains(text));
    token.special || has_control_form(text) || (is_bracketed(text) && written())
}

/// Recognises `<|…|>`, `<｜…｜>`, `<s>` and other roles, `<start_of_…>`, `<end_of_…>`, `<<SYS>>` and
/// `[INST]`. HTML tags and `<unused0>` are not of these forms.
pub(super) fn has_control_form(text: &str) -> bool {
    let inside = |open, close| text.strip_prefix(open)?.strip_suffix(close);
    if let Some(name) = inside("[", "]") {
        let name = name.strip_prefix('/').unwrap_or(name);
        return !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    }
    let Some(name) = inside("<", ">") else {
        return false;
    };
    let between =
        |bar: &str| name.len() > bar.len() && name.starts_with(bar) && name.ends_with(bar);
    let bare = name.strip_prefix('/').unwrap_or(name);
    between("|")
        || between("｜")
        || inside("<<", ">>").is_some()
        || bare.starts_with("start_of_")
        || bare.starts_with("end_of_")
        || ROLES.contains(&name)
}

fn is_bracketed(text: &str) -> bool {
    let between = |open, close| text.starts_with(open) && text.ends_with(close);
    text.len() > 2 && (between('<', '>') || between('[', ']'))
}

/// The control tokens of a tokenizer.
pub(super) struct ControlTokens {
    ids: Vec<u32>, // Indexed by the automaton's patterns.
    set: HashSet<u32>,
    automaton: AhoCorasick,
    alphabet: BTreeSet<char>,
}

/// A control token at a place in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FoundToken {
    pub(super) token: u32,
    pub(super) bytes: Range<usize>,
}

impl ControlTokens {
    pub(super) fn new(tokens: Vec<(u32, String)>) -> Result<ControlTokens, String> {
        let tokens: Vec<(u32, String)> = tokens
            .into_iter()
            .filter(|(_, text)| !text.is_empty())
            .collect();
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(_, text)| text))
            .map_err(|error| error.to_string())?;
        Ok(ControlTokens {
            ids: tokens.iter().map(|(id, _)| *id).collect(),
            set: tokens.iter().map(|(id, _)| *id).collect(),
            automaton,
            alphabet: tokens
                .iter()
                .flat_map(|(_, text)| text.chars())
                .filter(|char| !char.is_whitespace())
                .collect(),
        })
    }

    /// Returns whether `token` is a control token.
    pub(super) fn contains(&self, token: u32) -> bool {
        self.set.contains(&token)
    }

    /// Returns every character that occurs in a control token, except white space.
    pub(super) fn alphabet(&self) -> &BTreeSet<char> {
        &self.alphabet
    }

    /// Finds all control tokens in `text`.
    pub(super) fn find(&self, text: &str) -> Vec<FoundToken> {
        self.automaton
            .find_iter(text)
            .map(|found| FoundToken {
                token: self.ids[found.pattern().as_usize()],
                bytes: found.range(),
            })
            .collect()
    }

    /// Returns whether `text` contains a control token.
    pub(super) fn occur_in(&self, text: &str) -> bool {
        self.automaton.is_match(text)
    }
}

#[cfg(test)]
mod tests;
