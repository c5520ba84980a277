//! Where the pre-tokenizers of GGUF files cut words.

use sterna::checkpoint::Source;
use sterna::text::{TextFiles, Tokenizer};

use crate::entry;
use crate::rotated::{integers, text, texts};

/// Returns the character that stands for a byte in the tokens of byte-level BPE.
fn letter(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    if is_printable(byte) {
        return char::from(byte);
    }
    let place = (0..byte).filter(|byte| !is_printable(*byte)).count();
    char::from_u32(256 + place as u32).unwrap()
}

fn letters(text: &str) -> String {
    text.bytes().map(letter).collect()
}

/// Returns a tokenizer that joins the bytes of `left`, the bytes of `right`, and then both, with
/// the named pre-tokenizer.
fn tokenizer(pre: &str, left: &str, right: &str) -> Tokenizer {
    let mut tokens: Vec<String> = (0..=255).map(|byte| letter(byte).to_string()).collect();
    let mut merges = Vec::new();
    for side in [left, right] {
        let mut joined = String::new();
        for letter in letters(side).chars() {
            if !joined.is_empty() {
                merges.push(format!("{joined} {letter}"));
                tokens.push(format!("{joined}{letter}"));
            }
            joined.push(letter);
        }
    }
    let [left, right] = [left, right].map(letters);
    merges.push(format!("{left} {right}"));
    tokens.push(left + &right);
    let entries = [
        entry("general.architecture", 8, &text("qwen35")),
        entry("tokenizer.ggml.model", 8, &text("gpt2")),
        entry("tokenizer.ggml.pre", 8, &text(pre)),
        entry(
            "tokenizer.ggml.token_type",
            9,
            &integers(&vec![1; tokens.len()]),
        ),
        entry("tokenizer.ggml.tokens", 9, &texts(&tokens)),
        entry("tokenizer.ggml.merges", 9, &texts(&merges)),
    ];
    let mut file = b"GGUF".to_vec();
    file.extend(3_u32.to_le_bytes());
    file.extend(0_u64.to_le_bytes());
    file.extend((entries.len() as u64).to_le_bytes());
    file.extend(entries.concat());
    file.resize(file.len().next_multiple_of(32), 0);
    let source = Source::in_memory([("model.gguf".to_owned(), file)]);
    let source = source.with_gguf("model.gguf").unwrap();
    let json = source.read("tokenizer.json").unwrap().unwrap();
    let files = TextFiles {
        tokenizer: &json,
        config: None,
        chat_template: None,
        tool_template: None,
    };
    files.load(tokens.len() as u32).unwrap().0
}

/// Each pair has a merge across the place where a word may end. The merge happens only inside a
/// word. No pair has a composed form, so that NFC leaves it as it is.
#[test]
fn combining_marks_belong_to_words_in_qwen_3_5_only() {
    let mark = "\u{301}";
    let cases = [
        ("q", mark, true, false),  // A letter and its mark.
        (mark, "q", true, true),   // A mark may begin a word, as other signs may.
        ("!!", mark, false, true), // In Qwen 2 a mark is a sign among others.
        ("q", "z", true, true),
        ("q", "!", false, false),
        ("1", "2", false, false), // Each digit is alone.
    ];
    for (left, right, joined, joined_in_qwen2) in cases {
        for (pre, joined) in [("qwen35", joined), ("qwen2", joined_in_qwen2)] {
            let tokenizer = tokenizer(pre, left, right);
            let tokens = tokenizer.encode_prompt(&format!("{left}{right}")).unwrap();
            let expected = if joined { 1 } else { 2 };
            assert_eq!(tokens.len(), expected, "{pre}: {left:?} and {right:?}");
        }
    }
}
