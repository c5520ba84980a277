//! A checkpoint: its files, and their tensors by name.
//!
//! To add a file format: write a reader that yields named [`Tensor`]s, and keep formats out of the
//! rest of the model.
//!
//! Invariant: whatever is wrong with a file is an error that names the file or the tensor. Nothing
//! here trusts a length that a file states.

mod bin;
mod block_writer;
mod blocks;
mod cursor;
mod error;
mod files;
mod gguf;
mod index;
mod source;
mod tensors;
#[cfg(test)]
mod tests;

pub use bin::BitnetBin;
pub(super) use bin::{entry as bin_entry, head as bin_head};
pub use blocks::I2sOrder;
pub(super) use blocks::{BlockLayout, ScaleSpan};
pub use error::LoadError;
pub(super) use error::{LoadResult, require};
pub(super) use files::MappedFiles;
pub use gguf::Gguf;
pub(super) use gguf::{
    FileNames, has_rotated_rows, header as gguf_header, padding as gguf_padding, tokenizer_metadata,
};
pub(super) use gguf::{
    GgufTensor, Metadata, MetadataEntries, MetadataValue, STATED_I2S_ORDER, STOP_TOKENS, head_dim,
};
pub(super) use index::TensorFiles;
pub(super) use source::parse_json;
pub use source::{FileBytes, Source};
pub(super) use tensors::{
    INTERLEAVED_WEIGHTS, Storage, Tensor, Tensors, has_tensor, interleaved_row,
};
