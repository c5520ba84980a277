//! What a file says about the tokens that a token attends to, and about positions.

use std::path::Path;

use sterna::checkpoint::{CommittedAttention, ModelConfig, Source};

use crate::checkpoints::{computed_bits, fixture, load};
use crate::{alone, bytes_with_entries, entry, opened, with_entries, with_key};

const FLOAT: u32 = 6;
const BOOL: u32 = 7;

/// Returns a file whose tokens also attend to later ones.
fn not_causal(file: &Path, architecture: &str) -> Source {
    let key = format!("{architecture}.attention.causal");
    with_entries(file, &[entry(&key, BOOL, &[0])])
}

#[test]
fn scaled_positions_of_maple_are_named() {
    let file = fixture("maple-row/maple-row-q2_0.gguf");
    let two = (FLOAT, 2_f32.to_le_bytes());
    let scaled = with_key(&file, "maple.rope.scaling.factor", two);
    let error = load(&scaled).map(drop).unwrap_err();
    assert!(error.contains("maple.rope.scaling"), "{error}");
    let one = (FLOAT, 1_f32.to_le_bytes());
    load(&with_key(&file, "maple.rope.scaling.factor", one)).unwrap();
}

#[test]
fn layers_with_a_window_may_have_a_base_of_their_own() {
    let file = fixture("maple-row/maple-row-q2_0.gguf");
    let with_base = |base: f32| {
        let value = (FLOAT, base.to_le_bytes());
        computed_bits(&with_key(&file, "maple.rope.freq_base_swa", value))
    };
    let usual = computed_bits(&alone(&file));
    assert!(with_base(500_000.0) == usual);
    assert!(with_base(10_000.0) != usual);
}

#[test]
fn a_window_that_no_file_states_is_missing() {
    let file = fixture("embedding-gemma3/embedding-gemma3-iq2_bn.gguf");
    let mut bytes = bytes_with_entries(&file, &[]);
    let key = b"gemma3.attention.sliding_window";
    let mut places = bytes.windows(key.len());
    let at = places.position(|window| window == key).unwrap();
    bytes[at] = b'X';
    let error = opened(bytes).and_then(|source| load(&source).map(drop));
    let error = error.unwrap_err();
    let problem = "\"gemma3.attention.sliding_window\": missing";
    assert!(error.contains(problem), "{error}");
}

#[test]
fn blocks_without_a_size_are_blocks_all_the_same() {
    let file = fixture("qwen2-group64/qwen2-group64-q2_0.gguf");
    let read = |source| ModelConfig::read(&source).unwrap().masked_blocks;
    assert_eq!(read(alone(&file)), None);
    let blocks = read(not_causal(&file, "qwen2"));
    let attention = blocks.map(|blocks| (blocks.size, blocks.committed_attention));
    assert_eq!(attention, Some((None, CommittedAttention::BlockCausal)));
    let file = fixture("embedding-gemma3/embedding-gemma3-iq2_bn.gguf");
    let error = load(&not_causal(&file, "gemma3")).map(drop).unwrap_err();
    let problem = "\"gemma3.attention.causal\": must be causal";
    assert!(error.contains(problem), "{error}");
}
