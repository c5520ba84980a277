//! The fixtures: checkpoints, and what the reference computes with them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use sterna::checkpoint::{ModelConfig, Source};
use sterna::model::{LoadOptions, Model};
use sterna::text::{ChatTemplate, TextFiles, Tokenizer};
use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::TokenId;

/// A checkpoint and what the reference computes with it.
pub(crate) struct Fixture {
    pub(crate) name: String,
    pub(crate) checkpoint: PathBuf,
    pub(crate) expected: Expected,
    pub(crate) tensors: Vec<u8>,
}

/// The content of `expected.json`.
#[derive(Deserialize)]
pub(crate) struct Expected {
    pub(crate) weights_crc32: u32,
    pub(crate) spread_worst: f64,
    pub(crate) spread_mean: f64,
    pub(crate) stop_tokens: BTreeSet<TokenId>,
    /// By layer, the tokens whose stored output depends on the last bits of its input.
    pub(crate) layer_unstable_tokens: Vec<Vec<usize>>,
    /// How far the reference is from logits without rounded activations, by the columns of a group.
    #[serde(default)]
    pub(crate) float_distances: BTreeMap<usize, f64>,
    pub(crate) prompts: Vec<Prompt>,
    pub(crate) texts: Vec<Text>,
    pub(crate) chats: Vec<Chat>,
}

#[derive(Deserialize)]
pub(crate) struct Prompt {
    pub(crate) prompt: Vec<TokenId>,
    /// Greedy tokens.
    pub(crate) continuation: Vec<TokenId>,
    /// By how much the logit of each greedy token exceeds the second best.
    pub(crate) margins: Vec<f64>,
}

#[derive(Deserialize)]
pub(crate) struct Text {
    pub(crate) text: String,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) decoded: String,
}

#[derive(Deserialize)]
pub(crate) struct Chat {
    pub(crate) messages: Vec<ChatMessage>,
    pub(crate) rendered: String,
    pub(crate) tokens: Vec<TokenId>,
}

#[derive(Deserialize)]
pub(crate) struct ChatMessage {
    pub(crate) role: String,
    pub(crate) content: String,
}

/// Returns the committed fixtures, including the demo's, and those that the environment names.
pub(crate) fn fixtures() -> Vec<Fixture> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec![root.join("tests/fixtures")];
    folders.extend(std::env::var_os("STERNA_FIXTURES").map(PathBuf::from));
    let mut found = Vec::new();
    for folder in folders {
        let entries =
            fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let mut entries: Vec<PathBuf> = entries
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_dir())
            .collect();
        entries.sort();
        assert!(!entries.is_empty(), "{} holds no fixture", folder.display());
        for expected in entries {
            let is_demo = expected == root.join("tests/fixtures/demo");
            let checkpoint = if is_demo {
                root.join("src/demo")
            } else {
                expected.clone()
            };
            found.push(Fixture::read(&checkpoint, &expected));
        }
    }
    found
}

impl Fixture {
    pub(crate) fn read(checkpoint: &Path, expected: &Path) -> Fixture {
        let name = expected.file_name().unwrap().to_string_lossy().into_owned();
        let json = fs::read(expected.join("expected.json"))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let tensors = fs::read(expected.join("expected.safetensors"))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let expected: Expected =
            serde_json::from_slice(&json).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(
            weights_crc32(checkpoint),
            expected.weights_crc32,
            "{name}: the weights in {} have changed since the reference ran; run \
             tests/make_fixtures.py again",
            checkpoint.display(),
        );
        Fixture {
            name,
            checkpoint: checkpoint.to_owned(),
            expected,
            tensors,
        }
    }

    pub(crate) fn source(&self) -> Source {
        Source::open(&self.checkpoint).unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// Returns whether the checkpoint has an output head.
    pub(crate) fn has_head(&self) -> bool {
        ModelConfig::read(&self.source()).unwrap().has_head
    }

    pub(crate) fn model(&self, kernels: Kernels) -> Model {
        Model::load(&self.source(), LoadOptions::new(kernels, 2))
            .unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    pub(crate) fn text(&self) -> (Tokenizer, ChatTemplate) {
        let tokenizer = fs::read(self.checkpoint.join("tokenizer.json")).unwrap();
        let config = fs::read(self.checkpoint.join("tokenizer_config.json")).unwrap();
        let chat_template = fs::read_to_string(self.checkpoint.join("chat_template.jinja")).ok();
        let files = TextFiles {
            tokenizer: &tokenizer,
            config: Some(&config),
            chat_template: chat_template.as_deref(),
            tool_template: None,
        };
        let vocabulary = self
            .model(Kernels::new(Isa::best()).unwrap())
            .config()
            .vocab;
        let (tokenizer, template) = files.load(u32::try_from(vocabulary).unwrap()).unwrap();
        (
            tokenizer,
            template.expect("each fixture has a chat template"),
        )
    }

    /// Returns the values of a stored tensor.
    pub(crate) fn tensor(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.tensors).unwrap();
        let view = file
            .tensor(name)
            .unwrap_or_else(|error| panic!("{}: {name}: {error}", self.name));
        assert_eq!(view.dtype(), Dtype::F32, "{name}");
        view.data()
            .as_chunks()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect()
    }
}

/// Returns the checksum that `weights_crc32` of the script computes.
pub(crate) fn weights_crc32(checkpoint: &Path) -> u32 {
    let is_weights = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        let kinds = [".safetensors", ".gguf"];
        name.starts_with("model") && kinds.iter().any(|kind| name.ends_with(kind))
    };
    let entries = fs::read_dir(checkpoint)
        .unwrap_or_else(|error| panic!("{}: {error}", checkpoint.display()));
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(is_weights)
        .collect();
    files.sort();
    let bytes = files.iter().flat_map(|file| fs::read(file).unwrap());
    !bytes.fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg())
        })
    })
}
