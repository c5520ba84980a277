//! A small byte-level tokenizer for tests.

use serde_json::{Map, Value, json};

use super::token_bytes::byte_level_alphabet;

/// Returns a `tokenizer.json` in which every byte is a token, `<|bos|>` is 256 and `<|eot_id|>` is
/// 257. The tokens from 258 on spell `pieces`. No text is encoded to them.
pub(crate) fn byte_level_json(pieces: &[&[u8]]) -> Vec<u8> {
    let alphabet = byte_level_alphabet();
    let spell = |byte: &u8| {
        let index = alphabet.iter().position(|one| *one == Some(*byte));
        char::from_u32(index.unwrap() as u32).unwrap()
    };
    let bytes = (0..=u8::MAX).map(|byte| (spell(&byte).to_string(), json!(byte)));
    let pieces = pieces
        .iter()
        .zip(258..)
        .map(|(piece, id)| (piece.iter().map(spell).collect(), json!(id)));
    let special = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false,
        })
    };
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    let vocabulary: Map<String, Value> = bytes.chain(pieces).collect();
    serde_json::to_vec(&json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [special(256, "<|bos|>"), special(257, "<|eot_id|>")],
        "pre_tokenizer": byte_level, "decoder": byte_level, "post_processor": null,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }))
    .unwrap()
}
