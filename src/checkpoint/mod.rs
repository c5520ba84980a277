//! Checkpoints: their files, and what the files say of a model.
//!
//! Where to read on:
//! - `source.rs` opens a checkpoint, and `tensors.rs` lists its tensors by name.
//! - `gguf/`, `bin/` and `safetensors.rs` are the formats. Each reads from a `folder.rs` and yields
//!   tensors (`tensor.rs`, `order.rs`). `blocks.rs` decodes weights in blocks.
//! - `config/` reads the hyperparameters. `architecture.rs` describes the model families.
//! - `values/` reads the values of a tensor: floats, or ternary codes with their scales.
//! - `convert/` writes a checkpoint into another container; `survey/` says what files hold, whether
//!   or not this engine can load them; `synthetic.rs` makes random checkpoints.
//!
//! To add a file format: write a reader that yields named tensors. Nothing outside of this module
//! knows formats.
//!
//! Invariant: whatever is wrong with a file is an error that names the file or the tensor. Nothing
//! here trusts a length that a file states.
//!
//! Invariant: this module knows nothing of kernels' layouts, threads or forward passes. `model`
//! packs what it reads.

mod architecture;
mod bin;
mod block_writer;
mod blocks;
mod config;
pub mod convert;
mod cursor;
mod error;
mod files;
mod folder;
mod gguf;
mod json;
mod order;
mod safetensors;
mod source;
mod survey;
pub mod synthetic;
mod tensor;
mod tensors;
#[cfg(test)]
mod tests;
mod values;

pub use architecture::{
    Activation, Architecture, BITNET, BITNET_GEMMA3, BITNET_QWEN3, ExpertModules, FAST_DLLM, LLAMA,
    LayerModules, MAPLE, MIXTRAL, QWEN2, QWEN3, QWEN3_5, QWEN3_MOE, RecurrentModules,
    ScaleDirection,
};
pub use bin::BitnetBin;
pub use blocks::I2sOrder;
pub use config::{
    CommittedAttention, Experts, LocalLayers, MaskedBlocks, ModelConfig, Pooling, Quantization,
    RecurrentLayers, RopeScaling, Rotation, StoredWeights,
};
pub use error::LoadError;
pub use folder::{FileBytes, Folder};
pub use gguf::Gguf;
pub use source::{Source, TOOL_TEMPLATE_FILE};
pub use survey::{CodeCounts, ModelFacts, ScaleSummary, Survey, TensorKind};
pub use tensors::LeftOut;

pub(crate) use config::MAX_TAPS;
pub(crate) use error::LoadResult;
pub(crate) use gguf::parts as gguf_parts;
pub(crate) use order::FileOrder;
pub(crate) use safetensors::{INDEX as SAFETENSORS_INDEX, SINGLE as SAFETENSORS_FILE};
pub(crate) use source::{is_bin, is_gguf};
pub(crate) use tensor::{INTERLEAVED_WEIGHTS, Storage, Tensor};
pub(crate) use tensors::{TensorFiles, Tensors};
pub(crate) use values::{
    OneScale, OutputOrder, RowMemory, TernaryForm, WeightStatistics, half_bits, is_ternary,
    master_factor, mean_of, of_model, one_float, order_value_heads, read_floats, read_matrix,
    refuse_non_finite, refuse_other_than_signs, rounded_code, row_bytes, row_magnitude, take_codes,
};

use bin::{entry as bin_entry, head as bin_head};
use blocks::{BlockLayout, ScaleSpan};
use error::require;
use gguf::{
    FileNames, GgufTensor, Metadata, MetadataEntries, MetadataValue, STATED_I2S_ORDER, STOP_TOKENS,
    TOOL_TEMPLATE, has_rotated_rows, head_dim, header as gguf_header, holds_experts,
    padding as gguf_padding, tokenizer_metadata,
};
use json::parse_json;
use tensors::has_tensor;
