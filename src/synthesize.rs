//! `sterna synthesize`: writes a checkpoint in the shape of a real model with random weights, to
//! measure speed and memory without a download.
//!
//! The tokenizer is the demo's, with filler words for the ids that the demo lacks. The filler words
//! have no merges.
//!
//! Invariant: every token id decodes to text, and all files agree on its text.

use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::Path;

use serde_json::Value;

use crate::checkpoint::synthetic::{SHAPES, Shape};
use crate::demo;

/// Writes a checkpoint into `directory`. Creates the directory if it does not exist.
///
/// # Errors
/// If there is no such shape, the directory is not empty, or writing fails.
pub fn synthesize(shape: &str, seed: u64, directory: &Path) -> io::Result<()> {
    let shape = Shape::named(shape).ok_or_else(|| {
        let names: Vec<_> = SHAPES.iter().map(|shape| shape.name).collect();
        invalid(format!(
            "unknown shape {shape:?}; the shapes are {}",
            names.join(", ")
        ))
    })?;
    fs::create_dir_all(directory).map_err(|error| {
        io::Error::new(error.kind(), format!("{}: {error}", directory.display()))
    })?;
    if fs::read_dir(directory)?.next().is_some() {
        return Err(invalid(format!("{} is not empty", directory.display())));
    }
    let demo_config = read_demo("config.json")?;
    let mut config = shape.config();
    for key in ["bos_token_id", "eos_token_id"] {
        config[key] = demo_config[key].clone();
    }
    let write = |name: &str, json: &Value| fs::write(directory.join(name), format!("{json:#}\n"));
    write("config.json", &config)?;
    for name in ["generation_config.json", "tokenizer_config.json"] {
        write(name, &read_demo(name)?)?;
    }
    let tokenizer = filled_up(read_demo("tokenizer.json")?, shape.vocab)?;
    write("tokenizer.json", &tokenizer)?;
    let file = File::create(directory.join("model.safetensors"))?;
    shape.write_tensors(seed, BufWriter::new(file))
}

/// Adds a filler word to `tokenizer` for each id below `vocab` that has no token.
fn filled_up(mut tokenizer: Value, vocab: usize) -> io::Result<Value> {
    // If the vocabulary lacks an added token, readers ignore its stored id and number it after the
    // whole vocabulary. So the added tokens go into the vocabulary.
    let added = tokenizer["added_tokens"].as_array().cloned();
    for token in added.into_iter().flatten() {
        let content = token["content"].as_str().unwrap_or_default();
        tokenizer["model"]["vocab"][content] = token["id"].clone();
    }
    let mut is_taken = vec![false; vocab];
    let known = tokenizer["model"]["vocab"]
        .as_object()
        .into_iter()
        .flat_map(|vocab| vocab.values());
    for id in known {
        let id = id.as_u64().and_then(|id| usize::try_from(id).ok());
        let taken = id.and_then(|id| is_taken.get_mut(id));
        *taken.ok_or_else(|| {
            invalid(format!(
                "the demo's tokenizer has more than the {vocab} tokens of this shape"
            ))
        })? = true;
    }
    for id in (0..vocab).filter(|&id| !is_taken[id]) {
        // `Ġ` is a space in the byte alphabet of the tokenizer.
        tokenizer["model"]["vocab"][format!("Ġword{id}")] = id.into();
    }
    Ok(tokenizer)
}

fn read_demo(name: &str) -> io::Result<Value> {
    let source = demo::source();
    let text = source.read(name).map_err(io::Error::other)?;
    let text = text.ok_or_else(|| io::Error::other(format!("the demo has no {name}")))?;
    serde_json::from_slice(&text).map_err(io::Error::other)
}

fn invalid(problem: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_has_a_token() {
        let tokenizer = filled_up(read_demo("tokenizer.json").unwrap(), 4096).unwrap();
        let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
        let mut ids: Vec<u64> = vocab.values().map(|id| id.as_u64().unwrap()).collect();
        ids.sort_unstable();
        assert_eq!(ids, (0..4096).collect::<Vec<_>>());
    }
}
