//! Which layout a type number means in a file.
//!
//! Several layouts share a number, because forks chose the same one. Their blocks differ in size,
//! so the distance between tensors tells them apart. `general.file_type` tells nothing.

use super::header::TensorEntry;
use crate::model::checkpoint::blocks::BlockLayout::{self, *};
use crate::model::checkpoint::blocks::I2sOrder;
use crate::model::checkpoint::tensors::Storage;
use safetensors::Dtype;

/// Returns the layouts that a type number can mean, or why this engine reads none of them.
fn candidates(type_number: u32) -> Result<&'static [Storage], &'static str> {
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

/// Returns the one layout that fits all `entries`, which are the tensors of this type number.
///
/// # Errors
/// If the number is unknown, or the sizes fit no layout or more than one. The error names a tensor.
pub(super) fn storage_of(
    type_number: u32,
    entries: &[&TensorEntry],
) -> Result<Storage, (String, String)> {
    let about = |entry: &TensorEntry, why: &str| {
        let problem = format!("type number {type_number}: {why}");
        (entry.name.clone(), problem)
    };
    let candidates = candidates(type_number).map_err(|why| about(entries[0], why))?;
    let fitting = |storage: &&Storage| entries.iter().all(|entry| entry.fits(**storage));
    let mut found = candidates.iter().filter(fitting);
    if let (Some(storage), None) = (found.next(), found.next()) {
        return Ok(*storage);
    }
    let misfit = |entry: &&&TensorEntry| !candidates.iter().any(|one| entry.fits(*one));
    let entry = entries.iter().find(misfit).unwrap_or(&entries[0]);
    let (rows, columns) = entry.rows_and_columns();
    let tried = candidates
        .iter()
        .map(|storage| match storage.tensor_bytes(rows, columns) {
            Some(bytes) => format!("{} needs {bytes}", storage.name()),
            None => format!("{} cannot store this shape", storage.name()),
        });
    let tried = tried.collect::<Vec<_>>().join(", ");
    let room = entry.room();
    let is_sparse = room as u128 * 256 == rows as u128 * columns as u128 * 42;
    let hint = match (type_number, is_sparse) {
        (42, true) => " (this size is that of a 3:4-sparse format, which is not supported)",
        _ => "",
    };
    let why = format!("it has room for {room} bytes, which fits no known layout: {tried}{hint}");
    Err(about(entry, &why))
}
