//! What loading takes: hardly more memory than the model that it leaves. Alone in its process, whose memory it measures.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use sterna::model::synthetic::Shape;
use sterna::model::{LoadOptions, Model, Source, toy};
use sterna_kernels::{Isa, Kernels};

/// Of the parts that a real model has much of: an embedding that becomes a screened head, and ternary weights.
const SHAPE: Shape = Shape {
    name: "loading",
    vocab: 40_000,
    hidden: 512,
    intermediate: 4096,
    layers: 8,
    head_dim: 128,
    ..toy::SHAPE
};

#[test]
fn loading_takes_hardly_more_than_what_it_leaves() {
    let checkpoint = Checkpoint::new(&SHAPE);
    let kernels = Kernels::new(Isa::best()).unwrap();
    let options = LoadOptions {
        max_step_tokens: 16, // Else what steps need would count as well.
        max_logits_rows: 1,
        ..LoadOptions::new(kernels, 2)
    };
    let before = kilobytes("VmRSS");
    let model = Model::load(&Source::Directory(checkpoint.0.clone()), options).unwrap();
    let (left, peak) = (kilobytes("VmRSS") - before, kilobytes("VmHWM") - before);
    let weights = model.weight_bytes() / 1024;
    assert!(weights > 60 << 10, "{weights} kB show nothing");
    // All of the weights have been written, so they are in memory; what steps will need, hardly.
    assert!(
        (weights..weights + weights / 10).contains(&left),
        "{left} kB left of {weights} kB of weights"
    );
    // As much again as the packed file if its pages stayed, or if anything were packed by way of a copy.
    assert!(
        peak <= left + left * 3 / 10,
        "{peak} kB to load what takes {left} kB"
    );
}

/// A directory with a checkpoint, removed in the end.
struct Checkpoint(PathBuf);

impl Checkpoint {
    fn new(shape: &Shape) -> Checkpoint {
        let directory = std::env::temp_dir().join(format!("sterna-loading-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let checkpoint = Checkpoint(directory);
        let mut config = shape.config();
        config["eos_token_id"] = 0.into();
        fs::write(checkpoint.0.join("config.json"), config.to_string()).unwrap();
        let file = File::create(checkpoint.0.join("model.safetensors")).unwrap();
        shape.write_tensors(1, BufWriter::new(file)).unwrap();
        checkpoint
    }
}

impl Drop for Checkpoint {
    fn drop(&mut self) {
        // Nothing rests on it; the system's directory for what is temporary is emptied anyway.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A figure of this process, as Linux has it.
fn kilobytes(name: &str) -> usize {
    let status = fs::read_to_string(Path::new("/proc/self/status")).unwrap();
    let mut lines = status.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = lines.find(|(key, _)| *key == name).unwrap();
    value.trim().trim_end_matches(" kB").parse().unwrap()
}
