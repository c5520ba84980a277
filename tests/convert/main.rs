//! A converted model is the same model: the same bits of logits, the same tokens of texts and
//! chats, the same stop tokens. What a container cannot hold is refused by name, and a conversion
//! that fails leaves nothing behind.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod golden;
mod inputs;
mod pairs;
mod refusals;
mod writing;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::Parser;
use sterna::config::{Cli, Command, ConvertConfig};
use sterna::convert::convert;
use sterna::model::convert::Watch;
use sterna::model::{LoadOptions, Model, Source};
use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::{Batch, PAGE_TOKENS, Page, SequenceId, TokenId};

/// All containers, as flags.
pub(crate) const CONTAINERS: [&str; 7] = ["hf", "bin", "i2_s", "tq1_0", "tq2_0", "q2_0", "pq2_0"];

const TOKENS: usize = 40;

/// A directory that is removed on drop.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new() -> Scratch {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("sterna-convert-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Scratch(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Returns the names of all files and directories in it, also of hidden ones.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // If this fails, the system cleans its temporary directory.
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// Returns the flags of a conversion to a container, with further ones.
pub(crate) fn flags(input: &Path, out: &Path, container: &str, more: &[&str]) -> ConvertConfig {
    let [input, out] = [input, out].map(|path| path.to_str().unwrap());
    let mut args = vec!["sterna", "convert", input, out, "--i2s-order", "x86"];
    match container {
        "hf" | "bin" => args.extend(["--to", container]),
        layout => args.extend(["--to", "gguf", "--layout", layout]),
    }
    args.extend(more);
    match Cli::try_parse_from(args).unwrap().command {
        Some(Command::Convert(config)) => config,
        other => panic!("{other:?}"),
    }
}

/// Returns the name of an output.
pub(crate) fn out_name(container: &str) -> &'static str {
    match container {
        "hf" => "out",
        "bin" => "out.bin",
        _ => "out.gguf",
    }
}

pub(crate) fn converted(input: &Path, out: &Path, container: &str) -> Result<(), Box<dyn Error>> {
    convert(&flags(input, out, container, &[]), &Watch::hidden())
}

pub(crate) fn load(source: &Source) -> Model {
    let kernels = Kernels::new(Isa::best()).unwrap();
    Model::load(source, LoadOptions::new(kernels, 2)).unwrap()
}

/// Returns the bits of the logits after each of some tokens.
pub(crate) fn logits(source: &Source) -> Vec<Vec<u32>> {
    let mut model = load(source);
    let vocab = model.config().vocab;
    let tokens: Vec<TokenId> = (0..TOKENS).map(|i| (i * i % vocab) as TokenId).collect();
    let pages = (0..).map(Page::new).take(TOKENS.div_ceil(PAGE_TOKENS));
    let pages: Vec<Page> = pages.collect();
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
