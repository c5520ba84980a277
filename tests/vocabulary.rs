//! Reading a vocabulary takes little more memory than it keeps. This test counts allocations, so it
//! is alone in its process.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

use std::alloc::System;

use serde_json::{Map, Value, json};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use sterna::text::TextFiles;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const TOKENS: usize = 32_000;

#[test]
fn reading_a_vocabulary_allocates_at_most_three_times_what_it_keeps() {
    let json = tokenizer();
    let region = Region::new(ALLOCATOR);
    let files = TextFiles {
        tokenizer: &json,
        config: None,
        chat_template: None,
        tool_template: None,
    };
    let (tokenizer, _) = files.load(TOKENS as u32).unwrap();
    let memory = region.change();
    assert_eq!(tokenizer.encode_prompt("!!!").unwrap().len(), 1);
    let allocated = memory.bytes_allocated;
    let kept = memory.bytes_allocated - memory.bytes_deallocated;
    // Growing tables and the merges as strings need about 2.6 times the memory that is kept. A copy
    // of the whole vocabulary would exceed the limit, and its memory would stay with the allocator.
    assert!(
        allocated <= kept * 3,
        "{allocated} bytes were allocated to keep {kept}"
    );
}

/// Returns a `tokenizer.json` over 32 characters. Its tokens are the shortest strings of these
/// characters. Each longer token is a shorter token and one character.
fn tokenizer() -> Vec<u8> {
    let alphabet: Vec<char> = ('!'..).take(32).collect();
    let mut tokens: Vec<String> = alphabet.iter().map(char::to_string).collect();
    let mut merges = Vec::new();
    let mut shorter = 0;
    while tokens.len() < TOKENS {
        for char in &alphabet {
            merges.push(json!([tokens[shorter], char.to_string()]));
            tokens.push(format!("{}{char}", tokens[shorter]));
        }
        shorter += 1;
    }
    let vocabulary: Map<String, Value> = tokens.into_iter().zip((0..).map(Value::from)).collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    serde_json::to_vec(&json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level,
        "post_processor": null,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }))
    .unwrap()
}
