//! Loads a model from a `.bin` file. The data is the file.

use sterna::checkpoint::{ModelConfig, Source};
use sterna::model::{LoadOptions, Model};
use sterna_kernels::{Isa, Kernels};

/// Checks that a `.bin` file loads or is refused.
pub fn check(data: &[u8]) {
    let files = [
        ("model.bin", data),
        ("tokenizer.json", b"{}"),
        ("tokenizer_config.json", b"{}"),
    ];
    let files = files.map(|(name, bytes)| (name.to_owned(), bytes.to_vec()));
    let Ok(source) = Source::in_memory(files).with_bin("model.bin") else {
        return;
    };
    drop(ModelConfig::read(&source));
    let kernels = Kernels::new(Isa::best()).expect("the best instruction set is available");
    drop(Model::load(&source, LoadOptions::new(kernels, 1)).map(drop));
}
