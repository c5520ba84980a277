//! Where special tokens stand in a text.
//!
//! Invariant: what is found does not overlap, goes from left to right, and of several tokens at one place is the longest.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};

/// The special tokens of a tokenizer.
pub(super) struct Specials {
    ids: Vec<u32>, // Indexed by the automaton's patterns.
    set: HashSet<u32>,
    automaton: AhoCorasick,
    alphabet: BTreeSet<char>,
}

/// A special token in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) token: u32,
    pub(super) bytes: Range<usize>,
}

impl Specials {
    pub(super) fn new(tokens: Vec<(u32, String)>) -> Result<Specials, String> {
        let tokens: Vec<(u32, String)> = tokens
            .into_iter()
            .filter(|(_, text)| !text.is_empty())
            .collect();
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(_, text)| text))
            .map_err(|error| error.to_string())?;
        Ok(Specials {
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

    pub(super) fn contains(&self, token: u32) -> bool {
        self.set.contains(&token)
    }

    /// Every character of every special token, but for white space.
    pub(super) fn alphabet(&self) -> &BTreeSet<char> {
        &self.alphabet
    }

    pub(super) fn find(&self, text: &str) -> Vec<Found> {
        self.automaton
            .find_iter(text)
            .map(|found| Found {
                token: self.ids[found.pattern().as_usize()],
                bytes: found.range(),
            })
            .collect()
    }

    pub(super) fn stand_in(&self, text: &str) -> bool {
        self.automaton.is_match(text)
    }
}
