//! A file with one changed byte in its header is refused by name, or is the same model, or is the
//! model that the changed key describes.

use std::fs;
use std::ops::Range;
use std::process::Command;

use sterna::checkpoint::ModelConfig;

use crate::checkpoints::{bits_of, load};
use crate::opened;
use crate::rotated::rotated_hybrid;
use crate::split::{number, size, text_end, value_end};

/// The keys whose values a reader has to believe: any value in their range is a model.
const BELIEVED: [&str; 10] = [
    "prism.hadamard.gdn_v_grouped",
    "prism.hadamard.sign_values",
    "qwen35.attention.layer_norm_rms_epsilon",
    "qwen35.context_length",
    "qwen35.rope.dimension_count",
    "qwen35.rope.freq_base",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.token_type", // Control tokens of some names end an answer.
    "tokenizer.ggml.tokens",
];

/// A part of the header, and what it is for messages.
struct Part {
    name: String,
    bytes: Range<usize>,
    /// Whether a part is the text of many tokens, which are not the model's.
    is_vocabulary: bool,
}

/// Returns the parts of a header in order: the counts, each key with its value, each tensor.
fn parts(bytes: &[u8]) -> Vec<Part> {
    let [tensors, keys] = [8, 16].map(|at| number(bytes, at, 8));
    let mut parts = vec![Part {
        name: "the counts".to_owned(),
        bytes: 0..24,
        is_vocabulary: false,
    }];
    let mut at = 24;
    let name = |at: usize| String::from_utf8_lossy(&bytes[at + 8..text_end(bytes, at)]).into();
    for _ in 0..keys {
        let (start, name) = (at, name(at));
        at = text_end(bytes, at);
        at = value_end(bytes, at + 4, number(bytes, at, 4));
        let is_vocabulary = at - start > 2000;
        parts.push(Part {
            name,
            bytes: start..at,
            is_vocabulary,
        });
    }
    for _ in 0..tensors {
        let (start, name) = (at, name(at));
        at = text_end(bytes, at);
        at += 4 + 8 * size(number(bytes, at, 4)) + 4 + 8;
        parts.push(Part {
            name,
            bytes: start..at,
            is_vocabulary: false,
        });
    }
    parts
}

/// What a file is.
#[derive(PartialEq)]
enum Found {
    Refused(String),
    Model(Box<ModelConfig>, Vec<Vec<u32>>),
}

fn found(bytes: Vec<u8>) -> Found {
    let read = opened(bytes).and_then(|source| {
        let config = ModelConfig::read(&source).map_err(|error| error.to_string())?;
        Ok((config, load(&source)?))
    });
    match read {
        Err(error) => Found::Refused(error),
        Ok((config, model)) => Found::Model(Box::new(config), bits_of(model)),
    }
}

/// Returns what became of the files with one changed byte of `changes`: how many were refused,
/// without an effect, and another model.
fn count(bytes: &[u8], changes: &[(usize, &str)], expected: &Found) -> [usize; 3] {
    let Found::Model(config, bits) = expected else {
        panic!("the file is a model")
    };
    let mut counts = [0; 3];
    for &(at, part) in changes {
        let mut changed = bytes.to_vec();
        changed[at] ^= 1 << (at % 8);
        match found(changed) {
            Found::Refused(error) => {
                let is_named = error.starts_with("model.gguf: ") || error.starts_with("tensor ");
                assert!(is_named, "byte {at} of {part}: {error}");
                counts[0] += 1;
            }
            Found::Model(other, _) if other != *config => {
                assert!(BELIEVED.contains(&part), "byte {at} of {part}");
                counts[2] += 1;
            }
            Found::Model(_, other) => {
                assert!(other == *bits, "byte {at} of {part}");
                counts[1] += 1;
            }
        }
    }
    counts
}

#[test]
fn a_changed_byte_of_the_header_is_refused_by_name_or_changes_nothing() {
    let bytes = rotated_hybrid();
    let parts = parts(&bytes);
    let expected = found(bytes.clone());
    let changes: Vec<(usize, &str)> = parts
        .iter()
        .flat_map(|part| {
            // Of long lists, the first bytes and every 97th.
            let start = part.bytes.start;
            let all = part.bytes.clone();
            let picked = all
                .filter(move |at| !part.is_vocabulary || *at < start + 80 || at.is_multiple_of(97));
            picked.map(|at| (at, &*part.name))
        })
        .collect();
    let half = changes.len() / 2;
    let (one, other) = changes.split_at(half);
    let counts = std::thread::scope(|scope| {
        let threads = [one, other].map(|changes| scope.spawn(|| count(&bytes, changes, &expected)));
        threads.map(|thread| thread.join().unwrap())
    });
    let [refused, same, other] = [0, 1, 2].map(|i| counts[0][i] + counts[1][i]);
    println!("{refused} refused, {same} without an effect, {other} other models");
    assert!(refused > 1000 && same > 100);
}

#[test]
fn a_changed_header_ends_the_program_with_2_and_a_name() {
    let bytes = rotated_hybrid();
    let folder = std::env::temp_dir().join(format!("sterna-header-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let file = folder.join("model.gguf");
    for part in parts(&bytes).iter().filter(|part| {
        part.name.ends_with("head_count")
            || part.name.ends_with("inner_size")
            || part.name.ends_with("hadamard.block_size")
            || part.name == "blk.0.ssm_out.weight"
            || part.name == "the counts"
    }) {
        let mut changed = bytes.clone();
        changed[part.bytes.end - 1] ^= 1; // The highest byte of a size or of an offset.
        fs::write(&file, changed).unwrap();
        let program = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(["--port", "0", "--host", "127.0.0.1", "--model"])
            .arg(&file)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&program.stderr);
        assert_eq!(program.status.code(), Some(2), "{}: {error}", part.name);
        let is_named = ["model.gguf: ", "tensor blk.0.ssm_out.weight: "]
            .iter()
            .any(|name| error.contains(name));
        assert!(is_named, "{}: {error}", part.name);
    }
    fs::remove_dir_all(folder).unwrap();
}
