//! The configuration of a checkpoint: its hyperparameters, read from the JSON files beside the
//! weights, from the `config.json` in a `.bin` file, or from the metadata of a GGUF file.
//!
//! Invariant: the sizes of a [`ModelConfig`] agree with each other, and this engine computes every
//! setting in it. Any other setting is an error that names the field; nothing is guessed.

mod experts;
mod gemma3;
mod gguf;
mod hyperparameters;
mod json;
mod json_writer;
mod maple;
mod masked_blocks;
mod pooling;
mod qwen3_5;
mod recurrent;
mod rope;
mod rope_json;
mod rotation;
mod stop_tokens;
#[cfg(test)]
mod tests;

pub(crate) use gguf::metadata as gguf_metadata;
pub(crate) use json::stop_tokens;

pub use experts::Experts;
pub(crate) use hyperparameters::MAX_TAPS;
pub use hyperparameters::{LocalLayers, ModelConfig, Quantization, StoredWeights};
pub(crate) use json_writer::{config_json, generation_json, quantization_json};
pub use masked_blocks::{CommittedAttention, MaskedBlocks};
pub use pooling::Pooling;
pub(crate) use qwen3_5::text_part;
pub use recurrent::RecurrentLayers;
pub use rope::RopeScaling;
pub use rotation::Rotation;
