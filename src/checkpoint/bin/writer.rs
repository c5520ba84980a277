//! Writes the parts of a `.bin` file that are not values, in variant A: a scale only where there is
//! one.

use safetensors::Dtype;

use super::table::{MAGIC, VERSION};
use crate::checkpoint::tensor::Storage;

/// Returns what comes before the tensors.
pub(crate) fn head(config: &[u8], tensors: usize) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    for number in [VERSION, config.len() as u32] {
        out.extend(number.to_le_bytes());
    }
    out.extend(config);
    out.extend((tensors as u32).to_le_bytes());
    out
}

/// Returns what comes before the values of a tensor, or `None` if the format has no number for its
/// storage. Packed rows have a multiple of 128 weights.
pub(crate) fn entry(
    name: &str,
    storage: Storage,
    shape: &[usize],
    scale: Option<f32>,
) -> Option<Vec<u8>> {
    let number = match storage {
        Storage::Interleaved => 0,
        Storage::Plain(Dtype::F32) => 1,
        Storage::Plain(Dtype::F16) => 2,
        Storage::Plain(Dtype::BF16) => 3,
        _ => return None,
    };
    let (columns, rows) = shape.split_last()?;
    let bytes = storage.tensor_bytes(rows.iter().product(), *columns)?;
    let stored_columns = match storage {
        Storage::Interleaved => columns / 4,
        _ => *columns,
    };
    let mut out = (name.len() as u32).to_le_bytes().to_vec();
    out.extend(name.as_bytes());
    let sizes = rows
        .iter()
        .chain([&stored_columns])
        .map(|size| *size as u32);
    let numbers = [number, shape.len() as u32].into_iter().chain(sizes);
    let numbers = numbers.chain([u32::from(scale.is_some())]);
    out.extend(numbers.flat_map(u32::to_le_bytes));
    out.extend(scale.into_iter().flat_map(f32::to_le_bytes));
    out.extend((bytes as u64).to_le_bytes());
    Some(out)
}
