//! A `.bin` file is the same model as the Hugging Face checkpoint that it was made from: the same
//! bits of logits.
//!
//! `write.py` writes the files. It shares nothing with Sterna's reader.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

#[path = "../harness/checkpoints.rs"]
mod checkpoints;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};
use sterna::checkpoint::{ModelConfig, Source};

use checkpoints::{computed_bits, load};

const TEXT_FILES: [&str; 3] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
];

/// Returns the `.bin` file of these fixtures with this name.
fn file(fixture: &str, name: &str) -> PathBuf {
    checkpoints::fixture(fixture).join(format!("{fixture}-{name}.bin"))
}

/// Returns the content of a file beside another one.
fn beside(file: &Path, name: &str) -> Vec<u8> {
    fs::read(file.with_file_name(name)).unwrap()
}

/// Returns a `.bin` file with the files of the tokenizer, and nothing else.
fn opened(file: &Path, bytes: Vec<u8>) -> Result<Source, String> {
    let text = TEXT_FILES.map(|name| (name.to_owned(), beside(file, name)));
    let files = text.into_iter().chain([("model.bin".to_owned(), bytes)]);
    let source = Source::in_memory(files).with_bin("model.bin");
    source.map_err(|error| error.to_string())
}

fn alone(file: &Path) -> Source {
    opened(file, fs::read(file).unwrap()).unwrap()
}

/// Variant A and B; a float and a packed head; scales that multiply, scales that divide, and scales
/// of masters; rows with and without padding; linears that stay float.
#[test]
fn a_file_computes_the_bits_of_the_checkpoint_it_was_made_from() {
    for (fixture, name) in [
        ("bitnet-blocks", "a"),
        ("llama-blocks", "b"),
        ("llama-float-modules", "a"),
        ("bitnet-masters-bf16", "b"),
    ] {
        let file = file(fixture, name);
        let directory = Source::open(file.parent().unwrap()).unwrap();
        assert!(
            computed_bits(&alone(&file)) == computed_bits(&directory),
            "{fixture} {name}"
        );
        let (config, expected) = (
            ModelConfig::read(&alone(&file)),
            ModelConfig::read(&directory),
        );
        let (config, expected) = (config.unwrap(), expected.unwrap());
        assert_eq!(config.eos_tokens, expected.eos_tokens, "{fixture}");
    }
}

/// Returns the checkpoint beside `file` with a ternary head, made from the embedding.
fn with_ternary_head(file: &Path) -> Source {
    let weights = beside(file, "model.safetensors");
    let tensors = SafeTensors::deserialize(&weights).unwrap();
    let embedding = tensors.tensor("model.embed_tokens.weight").unwrap();
    let &[rows, columns] = embedding.shape() else {
        panic!("an embedding is a matrix");
    };
    assert_eq!(embedding.dtype(), Dtype::BF16);
    let halves = embedding.data().as_chunks::<2>().0.iter();
    let values: Vec<f32> = halves
        .map(|bytes| half::bf16::from_le_bytes(*bytes).to_f32())
        .collect();
    let sum: f64 = values.iter().map(|value| f64::from(value.abs())).sum();
    let factor = 1.0 / (sum / values.len() as f64) as f32;
    let code = |row: usize, column: usize| {
        let value = (values[row * columns + column] * factor).round_ties_even();
        (value.clamp(-1.0, 1.0) + 1.0) as u8
    };
    let quarter = rows / 4;
    let byte = |at: usize| {
        let (row, column) = (at / columns, at % columns);
        (0..4).fold(0, |byte, i| {
            byte | code(i * quarter + row, column) << (2 * i)
        })
    };
    let head: Vec<u8> = (0..quarter * columns).map(byte).collect();
    let scale = (1.0 / factor).to_le_bytes();
    let mut all: BTreeMap<String, TensorView<'_>> = tensors.iter().map(owned).collect();
    let head = TensorView::new(Dtype::U8, vec![quarter, columns], &head).unwrap();
    all.insert("lm_head.weight".into(), head);
    let scale = TensorView::new(Dtype::F32, vec![1], &scale).unwrap();
    all.insert("lm_head.weight_scale".into(), scale);
    let mut config: Value = serde_json::from_slice(&beside(file, "config.json")).unwrap();
    config["tie_word_embeddings"] = json!(false);
    config["quantization_config"]["modules_to_not_convert"] = json!([]);
    let text = TEXT_FILES.map(|name| (name.to_owned(), beside(file, name)));
    Source::in_memory(text.into_iter().chain([
        ("config.json".to_owned(), config.to_string().into_bytes()),
        (
            "model.safetensors".to_owned(),
            serialize(all, None).unwrap(),
        ),
    ]))
}

fn owned<'a>((name, view): (&str, TensorView<'a>)) -> (String, TensorView<'a>) {
    (name.to_owned(), view)
}

/// The embedding is tied, and `--pack-lm-head` of the converter adds a ternary copy of it.
#[test]
fn a_packed_head_of_a_tied_embedding_computes_as_a_ternary_head() {
    let file = file("bitnet-blocks", "b-head");
    let bits = computed_bits(&alone(&file));
    assert!(bits == computed_bits(&with_ternary_head(&file)));
    let tied = Source::open(file.parent().unwrap()).unwrap();
    assert!(bits != computed_bits(&tied), "the head is another one");
}

#[test]
fn a_path_and_a_directory_with_one_file_open_it() {
    let file = file("bitnet-blocks", "a");
    let expected = computed_bits(&alone(&file));
    assert!(computed_bits(&Source::open(&file).unwrap()) == expected);
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bin-directory");
    drop(fs::remove_dir_all(&directory)); // An earlier run that failed left it.
    fs::create_dir_all(&directory).unwrap();
    let copy = |name: &str, from: &Path| fs::copy(from, directory.join(name)).unwrap();
    for name in TEXT_FILES {
        copy(name, &file.with_file_name(name));
    }
    copy("model.bin", &file);
    // It does not begin as a model of this kind does, as the files of PyTorch.
    fs::write(directory.join("pytorch_model.bin"), "PK, and more").unwrap();
    let open = || Source::open(&directory);
    assert!(computed_bits(&open().unwrap()) == expected);
    // The configuration is in the file; one beside it changes nothing.
    fs::write(directory.join("config.json"), "{}").unwrap();
    assert!(computed_bits(&open().unwrap()) == expected);
    copy("other.bin", &file);
    let error = open().unwrap_err().to_string();
    assert!(
        error.contains("(model.bin, other.bin); give the path of one"),
        "{error}"
    );
    let error = Source::open(&directory.join("pytorch_model.bin")).unwrap_err();
    assert!(
        error.to_string().contains("converted to safetensors"),
        "{error}"
    );
    fs::remove_file(directory.join("tokenizer_config.json")).unwrap();
    let source = Source::open(&directory.join("model.bin")).unwrap();
    let error = load(&source).map(drop).unwrap_err();
    assert!(
        error.contains("tokenizer_config.json: there is no such file beside"),
        "{error}"
    );
}

/// `fuzz/corpus/bin/model` is to show the fuzzer how a whole model looks.
#[test]
fn the_seed_of_the_fuzz_target_is_a_whole_model() {
    let seed = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/bin/model");
    let text = ["tokenizer.json", "tokenizer_config.json"].map(|name| (name.into(), "{}".into()));
    let files = text
        .into_iter()
        .chain([("m.bin".into(), fs::read(seed).unwrap())]);
    let source = Source::in_memory(files).with_bin("m.bin").unwrap();
    assert!(!computed_bits(&source).is_empty());
}

/// Returns the error of loading a file in which the one occurrence of `from` is replaced by `to`.
fn error_after(file: &Path, from: &[u8], to: &[u8]) -> String {
    let mut bytes = fs::read(file).unwrap();
    let mut places = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(from));
    let at = places.next().expect("the pattern occurs");
    assert_eq!(places.next(), None, "the pattern occurs once");
    bytes.splice(at..at + from.len(), to.iter().copied());
    let model = opened(file, bytes).and_then(|source| load(&source));
    model.map(drop).expect_err("the file is not a whole model")
}

#[test]
fn what_does_not_belong_together_is_refused_by_name() {
    let file = file("bitnet-blocks", "a");
    let wider = (br#""hidden_size": 128"#, br#""hidden_size": 256"#);
    let error = error_after(&file, wider.0, wider.1);
    assert!(
        error.contains("tensor model.embed_tokens.weight: its shape"),
        "{error}"
    );
    let name = "model.layers.0.self_attn.q_proj.weight";
    let renamed = name.replace("q_proj", "x_proj");
    // The name is followed by its type, so that it is not the name of the scale.
    let (from, to) = (
        [name.as_bytes(), &[0; 4]].concat(),
        [renamed.as_bytes(), &[0; 4]].concat(),
    );
    let error = error_after(&file, &from, &to);
    assert!(
        error.contains(&format!("tensor {name}: missing")),
        "{error}"
    );
    let to = [name.as_bytes(), &[2, 0, 0, 0]].concat();
    let error = error_after(&file, &from, &to);
    assert!(error.contains(&format!("of tensor {name}: ")), "{error}");
    // The scale is in the table and in a tensor of its own. They must be equal.
    let name = "model.layers.0.self_attn.q_proj.weight_scale";
    let renamed = name.replace("q_proj", "k_proj");
    let error = error_after(&file, name.as_bytes(), renamed.as_bytes());
    assert!(
        error.contains(&format!("{renamed}: it occurs twice")),
        "{error}"
    );
}
