//! Turns a stream of tokens into a stream of text.
//!
//! Invariant: the deltas together are the text of all tokens decoded at once.
//!
//! Invariant: no delta splits a character.
//!
//! Invariant: no part of a stop string is released, unless `include_stop` is set.
//!
//! Invariant: the cost of a token depends on its own length, not on the length of the text so far.

use std::ops::Range;
use std::sync::Arc;

use super::tokenizer::Tokenizer;

/// How tokens become text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextOptions {
    /// The strings that end the text. None is empty.
    pub stop: Vec<String>,
    /// Whether the text includes the stop string that ends it.
    pub include_stop: bool,
    /// Whether special tokens are skipped instead of spelled out.
    pub skip_special_tokens: bool,
    /// The number of tokens in which stop strings are not searched for.
    pub min_tokens: u32,
}

/// The text that one token, or the end of the tokens, adds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextDelta {
    /// The text that is now final. It is often empty.
    pub text: String,
    /// Whether a stop string has ended the text. Tokens after it add nothing.
    pub stopped: bool,
}

/// Turns the tokens of one answer into text, one by one.
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    options: TextOptions,
    spelled: Vec<u32>, // Special tokens that are never skipped.
    tokens: u32,
    decoder: Utf8Decoder,
    held: String, // Decoded, but not released: it may be the beginning of a stop string.
    released_chars: usize,
    stop: Option<String>, // The stop string that ended the text.
}

impl Detokenizer {
    /// Starts an answer.
    ///
    /// # Panics
    /// If a stop string is empty.
    pub fn new(tokenizer: Arc<Tokenizer>, options: TextOptions) -> Detokenizer {
        assert!(
            options.stop.iter().all(|stop| !stop.is_empty()),
            "an empty stop string would match everywhere"
        );
        Detokenizer {
            tokenizer,
            options,
            spelled: Vec::new(),
            tokens: 0,
            decoder: Utf8Decoder::default(),
            held: String::new(),
            released_chars: 0,
            stop: None,
        }
    }

    /// Returns a detokenizer that spells out these tokens even if it skips special tokens.
    #[must_use]
    pub fn spelling(self, spelled: Vec<u32>) -> Detokenizer {
        Detokenizer { spelled, ..self }
    }

    /// Adds the next token.
    pub fn push(&mut self, token: u32) -> TextDelta {
        self.tokens += 1;
        let may_skip = self.options.skip_special_tokens && !self.spelled.contains(&token);
        if !(may_skip && self.tokenizer.is_special(token)) {
            self.decoder
                .push(self.tokenizer.token_bytes(token), &mut self.held);
        }
        self.release()
    }

    /// Ends the tokens and releases the text that was held.
    pub fn finish(&mut self) -> TextDelta {
        self.decoder.finish(&mut self.held);
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

    /// Returns the number of characters decoded so far, including those held. The text of the next
    /// token begins there.
    pub fn decoded_chars(&self) -> usize {
        self.released_chars + self.held.chars().count()
    }

    /// Returns the number of characters in all deltas so far.
    pub fn released_chars(&self) -> usize {
        self.released_chars
    }

    /// Returns the stop string that ended the text, if one did.
    pub fn stop(&self) -> Option<&str> {
        self.stop.as_deref()
    }

    fn release(&mut self) -> TextDelta {
        let active = self.tokens > self.options.min_tokens;
        let stop = active
            .then(|| first_stop(&self.held, &self.options.stop))
            .flatten();
        let text = match &stop {
            Some(stop) => {
                self.stop = Some(self.held[stop.clone()].to_owned());
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
                    longest_stop_prefix(&self.held, &self.options.stop)
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
            stopped: stop.is_some(),
        }
    }
}

/// Finds the stop string that ends first, and of several the longest. The choice does not depend on
/// how the text is divided into tokens.
fn first_stop(text: &str, stops: &[String]) -> Option<Range<usize>> {
    let found = stops
        .iter()
        .filter_map(|stop| text.find(stop).map(|start| start..start + stop.len()));
    found.min_by_key(|range| (range.end, range.start))
}

/// Returns the length in bytes of the longest end of `text` that is a proper prefix of a stop
/// string.
fn longest_stop_prefix(text: &str, stops: &[String]) -> usize {
    let of_one = |stop: &String| {
        let longest = text.len().min(stop.len() - 1);
        (1..=longest)
            .rev()
            .find(|&length| text.as_bytes().ends_with(&stop.as_bytes()[..length]))
            .unwrap_or(0)
    };
    stops.iter().map(of_one).max().unwrap_or(0)
}

/// Decodes pieces of UTF-8 with the result that `String::from_utf8_lossy` has for the whole.
#[derive(Default)]
struct Utf8Decoder {
    incomplete: Vec<u8>, // The beginning of a character: at most 3 bytes between two calls.
}

impl Utf8Decoder {
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
                    text.push_str(std::str::from_utf8(valid).expect("it was just found valid"));
                    let Some(invalid) = error.error_len() else {
                        break after;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &after[invalid..];
                }
            }
        };
        let decoded = self.incomplete.len() - tail.len();
        self.incomplete.drain(..decoded);
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
