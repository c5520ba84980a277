//! Hides user text from the search for special tokens while a template renders it.
//!
//! Each character that occurs in a special token is replaced, in the user's text, by a placeholder
//! that occurs nowhere else. Whatever a template then does with the messages (trim, split, join,
//! replace), a special token in its output is the template's own.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::RangeInclusive;

use crate::text::error::TextError;
use crate::text::special_tokens::FoundToken;
use crate::text::tokenizer::Tokenizer;

/// The characters that can be placeholders: the last private-use plane.
const CANDIDATES: RangeInclusive<char> = '\u{100000}'..='\u{10FFFD}';

/// One placeholder for each character of the special tokens.
pub(super) struct Placeholders {
    placeholder_of: BTreeMap<char, char>,
    original_of: BTreeMap<char, char>,
}

impl Placeholders {
    /// Chooses placeholders for the characters of `alphabet` that occur in none of `texts`. Returns
    /// `None` if there are too few.
    pub(super) fn new<'a>(
        alphabet: &BTreeSet<char>,
        texts: impl Iterator<Item = &'a str>,
    ) -> Option<Placeholders> {
        let used: HashSet<char> = texts
            .flat_map(str::chars)
            .filter(|char| CANDIDATES.contains(char))
            .collect();
        let mut free = CANDIDATES.filter(|char| !used.contains(char));
        let mut placeholder_of = BTreeMap::new();
        for &char in alphabet {
            placeholder_of.insert(char, free.next()?);
        }
        let original_of = placeholder_of
            .iter()
            .map(|(char, placeholder)| (*placeholder, *char))
            .collect();
        Some(Placeholders {
            placeholder_of,
            original_of,
        })
    }

    /// Puts placeholders into a user's text.
    pub(super) fn hide(&self, text: &str) -> String {
        replace(text, &self.placeholder_of)
    }

    /// Splits a rendered text at its special tokens and restores the characters between them.
    pub(super) fn restore(&self, rendered: &str, specials: &[FoundToken]) -> MarkedText {
        let text = |text| Segment::Text(replace(text, &self.original_of));
        let mut segments = Vec::new();
        let mut end = 0;
        for special in specials {
            segments.push(text(&rendered[end..special.bytes.start]));
            segments.push(Segment::Special {
                token: special.token,
                text: rendered[special.bytes.clone()].to_owned(),
            });
            end = special.bytes.end;
        }
        segments.push(text(&rendered[end..]));
        MarkedText(segments)
    }
}

fn replace(text: &str, by: &BTreeMap<char, char>) -> String {
    text.chars()
        .map(|char| *by.get(&char).unwrap_or(&char))
        .collect()
}

/// A rendered conversation, split into special tokens and ordinary text.
pub(super) struct MarkedText(Vec<Segment>);

enum Segment {
    Text(String),
    Special { token: u32, text: String },
}

impl Segment {
    fn text(&self) -> &str {
        match self {
            Segment::Text(text) | Segment::Special { text, .. } => text,
        }
    }
}

impl MarkedText {
    /// Returns the whole text.
    pub(super) fn text(&self) -> String {
        self.0.iter().map(Segment::text).collect()
    }

    /// Returns the special tokens and their places in the whole text.
    pub(super) fn special_tokens(&self) -> Vec<FoundToken> {
        let mut start = 0;
        let mut specials = Vec::new();
        for segment in &self.0 {
            let end = start + segment.text().len();
            if let Segment::Special { token, .. } = segment {
                specials.push(FoundToken {
                    token: *token,
                    bytes: start..end,
                });
            }
            start = end;
        }
        specials
    }

    /// Encodes each segment: special tokens as themselves, everything else as ordinary text.
    pub(super) fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, TextError> {
        let mut tokens = Vec::new();
        for segment in &self.0 {
            match segment {
                Segment::Special { token, .. } => tokens.push(*token),
                Segment::Text(text) if text.is_empty() => {}
                Segment::Text(text) => tokens.extend(tokenizer.encode_plain(text)?),
            }
        }
        Ok(tokens)
    }
}
