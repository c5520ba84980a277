//! Tests of this module.

use super::*;
use crate::text::TextFiles;
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
    let files = TextFiles {
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
