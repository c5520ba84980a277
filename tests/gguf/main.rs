//! A GGUF file is the same model as the Hugging Face checkpoint that it was made from: the same
//! bits of logits, the same tokens of texts and chats.
//!
//! `write.py` writes the files. It shares nothing with Sterna's reader.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod attention;
#[path = "../harness/checkpoint_text.rs"]
mod checkpoint_text;
#[path = "../harness/checkpoints.rs"]
mod checkpoints;
mod experts;
mod header;
mod rotated;
mod split;
mod words;

use std::fs;
use std::path::{Path, PathBuf};

use sterna::checkpoint::{ModelConfig, Pooling, Source};
use sterna::text::{Message, TemplateArguments};

use checkpoint_text::text_of;
use checkpoints::{computed_bits, fixture, load};

const TEXTS: [&str; 4] = [
    "The capital of France is Paris.",
    "Numbers: 1, 22, 333, 4444 and 55555; it's we'll DON'T",
    "  two spaces\n\n\tand a tab, Grüße aus Köln! 你好，世界。",
    "<|eot_id|> is no control token here",
];

/// Returns each GGUF file of the fixtures, and of those in the folder `STERNA_FIXTURES`.
fn files() -> Vec<PathBuf> {
    let list = |directory: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(directory).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    };
    let further = std::env::var_os("STERNA_FIXTURES").map(PathBuf::from);
    let folders = std::iter::once(fixture("")).chain(further);
    let directories = folders.flat_map(|folder| list(&folder));
    let files = directories
        .filter(|path| path.is_dir())
        .flat_map(|directory| list(&directory));
    // A file called `model` is the only form of its checkpoint.
    let is_copy = |path: &PathBuf| {
        path.extension()
            .is_some_and(|extension| extension == "gguf")
            && path.file_stem().is_some_and(|stem| stem != "model")
    };
    let mut files: Vec<PathBuf> = files.filter(is_copy).collect();
    files.sort();
    files
}

/// Returns the checkpoint in a GGUF file, without the files beside it.
fn alone(file: &Path) -> Source {
    let files = [("model.gguf".to_owned(), fs::read(file).unwrap())];
    Source::in_memory(files).with_gguf("model.gguf").unwrap()
}

fn beside(file: &Path) -> Source {
    Source::directory(file.parent().unwrap())
}

#[test]
fn a_file_computes_the_bits_of_the_checkpoint_it_was_made_from() {
    let files = files();
    assert!(files.len() >= 5, "the fixtures have GGUF files");
    for file in files {
        let [found, expected] = [alone(&file), beside(&file)].map(|source| computed_bits(&source));
        assert!(found == expected, "{}", file.display());
    }
}

#[test]
fn texts_and_chats_become_the_tokens_of_the_checkpoint_it_was_made_from() {
    for file in files() {
        let [(tokenizer, template), (expected, expected_template)] =
            [alone(&file), beside(&file)].map(|source| text_of(&source));
        let templates = template.zip(expected_template);
        let (template, expected_template) = templates.expect("each fixture has a template");
        let message = |role: &str, content: &str| Message {
            role: role.into(),
            content: content.into(),
            ..Message::default()
        };
        for text in TEXTS {
            let name = file.display();
            let tokens = tokenizer.encode_prompt(text).unwrap();
            assert_eq!(
                tokens,
                expected.encode_prompt(text).unwrap(),
                "{name}: {text:?}"
            );
            let none = TemplateArguments::default();
            let messages = [
                message("user", text),
                message("assistant", "Yes."),
                message("user", text),
            ];
            let tokens = template.prompt(&tokenizer, &messages, &none).unwrap();
            let expected = expected_template.prompt(&expected, &messages, &none);
            assert_eq!(tokens, expected.unwrap(), "{name}: {text:?}");
        }
    }
}

#[test]
fn the_configuration_is_that_of_the_checkpoint_it_was_made_from() {
    for file in files() {
        let config = ModelConfig::read(&alone(&file)).unwrap();
        let expected = ModelConfig::read(&beside(&file)).unwrap();
        let same = ModelConfig {
            unused_parts: expected.unused_parts.clone(),
            quantization: expected.quantization.clone(),
            eos_tokens: expected.eos_tokens.clone(),
            bos_token: expected.bos_token,
            ..config.clone()
        };
        assert_eq!(same, expected, "{}", file.display());
        let ends = &config.eos_tokens;
        assert!(!ends.is_empty(), "{} stops", file.display());
    }
}

/// Returns the error of loading a fixture in which each `from` is replaced by `to`.
fn error_after(from: &str, to: &str) -> String {
    assert_eq!(from.len(), to.len());
    let mut bytes = fs::read(fixture("llama-blocks/llama-blocks-iq2_bn.gguf")).unwrap();
    let places: Vec<usize> = (0..bytes.len())
        .filter(|at| bytes[*at..].starts_with(from.as_bytes()))
        .collect();
    assert!(!places.is_empty(), "{from} occurs");
    for at in places {
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
    let source = Source::in_memory([("model.gguf".to_owned(), bytes)]);
    let source = source
        .with_gguf("model.gguf")
        .map_err(|error| error.to_string());
    let model = source.and_then(|source| load(&source));
    model.map(drop).expect_err("the file is not a whole model")
}

/// Returns the checkpoint in a GGUF file with a further key, whose value has four bytes and this
/// type.
fn with_key(file: &Path, key: &str, (kind, value): (u32, [u8; 4])) -> Source {
    with_entries(file, &[entry(key, kind, &value)])
}

/// Returns a key with a value of this type.
fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    let length = (key.len() as u64).to_le_bytes();
    [&length, key.as_bytes(), &kind.to_le_bytes(), value].concat()
}

/// Returns the checkpoint in a GGUF file with further keys.
fn with_entries(file: &Path, entries: &[Vec<u8>]) -> Source {
    opened(bytes_with_entries(file, entries)).unwrap()
}

/// Opens a GGUF file of these bytes.
fn opened(bytes: Vec<u8>) -> Result<Source, String> {
    let source = Source::in_memory([("model.gguf".to_owned(), bytes)]);
    let source = source.with_gguf("model.gguf");
    source.map_err(|error| error.to_string())
}

/// Returns the bytes of a GGUF file with further keys.
fn bytes_with_entries(file: &Path, entries: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = fs::read(file).unwrap();
    let keys = u64::from_le_bytes(*bytes[16..].first_chunk().unwrap());
    let keys = keys + entries.len() as u64 + 1;
    bytes[16..24].copy_from_slice(&keys.to_le_bytes());
    let mut added = entries.concat();
    // What follows must stay aligned.
    let unused = (32 - (added.len() + 16) % 32) % 32;
    let unused = "x".repeat(if unused == 0 { 32 } else { unused });
    added.extend(entry(&unused, 4, &[0; 4]));
    assert_eq!(added.len() % 32, 0, "{}", added.len());
    bytes.splice(24..24, added);
    bytes
}

/// The last blocks of such a file predict further tokens, and Sterna leaves them out.
#[test]
fn blocks_that_predict_several_tokens_are_no_layers() {
    let file = fixture("qwen35-group64-tied/qwen35-group64-tied-q2_0.gguf");
    let mut bytes = fs::read(&file).unwrap();
    let key = b"qwen35.block_count";
    let at = bytes.windows(key.len()).position(|window| window == key);
    let value = at.unwrap() + key.len() + 4; // After the type.
    assert_eq!(bytes[value..value + 4], 4_u32.to_le_bytes());
    bytes[value] = 5;
    let folder = std::env::temp_dir().join(format!("sterna-nextn-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let changed = folder.join("model.gguf");
    fs::write(&changed, &bytes).unwrap();
    let predicted = |count: u32| {
        let key = "qwen35.nextn_predict_layers";
        with_entries(&changed, &[entry(key, 4, &count.to_le_bytes())])
    };
    assert!(computed_bits(&predicted(1)) == computed_bits(&alone(&file)));
    let error = load(&predicted(0)).map(drop).unwrap_err();
    assert!(error.contains("blk.4."), "{error}");
    let error = ModelConfig::read(&predicted(5)).unwrap_err().to_string();
    assert!(error.contains("nextn_predict_layers"), "{error}");
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn control_tokens_that_end_a_turn_are_stop_tokens_too() {
    let ends = |eos: &str, turn_end: &str| {
        let mut bytes = fs::read(fixture("llama-blocks/llama-blocks-iq2_bn.gguf")).unwrap();
        for (from, to) in [("ggml.eos_token_id", eos), ("<|eot_id|>", turn_end)] {
            assert_eq!(from.len(), to.len());
            for at in 0..bytes.len() {
                if bytes[at..].starts_with(from.as_bytes()) {
                    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
                }
            }
        }
        let source = Source::in_memory([("model.gguf".to_owned(), bytes)]);
        let source = source.with_gguf("model.gguf").unwrap();
        ModelConfig::read(&source).unwrap().eos_tokens
    };
    // 1 is <|end_of_text|>, and the metadata name 4 as EOS.
    assert_eq!(ends("ggml.eos_token_id", "<|eot_id|>"), [1, 4]);
    assert_eq!(ends("ggml.eos_token_id", "<|any_id|>"), [1, 4]);
    for turn_end in ["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|return|>"] {
        assert_eq!(ends("ggml.xyz_token_id", turn_end), [1, 4], "{turn_end}");
    }
    assert_eq!(ends("ggml.xyz_token_id", "<|any_id|>"), [1]);
}

/// llama.cpp reads this key for other architectures. A file that has it is not what it seems.
#[test]
fn a_logarithmic_factor_of_yarn_is_refused_by_name() {
    let file = fixture("qwen3-group64-yarn/qwen3-group64-yarn-q2_0.gguf");
    let config = |value: f32| {
        let key = "qwen3.rope.scaling.yarn_log_multiplier";
        let source = with_key(&file, key, (6, value.to_le_bytes()));
        ModelConfig::read(&source)
    };
    assert!(config(0.0).is_ok());
    let error = config(0.1).unwrap_err().to_string();
    assert!(error.contains("yarn_log_multiplier"), "{error}");
}

#[test]
fn what_is_missing_or_unknown_is_named_as_in_the_file() {
    let error = error_after("blk.0.attn_q.weight", "blk.0.attn_x.weight");
    assert!(
        error.contains("tensor blk.0.attn_q.weight: missing"),
        "{error}"
    );
    let error = error_after("blk.0.ffn_norm.weight", "blk.9.ffn_norm.weight");
    assert!(
        error.contains("tensor blk.0.ffn_norm.weight: missing"),
        "{error}"
    );
    let error = error_after("llama.block_count", "llama.block_xxxxx");
    assert!(error.contains("\"llama.block_count\": missing"), "{error}");
    let error = error_after("\u{5}\0\0\0\0\0\0\0llama", "\u{5}\0\0\0\0\0\0\0mamba");
    assert!(error.contains("must be one of bitnet-b1.58"), "{error}");
    assert!(error.contains("mamba"), "{error}");
}

/// What the checks of all containers find is named by the keys of the file, too.
#[test]
fn sizes_that_contradict_each_other_are_named_as_in_the_file() {
    let file = fixture("llama-blocks/llama-blocks-iq2_bn.gguf");
    let mut bytes = fs::read(file).unwrap();
    let key = b"llama.attention.head_count_kv";
    let at = bytes.windows(key.len()).position(|window| window == key);
    bytes[at.unwrap() + key.len() + 4] = 3;
    let source = opened(bytes).unwrap();
    let error = ModelConfig::read(&source).unwrap_err().to_string();
    let expected = "model.gguf: metadata \"llama.attention.head_count_kv\": must divide \
                    attention.head_count (";
    assert!(error.starts_with(expected), "{error}");
}

/// Files of models that compute embeddings say how to pool. The files of BitNet-embedding say it
/// wrongly.
#[test]
fn a_file_that_states_its_pooling_has_no_head() {
    let key = "qwen3.pooling_type";
    let read = |file: &Path, pooling: u32| {
        let source = with_key(file, key, (4, pooling.to_le_bytes()));
        ModelConfig::read(&source)
    };
    let generating = fixture("qwen3-group64-yarn/qwen3-group64-yarn-q2_0.gguf");
    for (stated, has_head, pooling) in [
        (0, true, Pooling::LastToken),
        (1, false, Pooling::Mean),
        (3, false, Pooling::LastToken),
    ] {
        let config = read(&generating, stated).unwrap();
        assert_eq!(
            (config.has_head, config.pooling),
            (has_head, pooling),
            "{stated}"
        );
    }
    let error = read(&generating, 2).unwrap_err().to_string();
    assert!(error.contains(key) && error.contains("got 2"), "{error}");
    // Its weights tell what it is, so a wrong statement does not count.
    let embedding = fixture("embedding-qwen3/embedding-qwen3-i2_s.gguf");
    let bytes = fs::read(&embedding).unwrap();
    let at = bytes
        .windows(key.len())
        .position(|part| part == key.as_bytes());
    let at = at.unwrap() + key.len() + 4;
    assert_eq!(bytes[at..at + 4], 3_u32.to_le_bytes(), "the last token");
    let mut mean = bytes.clone();
    mean[at..at + 4].copy_from_slice(&1_u32.to_le_bytes());
    let source = Source::in_memory([("model.gguf".to_owned(), mean)]);
    let config = ModelConfig::read(&source.with_gguf("model.gguf").unwrap()).unwrap();
    assert_eq!(
        (config.has_head, config.pooling),
        (false, Pooling::LastToken)
    );
}
