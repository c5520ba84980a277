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
pub struct Delta {
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
    pub fn push(&mut self, token: u32) -> Delta {
        self.tokens += 1;
        if !(self.options.skip_special_tokens && self.tokenizer.is_special(token)) {
            self.characters
                .push(self.tokenizer.token_bytes(token), &mut self.held);
        }
        self.release()
    }

    /// There are no more tokens: whatever was held back.
    pub fn finish(&mut self) -> Delta {
        self.characters.finish(&mut self.held);
        let delta = self.release();
        if delta.stopped {
            return delta;
        }
        let rest = std::mem::take(&mut self.held);
        self.released_chars += rest.chars().count();
        Delta {
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

    fn release(&mut self) -> Delta {
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
        Delta {
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
mod tests {
    use super::*;
    use crate::text::Files;
    use crate::text::tests::byte_level_json;

    /// A linear congruential generator: small and good enough.
    struct Random(u64);

    impl Random {
        fn below(&mut self, limit: usize) -> usize {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % limit
        }

        fn one_of<T: Copy>(&mut self, items: &[T]) -> T {
            items[self.below(items.len())]
        }
    }

    const EMOJI: &[u8] = "👩\u{200d}👧".as_bytes();

    /// Tokens of several characters, of parts of characters, and of bytes that are no character.
    const PIECES: [&[u8]; 10] = [
        b"ab",
        b"ba",
        b"bab",
        "é".as_bytes(),
        "你a".as_bytes(),
        EMOJI,
        &[0xE4, 0xBD],
        &[0x9F, 0x91],
        &[0xFF, b'a'],
        b"a b",
    ];
    const BYTES: [u32; 10] = [97, 98, 32, 0xC3, 0xA9, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F];
    const STOPS: [&str; 10] = [
        "a",
        "ab",
        "bab",
        "aba",
        "éa",
        "你",
        "\u{FFFD}",
        "b\u{FFFD}",
        "👧",
        "a ba",
    ];

    fn tokenizer() -> Arc<Tokenizer> {
        let json = byte_level_json(&PIECES);
        let files = Files {
            tokenizer: &json,
            config: None,
            chat_template: None,
        };
        Arc::new(files.load(258 + PIECES.len() as u32).unwrap().0)
    }

    fn stream(tokenizer: &Arc<Tokenizer>, tokens: &[u32], options: &TextOptions) -> String {
        let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), options.clone());
        let mut text = String::new();
        for token in tokens {
            let delta = detokenizer.push(*token);
            text += &delta.text;
            assert_eq!(detokenizer.released_chars(), text.chars().count());
            assert!(detokenizer.characters.incomplete.len() < 4);
            if delta.stopped {
                return text;
            }
        }
        text + &detokenizer.finish().text
    }

    /// The same, with the whole text before one's eyes.
    fn at_once(text: &str, options: &TextOptions) -> String {
        for end in text.char_indices().map(|(at, char)| at + char.len_utf8()) {
            let ending = options
                .stop
                .iter()
                .filter(|stop| text[..end].ends_with(stop.as_str()))
                .map(String::len)
                .max();
            if let Some(length) = ending {
                return text[..if options.include_stop {
                    end
                } else {
                    end - length
                }]
                    .to_owned();
            }
        }
        text.to_owned()
    }

    #[test]
    fn streamed_text_is_the_text_at_once_cut_before_the_first_stop() {
        let seed = std::env::var("STERNA_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok())
            .unwrap_or(1);
        let mut random = Random(seed);
        let tokenizer = tokenizer();
        let mut stopped = 0;
        for case in 0..100_000 {
            let mut token = || match random.below(8) {
                0..4 => random.one_of(&BYTES),
                4 => 256 + random.below(2) as u32,
                _ => 258 + random.below(PIECES.len()) as u32,
            };
            let tokens: Vec<u32> = (0..case % 16).map(|_| token()).collect();
            let options = TextOptions {
                stop: (0..random.below(4))
                    .map(|_| random.one_of(&STOPS).to_owned())
                    .collect(),
                include_stop: random.below(2) == 0,
                skip_special_tokens: random.below(2) == 0,
                min_tokens: 0,
            };
            let text = tokenizer.decode(&tokens, options.skip_special_tokens);
            let expected = at_once(&text, &options);
            let streamed = stream(&tokenizer, &tokens, &options);
            assert_eq!(
                streamed, expected,
                "STERNA_SEED={seed} case {case}: {tokens:?} {options:?}"
            );
            stopped += usize::from(expected != text);
        }
        assert!(stopped > 10_000, "only {stopped} texts met a stop string");
    }

    #[test]
    fn stops_do_not_count_in_the_first_tokens() {
        let tokenizer = tokenizer();
        let options = |min_tokens| TextOptions {
            stop: vec!["ab".into()],
            include_stop: false,
            skip_special_tokens: true,
            min_tokens,
        };
        let tokens = [97, 98, 98, 97, 98, 97];
        assert_eq!(stream(&tokenizer, &tokens, &options(0)), "");
        assert_eq!(stream(&tokenizer, &tokens, &options(2)), "abb");
        assert_eq!(stream(&tokenizer, &tokens, &options(5)), "abbaba");
    }

    #[test]
    fn only_what_may_begin_a_stop_string_is_held() {
        let stops = ["</answer>".to_owned(), "<end>".to_owned()];
        assert_eq!(longest_beginning("text </ans", &stops), 5);
        assert_eq!(longest_beginning("text <", &stops), 1);
        assert_eq!(longest_beginning("text <e", &stops), 2);
        assert_eq!(longest_beginning("text <a", &stops), 0);
        assert_eq!(longest_beginning("", &stops), 0);
    }
}
