//! Finds special tokens in a text.
//!
//! Invariant: the tokens found are in the order of the text and do not overlap. Where several
//! tokens begin at one place, the longest is found.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};

/// The special tokens of a tokenizer.
pub(super) struct SpecialTokens {
    ids: Vec<u32>, // Indexed by the automaton's patterns.
    set: HashSet<u32>,
    automaton: AhoCorasick,
    alphabet: BTreeSet<char>,
}

/// A special token at a place in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FoundToken {
    pub(super) token: u32,
    pub(super) bytes: Range<usize>,
}

impl SpecialTokens {
    pub(super) fn new(tokens: Vec<(u32, String)>) -> Result<SpecialTokens, String> {
        let tokens: Vec<(u32, String)> = tokens
            .into_iter()
            .filter(|(_, text)| !text.is_empty())
            .collect();
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(_, text)| text))
            .map_err(|error| error.to_string())?;
        Ok(SpecialTokens {
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

    /// Returns whether `token` is special.
    pub(super) fn contains(&self, token: u32) -> bool {
        self.set.contains(&token)
    }

    /// Returns every character that occurs in a special token, except white space.
    pub(super) fn alphabet(&self) -> &BTreeSet<char> {
        &self.alphabet
    }

    /// Finds all special tokens in `text`.
    pub(super) fn find(&self, text: &str) -> Vec<FoundToken> {
        self.automaton
            .find_iter(text)
            .map(|found| FoundToken {
                token: self.ids[found.pattern().as_usize()],
                bytes: found.range(),
            })
            .collect()
    }

    /// Returns whether `text` contains a special token.
    pub(super) fn occur_in(&self, text: &str) -> bool {
        self.automaton.is_match(text)
    }
}
