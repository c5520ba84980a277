//! What a file says about mixtures of experts.

use crate::checkpoints::{computed_bits, fixture, load};
use crate::{alone, bytes_with_entries, entry, opened, with_entries, with_key};

const UNSIGNED: u32 = 4;
const FLOAT: u32 = 6;
const BOOL: u32 = 7;
const ARRAY: u32 = 9;
const UNSIGNED_LONG: u32 = 10;

#[test]
fn other_kinds_of_mixtures_are_named() {
    let file = fixture("maple-row/maple-row-q2_0.gguf");
    for (key, value) in [
        ("expert_shared_count", (UNSIGNED, 1_u32.to_le_bytes())),
        (
            "expert_shared_feed_forward_length",
            (UNSIGNED, 64_u32.to_le_bytes()),
        ),
        ("expert_gating_func", (UNSIGNED, 2_u32.to_le_bytes())),
        ("expert_group_count", (UNSIGNED, 4_u32.to_le_bytes())),
        ("leading_dense_block_count", (UNSIGNED, 1_u32.to_le_bytes())),
        ("expert_weights_scale", (FLOAT, 2.5_f32.to_le_bytes())),
    ] {
        let key = format!("maple.{key}");
        let error = load(&with_key(&file, &key, value)).map(drop).unwrap_err();
        assert!(error.contains(&key), "{error}");
    }
    // The values that other files give to the only kind.
    for (key, value) in [
        ("expert_shared_count", (UNSIGNED, 0_u32.to_le_bytes())),
        ("expert_gating_func", (UNSIGNED, 1_u32.to_le_bytes())),
        ("expert_weights_scale", (FLOAT, 1_f32.to_le_bytes())),
    ] {
        load(&with_key(&file, &format!("maple.{key}"), value)).unwrap();
    }
}

#[test]
fn weights_of_experts_add_up_to_one_unless_the_file_says_otherwise() {
    let file = fixture("maple-row/maple-row-q2_0.gguf");
    let with_norm = |normalizes: u8| {
        let entry = entry("maple.expert_weights_norm", BOOL, &[normalizes]);
        computed_bits(&with_entries(&file, &[entry]))
    };
    let silent = computed_bits(&alone(&file));
    assert!(with_norm(1) == silent);
    assert!(with_norm(0) != silent);
}

/// Returns the error of a file whose `key` has another value.
fn error_of(fixture_name: &str, key: &str, kind: u32, value: &[u8]) -> String {
    let mut bytes = bytes_with_entries(&fixture(fixture_name), &[entry(key, kind, value)]);
    // The old entry comes after the new one.
    let places = bytes.windows(key.len()).enumerate();
    let mut places = places.filter(|(_, window)| *window == key.as_bytes());
    let (_, (old, _)) = (places.next().unwrap(), places.next().unwrap());
    bytes[old] = b'X';
    let loaded = opened(bytes).and_then(|source| load(&source).map(drop));
    let error = loaded.unwrap_err();
    assert!(error.contains(key), "{error}");
    error
}

#[test]
fn sizes_out_of_range_are_named_before_memory_is_taken() {
    for value in [1_u64 << 40, 1 << 63] {
        let value = value.to_le_bytes();
        for (file, key) in [
            (
                "qwen3-moe-group64/qwen3-moe-group64-q2_0.gguf",
                "qwen3moe.block_count",
            ),
            ("maple-row/maple-row-q2_0.gguf", "maple.block_count"),
        ] {
            error_of(file, key, UNSIGNED_LONG, &value);
        }
    }
}

#[test]
fn a_limit_of_gates_for_only_some_layers_is_named() {
    let one = [
        &FLOAT.to_le_bytes()[..],
        &1_u64.to_le_bytes(),
        &7_f32.to_le_bytes(),
    ]
    .concat();
    let file = "maple-row/maple-row-q2_0.gguf";
    let error = error_of(file, "maple.swiglu_clamp_exp", ARRAY, &one);
    assert!(error.contains("each layer"), "{error}");
}
