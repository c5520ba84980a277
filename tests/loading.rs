//! Loading takes hardly more memory than the loaded model. The test measures the memory of its
//! process, so it is alone in it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use sterna::checkpoint::Source;
use sterna::checkpoint::synthetic::Shape;
use sterna::model::{LoadOptions, Model, toy};
use sterna_kernels::{Isa, Kernels};

/// A shape with the large parts of a real model: an embedding that becomes a screened head, and
/// ternary weights.
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
fn loading_takes_hardly_more_memory_than_the_loaded_model() {
    let checkpoint = Checkpoint::new(&SHAPE);
    let kernels = Kernels::new(Isa::best()).unwrap();
    let options = LoadOptions {
        max_step_tokens: 16, // So the memory of steps is small.
        max_logits_rows: 1,
        ..LoadOptions::new(kernels, 2)
    };
    let before = kilobytes("VmRSS");
    let model = Model::load(&Source::directory(&checkpoint.0), options).unwrap();
    let (left, peak) = (kilobytes("VmRSS") - before, kilobytes("VmHWM") - before);
    let weights = model.weight_bytes() / 1024;
    assert!(
        weights > 60 << 10,
        "{weights} kB of weights are too few to measure"
    );
    // All weights have been written, so they are in memory. The memory of steps is hardly used yet.
    assert!(
        (weights..weights + weights / 10).contains(&left),
        "the model takes {left} kB for {weights} kB of weights"
    );
    // The peak would be about twice as high if the pages of the file stayed in memory, or if
    // packing made copies.
    assert!(
        peak <= left + left * 3 / 10,
        "loading takes {peak} kB for a model of {left} kB"
    );
}

/// A directory with a checkpoint, removed on drop.
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
        // If this fails, the system cleans its temporary directory.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns a figure of this process from `/proc/self/status`.
fn kilobytes(name: &str) -> usize {
    let status = fs::read_to_string(Path::new("/proc/self/status")).unwrap();
    let mut lines = status.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = lines.find(|(key, _)| *key == name).unwrap();
    value.trim().trim_end_matches(" kB").parse().unwrap()
}
