//! A GGUF file is the same model as the Hugging Face checkpoint that it was made from: the same
//! bits of logits, the same tokens of texts and chats.
//!
//! `write.py` writes the files. It shares nothing with Sterna's reader.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::fs;
use std::path::{Path, PathBuf};

use sterna::model::{LoadOptions, Model, ModelConfig, Source};
use sterna::text::{ChatTemplate, Message, TemplateArguments, TextFiles, Tokenizer};
use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::{Batch, PAGE_TOKENS, Page, SequenceId, TokenId};

const TOKENS: usize = 40;
const TEXTS: [&str; 4] = [
    "The capital of France is Paris.",
    "Numbers: 1, 22, 333, 4444 and 55555; it's we'll DON'T",
    "  two spaces\n\n\tand a tab, Grüße aus Köln! 你好，世界。",
    "<|eot_id|> is no control token here",
];

/// Returns each GGUF file of the fixtures.
fn files() -> Vec<PathBuf> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let list = |directory: &Path| -> Vec<PathBuf> {
        fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect()
    };
    let directories = list(&fixtures).into_iter().filter(|path| path.is_dir());
    let files = directories.flat_map(|directory| list(&directory));
    let mut files: Vec<PathBuf> = files
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "gguf")
        })
        .collect();
    files.sort();
    files
}

/// Returns the checkpoint in a GGUF file, without the files beside it.
fn alone(file: &Path) -> Source {
    let files = [("model.gguf".to_owned(), fs::read(file).unwrap())];
    Source::in_memory(files).with_gguf("model.gguf").unwrap()
}

fn beside(file: &Path) -> Source {
    Source::Directory(file.parent().unwrap().to_owned())
}

/// Returns the bits of the logits after each of some tokens.
fn logits(source: &Source) -> Vec<Vec<u32>> {
    let kernels = Kernels::new(Isa::best()).unwrap();
    let mut model = Model::load(source, LoadOptions::new(kernels, 2)).unwrap();
    let vocab = model.config().vocab;
    let tokens: Vec<TokenId> = (0..TOKENS).map(|i| (i * i % vocab) as TokenId).collect();
    let pages: Vec<Page> = (0..)
        .map(Page::new)
        .take(TOKENS.div_ceil(PAGE_TOKENS))
        .collect();
    let mut batch = Batch::new();
    batch.push_row(SequenceId::new(0, 0), 0, &tokens, &pages, TOKENS);
    let mut kv = model.new_kv_store(pages.len()).unwrap();
    let logits = model.forward(&batch, &mut kv);
    let row = |row| {
        let mut values = vec![0.0; vocab];
        logits.copy_row(row, &mut values);
        values.into_iter().map(f32::to_bits).collect()
    };
    (0..TOKENS).map(row).collect()
}

fn text(source: &Source) -> (Tokenizer, ChatTemplate) {
    let vocab = ModelConfig::read(source).unwrap().vocab;
    let tokenizer = source.read("tokenizer.json").unwrap().unwrap();
    let config = source.read("tokenizer_config.json").unwrap();
    let template = source.read("chat_template.jinja").unwrap();
    let files = TextFiles {
        tokenizer: &tokenizer,
        config: config.as_deref(),
        chat_template: template
            .as_deref()
            .map(|bytes| str::from_utf8(bytes).unwrap()),
    };
    let (tokenizer, template) = files.load(u32::try_from(vocab).unwrap()).unwrap();
    (tokenizer, template.expect("the fixture has a template"))
}

#[test]
fn a_file_computes_the_bits_of_the_checkpoint_it_was_made_from() {
    let files = files();
    assert!(files.len() >= 5, "the fixtures have GGUF files");
    for file in files {
        assert!(
            logits(&alone(&file)) == logits(&beside(&file)),
            "{}",
            file.display()
        );
    }
}

#[test]
fn texts_and_chats_become_the_tokens_of_the_checkpoint_it_was_made_from() {
    for file in files() {
        let (tokenizer, template) = text(&alone(&file));
        let (expected, expected_template) = text(&beside(&file));
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
    let file = files()
        .into_iter()
        .find(|file| file.ends_with("llama-blocks-iq2_bn.gguf"))
        .unwrap();
    let mut bytes = fs::read(file).unwrap();
    let places: Vec<usize> = (0..bytes.len())
        .filter(|at| bytes[*at..].starts_with(from.as_bytes()))
        .collect();
    assert!(!places.is_empty(), "{from} occurs");
    for at in places {
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
    let source = Source::in_memory([("model.gguf".to_owned(), bytes)]);
    let kernels = Kernels::new(Isa::best()).unwrap();
    let model = source.with_gguf("model.gguf");
    let model = model.and_then(|source| Model::load(&source, LoadOptions::new(kernels, 1)));
    model
        .map(drop)
        .expect_err("the file is not a whole model")
        .to_string()
}

/// llama.cpp reads this key for other architectures. A file that has it is not what it seems.
#[test]
fn a_logarithmic_factor_of_yarn_is_refused_by_name() {
    let file = files()
        .into_iter()
        .find(|file| file.ends_with("qwen3-group64-yarn-q2_0.gguf"))
        .unwrap();
    let bytes = fs::read(file).unwrap();
    let float = |key: &str, value: f32| {
        let key = [&(key.len() as u64).to_le_bytes()[..], key.as_bytes()].concat();
        [
            key,
            6_u32.to_le_bytes().to_vec(),
            value.to_le_bytes().to_vec(),
        ]
        .concat()
    };
    let config = |value: f32| {
        let mut bytes = bytes.clone();
        let keys = u64::from_le_bytes(*bytes[16..].first_chunk().unwrap()) + 2;
        bytes[16..24].copy_from_slice(&keys.to_le_bytes());
        let mut added = float("qwen3.rope.scaling.yarn_log_multiplier", value);
        // What follows must stay aligned.
        added.extend(float("general.a_key_of_26_bytes_", 0.0));
        assert_eq!(added.len() % 32, 0, "{}", added.len());
        bytes.splice(24..24, added);
        let source = Source::in_memory([("model.gguf".to_owned(), bytes)]);
        ModelConfig::read(&source.with_gguf("model.gguf").unwrap())
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
