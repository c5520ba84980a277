//! A converted model is the same model: the same bits of logits, the same tokens of texts and
//! chats, the same stop tokens. What a container cannot hold is refused by name, and a conversion
//! that fails leaves nothing behind.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

#[path = "../harness/checkpoint_text.rs"]
mod checkpoint_text;
#[path = "../harness/checkpoints.rs"]
mod checkpoints;
mod golden;
mod inputs;
mod pairs;
mod recurrent;
mod refusals;
mod writing;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::Parser;
use sterna::checkpoint::convert::Watch;
use sterna::config::{Cli, Command, ConvertConfig};
use sterna::convert::convert;

pub(crate) use checkpoint_text::text_of;
pub(crate) use checkpoints::{computed_bits, fixture, load};

/// All containers, as flags.
pub(crate) const CONTAINERS: [&str; 7] = ["hf", "bin", "i2_s", "tq1_0", "tq2_0", "q2_0", "pq2_0"];

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
