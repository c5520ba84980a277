//! Checkpoints that no fixture has.

use std::fs;
use std::path::PathBuf;

use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize};
use serde_json::{Value, json};
use sterna::demo as embedded;

use super::{Scratch, fixture};

const JSON_FILES: [&str; 4] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// Writes the demo, a trained model.
pub(crate) fn demo(scratch: &Scratch) -> PathBuf {
    let directory = scratch.path("demo");
    fs::create_dir(&directory).unwrap();
    let source = embedded::source();
    for name in JSON_FILES.into_iter().chain(["model.safetensors"]) {
        let content = source.read(name).unwrap().unwrap();
        fs::write(directory.join(name), &*content).unwrap();
    }
    directory
}

/// Writes masters whose values are −s, 0 and s, with "quantization_mode": "online".
pub(crate) fn ternary_masters(scratch: &Scratch) -> PathBuf {
    floats(scratch, "masters", |code| (f32::from(code) - 1.0) * 0.375)
}

/// Writes the floats −1, 0 and 1 beside the scales.
pub(crate) fn ones(scratch: &Scratch) -> PathBuf {
    floats(scratch, "ones", |code| f32::from(code) - 1.0)
}

/// Writes the packed weights of a fixture as floats. Masters have no scales.
fn floats(scratch: &Scratch, name: &str, value: impl Fn(u8) -> f32) -> PathBuf {
    let directory = scratch.path(name);
    fs::create_dir(&directory).unwrap();
    let source = fixture("bitnet-blocks");
    for name in JSON_FILES {
        fs::copy(source.join(name), directory.join(name)).unwrap();
    }
    let are_masters = name == "masters";
    if are_masters {
        let text = fs::read(source.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&text).unwrap();
        config["quantization_config"]["quantization_mode"] = json!("online");
        fs::write(directory.join("config.json"), config.to_string()).unwrap();
    }
    let file = fs::read(source.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let tensors = tensors.tensors().into_iter();
    let tensors = tensors.filter(|(name, _)| !(are_masters && name.ends_with("_scale")));
    let tensors = tensors.map(|(name, view)| {
        if view.dtype() != Dtype::U8 {
            return (
                name,
                view.dtype(),
                view.shape().to_vec(),
                view.data().to_vec(),
            );
        }
        let quarters = (0..4).flat_map(|i| view.data().iter().map(move |byte| byte >> (2 * i) & 3));
        let bytes = quarters.flat_map(|code| bf16::from_f32(value(code)).to_le_bytes());
        let shape = vec![view.shape()[0] * 4, view.shape()[1]];
        (name, Dtype::BF16, shape, bytes.collect())
    });
    let tensors: Vec<_> = tensors.collect();
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let file = serialize(views, None).unwrap();
    fs::write(directory.join("model.safetensors"), file).unwrap();
    directory
}
