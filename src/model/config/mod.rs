//! The configuration of a checkpoint: its hyperparameters, read from the JSON files beside the
//! weights, from the `config.json` in a `.bin` file, or from the metadata of a GGUF file.
//!
//! Invariant: the sizes of a [`ModelConfig`] agree with each other, and this engine computes every
//! setting in it. Any other setting is an error that names the field; nothing is guessed.

mod gguf;
mod hyperparameters;
mod json;
mod json_writer;
mod rope;
mod stop_tokens;
#[cfg(test)]
mod tests;

pub(super) use gguf::metadata as gguf_metadata;
pub(super) use json::stop_tokens;

pub use hyperparameters::{ModelConfig, Quantization, StoredWeights};
pub(super) use json_writer::{config_json, generation_json, quantization_json};
pub use rope::RopeScaling;
