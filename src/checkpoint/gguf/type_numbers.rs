//! The layouts that each type number of GGUF can mean.
//!
//! Several layouts share a number, because forks chose the same one.

use safetensors::Dtype;

use crate::checkpoint::blocks::BlockLayout::{self, *};
use crate::checkpoint::blocks::I2sOrder;
use crate::checkpoint::tensor::Storage;

/// Returns the layouts that a type number can mean, or why this engine reads none of them.
pub(super) fn candidates(type_number: u32) -> Result<&'static [Storage], &'static str> {
    const fn blocks(layout: BlockLayout) -> Storage {
        Storage::Blocks(layout)
    }
    Ok(match type_number {
        0 => &[Storage::Plain(Dtype::F32)],
        1 => &[Storage::Plain(Dtype::F16)],
        30 => &[Storage::Plain(Dtype::BF16)],
        2 => const { &[blocks(Q4)] },
        8 => const { &[blocks(Q8)] },
        12 => const { &[blocks(Q4K)] },
        14 => const { &[blocks(Q6K)] },
        34 => const { &[blocks(Tq1)] },
        35 => const { &[blocks(Tq2)] },
        36 => const { &[blocks(I2s(I2sOrder::X86))] },
        41 => const { &[blocks(Q1)] },
        42 => const { &[blocks(Q2Group64), blocks(Q2Group128)] },
        135 => const { &[blocks(Iq2Bn)] },
        142 => const { &[blocks(Q2Group128)] },
        143 => const { &[blocks(Ptq1)] },
        38 => {
            return Err(
                "TL1 stores its weights in tiles whose sizes are not in the file; use an I2_S or \
                 TQ2_0 file of the same model",
            );
        }
        39 => {
            return Err(
                "this number means TL2, whose tile sizes are not in the file, or MXFP4, which is \
                 not ternary; use an I2_S or TQ2_0 file of the same model",
            );
        }
        _ => return Err("this engine does not read this type"),
    })
}

/// Returns the fewest bytes that a tensor of this type number can have.
pub(super) fn least_bytes(type_number: u32, rows: usize, columns: usize) -> u64 {
    let candidates = candidates(type_number).unwrap_or_default().iter();
    let bytes = candidates.filter_map(|storage| storage.tensor_bytes(rows, columns));
    bytes.min().map_or(1, |bytes| bytes as u64)
}

/// Returns the type number under which a storage is written, or `None` if this engine does not
/// write it.
pub(super) fn type_number(storage: Storage) -> Option<u32> {
    // The orders of I2_S share a number, so only the usual one is written. Groups of 128 are
    // PQ2_0, because 42 means groups of 64 upstream.
    let written = |number: &&u32| match candidates(**number) {
        Ok([Storage::Blocks(Q2Group64), ..]) => storage == Storage::Blocks(Q2Group64),
        Ok(candidates) => candidates == [storage],
        Err(_) => false,
    };
    let numbers = [0, 1, 30, 2, 8, 12, 14, 34, 35, 36, 41, 42, 135, 142, 143];
    numbers.iter().find(written).copied()
}
