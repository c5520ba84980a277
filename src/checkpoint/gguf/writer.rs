//! Writes the header of a GGUF file: metadata, and where each tensor is.
//!
//! Source: the GGUF specification, version 3.

use super::entries::{MetadataEntries, put_entries, put_text};
use super::type_numbers;
use crate::checkpoint::tensor::Storage;

/// The alignment of tensors, which the file need not state.
const ALIGNMENT: usize = 32;

/// A tensor in the header of a file that is written.
pub(crate) struct GgufTensor {
    /// The name in the file.
    pub(crate) name: String,
    /// The sizes, the outermost first.
    pub(crate) shape: Vec<usize>,
    pub(crate) storage: Storage,
    pub(crate) bytes: usize,
}

/// Returns the bytes of the header, up to the first tensor. Each tensor is followed by
/// [`padding`] bytes.
pub(crate) fn header(metadata: &MetadataEntries, tensors: &[GgufTensor]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3_u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    put_entries(metadata, &mut out);
    let mut offset = 0_u64;
    for tensor in tensors {
        put_text(&tensor.name, &mut out);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        for size in tensor.shape.iter().rev() {
            out.extend((*size as u64).to_le_bytes());
        }
        let number = type_numbers::type_number(tensor.storage);
        let number = number.expect("the caller chose a storage that GGUF has");
        out.extend(number.to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += (tensor.bytes + padding(tensor.bytes)) as u64;
    }
    out.resize(out.len() + padding(out.len()), 0);
    out
}

/// Returns the bytes up to the next tensor after `bytes`.
pub(crate) fn padding(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT) - bytes
}
