//! A stream of tokens as a stream of text.
//!
//! Invariants: the deltas, joined, are the text of all tokens decoded at once; no delta splits a character; no part of a stop
//! string is ever released unless it was asked for. A token costs time for its own bytes, not for the text before it.

use std::sync::Arc;

use super::Tokenizer;

/// How tokens become text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextOptions {
    /// Strings that end the text; none of them empty.
    pub stop: Vec<String>,
    /// The stop string that ended the text is part of it.
    pub include_stop: bool,
    /// Leave special tokens out instead of spelling them.
    pub skip_special_tokens: bool,
    /// Stop strings count only in the text after this many tokens.
    pub min_tokens: u32,
}

/// What one token, or the end, adds to the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextDelta {
    /// Text that is now certain; often empty.
    pub text: String,
    /// A stop string has ended the text: what follows is nobody's.
    pub stopped: bool,
}

/// Turns the tokens of one answer into text, one by one.
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    options: TextOptions,
    tokens: u32,
    characters: Characters,
    held: String, // Decoded but not released: it may be the beginning of a stop string.
    released_chars: usize,
}

impl Detokenizer {
    /// At the beginning of an answer.
    pub fn new(tokenizer: Arc<Tokenizer>, options: TextOptions) -> Detokenizer {
        assert!(
            options.stop.iter().all(|stop| !stop.is_empty()),
            "an empty stop string is everywhere"
        );
        Detokenizer {
            tokenizer,
            options,
            tokens: 0,
            characters: Characters::default(),
            held: String::new(),
            released_chars: 0,
        }
    }

    /// The next token.
    pub fn push(&mut self, token: u32) -> TextDelta {
        self.tokens += 1;
        if !(self.options.skip_special_tokens && self.tokenizer.is_special(token)) {
            self.characters
                .push(self.tokenizer.token_bytes(token), &mut self.held);
        }
        self.release()
    }

    /// There are no more tokens: whatever was held back.
    pub fn finish(&mut self) -> TextDelta {
        self.characters.finish(&mut self.held);
        let delta = self.release();
        if delta.stopped {
            return delta;
        }
        let rest = std::mem::take(&mut self.held);
        self.released_chars += rest.chars().count();
        TextDelta {
            text: delta.text + &rest,
            stopped: false,
        }
    }

    /// Characters of the text so far, those held back included: where the next token's text begins.
    pub fn decoded_chars(&self) -> usize {
        self.released_chars + self.held.chars().count()
    }

    /// Characters that the deltas so far had.
    pub fn released_chars(&self) -> usize {
        self.released_chars
    }

    fn release(&mut self) -> TextDelta {
        let active = self.tokens > self.options.min_tokens;
        let stopped = active
            .then(|| first_stop(&self.held, &self.options.stop))
            .flatten();
        let text = match &stopped {
            Some(stop) => {
                let end = if self.options.include_stop {
                    stop.end
                } else {
                    stop.start
                };
                self.held.truncate(end);
                std::mem::take(&mut self.held)
            }
            None => {
                let keep = if active {
                    longest_beginning(&self.held, &self.options.stop)
                } else {
                    0
                };
                let rest = self.held.split_off(self.held.len() - keep);
                std::mem::replace(&mut self.held, rest)
            }
        };
        self.released_chars += text.chars().count();
        TextDelta {
            text,
            stopped: stopped.is_some(),
        }
    }
}

/// The stop string that is complete first, reading from the left; of several the longest. So it does not depend on how the text
/// was cut into tokens.
fn first_stop(text: &str, stops: &[String]) -> Option<std::ops::Range<usize>> {
    let found = stops
        .iter()
        .filter_map(|stop| text.find(stop).map(|start| start..start + stop.len()));
    found.min_by_key(|range| (range.end, range.start))
}

/// Bytes of the longest end of `text` that is a beginning, but not the whole, of a stop string.
fn longest_beginning(text: &str, stops: &[String]) -> usize {
    let of_one = |stop: &String| {
        let longest = text.len().min(stop.len() - 1);
        (1..=longest)
            .rev()
            .find(|&length| text.as_bytes().ends_with(&stop.as_bytes()[..length]))
            .unwrap_or(0)
    };
    stops.iter().map(of_one).max().unwrap_or(0)
}

/// Joins bytes to characters exactly as `String::from_utf8_lossy` does with all of them at once.
#[derive(Default)]
struct Characters {
    incomplete: Vec<u8>, // The beginning of a character, 3 bytes at most between two calls.
}

impl Characters {
    fn push(&mut self, bytes: &[u8], text: &mut String) {
        self.incomplete.extend_from_slice(bytes);
        let mut rest = self.incomplete.as_slice();
        let tail = loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    break &rest[rest.len()..];
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).expect("from_utf8 has just said so"));
                    let Some(invalid) = error.error_len() else {
                        break after;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &after[invalid..];
                }
            }
        };
        let decided = self.incomplete.len() - tail.len();
        self.incomplete.drain(..decided);
    }

    fn finish(&mut self, text: &mut String) {
        if !self.incomplete.is_empty() {
            self.incomplete.clear();
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests;
