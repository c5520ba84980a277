//! Tests of streamed text against the whole text, with random tokens and stop strings.

use sterna_random::{Random, seed_from_env};

use super::*;
use crate::text::TextFiles;
use crate::text::test_tokenizer::byte_level_json;

const EMOJI: &[u8] = "👩\u{200d}👧".as_bytes();

/// The bytes of tokens: several characters, parts of characters, and invalid UTF-8.
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
        tool_template: None,
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
        assert!(detokenizer.decoder.incomplete.len() < 4);
        if delta.stopped {
            return text;
        }
    }
    text + &detokenizer.finish().text
}

/// Cuts the complete text at its first stop string, with a simple search.
fn cut_at_stop(text: &str, options: &TextOptions) -> String {
    for end in text.char_indices().map(|(at, char)| at + char.len_utf8()) {
        let ending = options
            .stop
            .iter()
            .filter(|stop| text[..end].ends_with(stop.as_str()))
            .map(String::len)
            .max();
        if let Some(length) = ending {
            let end = if options.include_stop {
                end
            } else {
                end - length
            };
            return text[..end].to_owned();
        }
    }
    text.to_owned()
}

#[test]
fn streamed_text_equals_the_whole_text_up_to_the_first_stop_string() {
    let seed = seed_from_env().unwrap_or(1);
    let mut random = Random::new(seed);
    let tokenizer = tokenizer();
    let mut stopped = 0;
    for case in 0..100_000 {
        let mut token = || match random.below(8) {
            0..4 => random.pick(&BYTES),
            4 => 256 + random.below(2) as u32,
            _ => 258 + random.index(PIECES.len()) as u32,
        };
        let tokens: Vec<u32> = (0..case % 16).map(|_| token()).collect();
        let options = TextOptions {
            stop: (0..random.below(4))
                .map(|_| random.pick(&STOPS).to_owned())
                .collect(),
            include_stop: random.below(2) == 0,
            skip_special_tokens: random.below(2) == 0,
            min_tokens: 0,
        };
        let text = tokenizer.decode(&tokens, options.skip_special_tokens);
        let expected = cut_at_stop(&text, &options);
        let streamed = stream(&tokenizer, &tokens, &options);
        assert_eq!(
            streamed, expected,
            "STERNA_SEED={seed} case {case}: {tokens:?} {options:?}"
        );
        stopped += usize::from(expected != text);
    }
    assert!(
        stopped > 10_000,
        "only {stopped} texts contain a stop string"
    );
}

#[test]
fn stop_strings_are_ignored_in_the_first_min_tokens() {
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
fn only_a_possible_beginning_of_a_stop_string_is_held() {
    let stops = ["</answer>".to_owned(), "<end>".to_owned()];
    assert_eq!(longest_stop_prefix("text </ans", &stops), 5);
    assert_eq!(longest_stop_prefix("text <", &stops), 1);
    assert_eq!(longest_stop_prefix("text <e", &stops), 2);
    assert_eq!(longest_stop_prefix("text <a", &stops), 0);
    assert_eq!(longest_stop_prefix("", &stops), 0);
}
