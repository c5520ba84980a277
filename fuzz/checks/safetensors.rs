//! Loads a model from a file of tensors. The data is the file's header, and the tensors of a tiny
//! model follow it. If the first byte is `!`, the rest is the whole file.

use std::sync::LazyLock;

use sterna::checkpoint::Source;
use sterna::checkpoint::synthetic::Shape;
use sterna::model::toy;
use sterna::model::{LoadOptions, Model};
use sterna_kernels::{Isa, Kernels};

/// The shape of the model. It is loaded in microseconds.
const SHAPE: Shape = Shape {
    name: "tiny",
    vocab: 8,
    hidden: 32,
    intermediate: 32,
    layers: 1,
    heads: 2,
    kv_heads: 1,
    max_position: 16,
    ..toy::SHAPE
};

/// The configuration of the model, and its tensors without a header.
static MODEL: LazyLock<(Vec<u8>, Vec<u8>)> = LazyLock::new(|| {
    let tiny = SHAPE.in_memory(1);
    let file = |name| {
        tiny.read(name)
            .expect("readable")
            .expect("present")
            .to_vec()
    };
    let tensors = file("model.safetensors");
    let length = u64::from_le_bytes(tensors[..8].try_into().expect("eight bytes"));
    (file("config.json"), tensors[8 + length as usize..].to_vec())
});

/// Checks that a file of tensors loads or is refused.
pub fn check(data: &[u8]) {
    let (config, payload) = &*MODEL;
    let tensors = match data.split_first() {
        Some((b'!', file)) => file.to_vec(),
        _ => [&(data.len() as u64).to_le_bytes()[..], data, payload].concat(),
    };
    let source = Source::in_memory([
        ("config.json".to_owned(), config.clone()),
        ("model.safetensors".to_owned(), tensors),
    ]);
    let kernels = Kernels::new(Isa::best()).expect("the best instruction set is available");
    let options = LoadOptions {
        max_step_tokens: 1,
        max_logits_rows: 1,
        ..LoadOptions::new(kernels, 1)
    };
    drop(Model::load(&source, options).map(drop));
}
