//! What a file says about mixtures of experts.

use crate::checkpoints::{computed_bits, fixture, load};
use crate::{alone, entry, with_entries, with_key};

const UNSIGNED: u32 = 4;
const FLOAT: u32 = 6;
const BOOL: u32 = 7;

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
