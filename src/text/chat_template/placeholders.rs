//! Hides user text from the search for control tokens while a template renders it.
//!
//! Each character that occurs in a control token is replaced, in the user's text, by a placeholder
//! that occurs nowhere else. Whatever a template then does with the messages (trim, split, join,
//! replace), a control token in its output is the template's own.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::{Range, RangeInclusive};

use serde_json::Value;

use crate::text::control_tokens::FoundToken;
use crate::text::error::TextError;
use crate::text::tokenizer::Tokenizer;

/// The characters that can be placeholders: the last private-use plane.
const CANDIDATES: RangeInclusive<char> = '\u{100000}'..='\u{10FFFD}';

/// The words of tools and JSON schemas that templates read.
const WORDS: [&str; 18] = [
    "type",
    "function",
    "name",
    "description",
    "parameters",
    "arguments",
    "id",
    "properties",
    "required",
    "items",
    "enum",
    "object",
    "array",
    "string",
    "number",
    "integer",
    "boolean",
    "null",
];

fn is_word(text: &str) -> bool {
    WORDS.contains(&text)
}

/// Adds the texts in a JSON value.
pub(super) fn texts_of<'a>(value: &'a Value, texts: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => texts.push(text),
        Value::Array(items) => items.iter().for_each(|item| texts_of(item, texts)),
        Value::Object(members) => {
            for (key, value) in members {
                texts.push(key);
                texts_of(value, texts);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// One placeholder for each character of the control tokens.
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

    /// Puts placeholders into the texts of a JSON value. The words of JSON schemas stay, because
    /// templates compare them.
    pub(super) fn hide_json(&self, value: &Value) -> Value {
        match value {
            Value::String(text) if is_word(text) => value.clone(),
            Value::String(text) => self.hide(text).into(),
            Value::Array(items) => items.iter().map(|item| self.hide_json(item)).collect(),
            Value::Object(members) => {
                let hidden = members.iter().map(|(key, value)| {
                    let key = if is_word(key) {
                        key.clone()
                    } else {
                        self.hide(key)
                    };
                    (key, self.hide_json(value))
                });
                Value::Object(hidden.collect())
            }
            other => other.clone(),
        }
    }

    /// Splits a rendered text at its control tokens and restores the characters between them.
    pub(super) fn restore(&self, rendered: &str, controls: &[FoundToken]) -> MarkedText {
        let text = |text| Segment::Text(replace(text, &self.original_of));
        let mut segments = Vec::new();
        let mut end = 0;
        for control in controls {
            segments.push(text(&rendered[end..control.bytes.start]));
            segments.push(Segment::Control {
                token: control.token,
                text: rendered[control.bytes.clone()].to_owned(),
            });
            end = control.bytes.end;
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

/// A rendered conversation, split into control tokens and ordinary text.
pub(super) struct MarkedText(Vec<Segment>);

enum Segment {
    Text(String),
    Control { token: u32, text: String },
}

impl Segment {
    fn text(&self) -> &str {
        match self {
            Segment::Text(text) | Segment::Control { text, .. } => text,
        }
    }

    fn control(&self) -> Option<u32> {
        match self {
            Segment::Control { token, .. } => Some(*token),
            Segment::Text(_) => None,
        }
    }

    /// Returns whether this is ordinary text that looks like a control token.
    fn is_quoted(&self, tokenizer: &Tokenizer) -> bool {
        match self {
            Segment::Control { .. } => false,
            Segment::Text(text) => tokenizer.control_tokens().occur_in(text),
        }
    }
}

impl MarkedText {
    /// Returns the whole text.
    pub(super) fn text(&self) -> String {
        self.0.iter().map(Segment::text).collect()
    }

    /// Returns the control tokens and their places in the whole text.
    pub(super) fn control_tokens(&self) -> Vec<FoundToken> {
        let mut start = 0;
        let mut controls = Vec::new();
        for segment in &self.0 {
            let end = start + segment.text().len();
            if let Segment::Control { token, .. } = segment {
                controls.push(FoundToken {
                    token: *token,
                    bytes: start..end,
                });
            }
            start = end;
        }
        controls
    }

    /// Encodes the text: control tokens as themselves, everything else as ordinary text.
    ///
    /// The tokenizer reads as much at once as it can, because it reads a text otherwise behind a
    /// control token than alone. Only a text that looks like a control token is read apart.
    pub(super) fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, TextError> {
        let mut tokens = Vec::new();
        let mut start = 0;
        for (index, segment) in self.0.iter().enumerate() {
            if !segment.is_quoted(tokenizer) {
                continue;
            }
            self.encode_run(start..index, tokenizer, &mut tokens)?;
            self.encode_apart(index, tokenizer, &mut tokens)?;
            start = index + 1;
        }
        self.encode_run(start..self.0.len(), tokenizer, &mut tokens)?;
        Ok(tokens)
    }

    /// Encodes segments at once. A run behind another text begins with a control token.
    fn encode_run(
        &self,
        run: Range<usize>,
        tokenizer: &Tokenizer,
        tokens: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        let segments = &self.0[run.clone()];
        let text: String = segments.iter().map(Segment::text).collect();
        let own = segments.iter().filter_map(Segment::control);
        let encoded = tokenizer.encode_recognising(&text)?;
        let controls = tokenizer.control_tokens();
        let found = encoded
            .iter()
            .copied()
            .filter(|token| controls.contains(*token));
        if found.eq(own) {
            tokens.extend(encoded);
            return Ok(());
        }
        // The tokenizer's normalizer and model make other control tokens of the text.
        run.into_iter()
            .try_for_each(|index| self.encode_apart(index, tokenizer, tokens))
    }

    /// Encodes one segment.
    fn encode_apart(
        &self,
        index: usize,
        tokenizer: &Tokenizer,
        tokens: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        match &self.0[index] {
            Segment::Control { token, .. } => tokens.push(*token),
            Segment::Text(text) => {
                let beside = |index: Option<usize>| self.0.get(index?)?.control();
                let between = [beside(index.checked_sub(1)), beside(Some(index + 1))];
                tokens.extend(tokenizer.encode_between(text, between)?);
            }
        }
        Ok(())
    }
}
