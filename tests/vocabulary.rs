//! What reading a vocabulary takes: hardly more memory than it leaves. Alone in its process, whose allocations it counts.

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
fn reading_a_vocabulary_takes_little_that_it_does_not_keep() {
    let json = tokenizer();
    let region = Region::new(ALLOCATOR);
    let files = TextFiles {
        tokenizer: &json,
        config: None,
        chat_template: None,
    };
    let (tokenizer, _) = files.load(TOKENS as u32).unwrap();
    let memory = region.change();
    assert_eq!(tokenizer.encode_prompt("!!!").unwrap().len(), 1);
    let (taken, left) = (
        memory.bytes_allocated,
        memory.bytes_allocated - memory.bytes_deallocated,
    );
    // Tables that grow take twice what they come to, and the merges are strings for a while: 2.6 times in all. A copy of the
    // whole vocabulary on the way makes it more, and what it took stays with the allocator, in holes between what is kept.
    assert!(
        taken <= left * 3,
        "{taken} bytes were allocated to keep {left}"
    );
}

/// Of 32 characters: the shortest words that can be made of them, each but a character with one merge.
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
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    serde_json::to_vec(&json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "added_tokens": [],
        "pre_tokenizer": byte_level, "decoder": byte_level, "post_processor": null,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }))
    .unwrap()
}
