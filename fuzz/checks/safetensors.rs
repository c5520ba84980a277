//! Loads a model from a file of tensors. The data is the file's header, and the tensors of a toy
//! model follow it. If the first byte is `!`, the rest is the whole file.

use std::sync::LazyLock;

use sterna::model::toy;
use sterna::model::{LoadOptions, Model, Source};
use sterna_kernels::{Isa, Kernels};

static TOY: LazyLock<(Vec<u8>, Vec<u8>)> = LazyLock::new(|| {
    let toy = toy::source();
    let file = |name| toy.read(name).expect("readable").expect("present").to_vec();
    let tensors = file("model.safetensors");
    let length = u64::from_le_bytes(tensors[..8].try_into().expect("eight bytes"));
    (file("config.json"), tensors[8 + length as usize..].to_vec())
});

/// Checks that a file of tensors loads or is refused.
pub fn check(data: &[u8]) {
    let (config, payload) = &*TOY;
    let tensors = match data.split_first() {
        Some((b'!', file)) => file.to_vec(),
        _ => [&(data.len() as u64).to_le_bytes()[..], data, payload].concat(),
    };
    let source = Source::in_memory([
        ("config.json".to_owned(), config.clone()),
        ("model.safetensors".to_owned(), tensors),
    ]);
    let kernels = Kernels::new(Isa::best()).expect("the best instruction set is available");
    drop(Model::load(&source, LoadOptions::new(kernels, 1)).map(drop));
}
