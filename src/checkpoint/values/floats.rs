//! The values of float tensors.

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use safetensors::Dtype;

use crate::checkpoint::{LoadResult, Storage, Tensor};

/// The number of values that are converted at once.
const CHUNK: usize = 1024;

/// Returns the bytes of a row of a float tensor.
pub(crate) fn row_bytes(tensor: &Tensor<'_>, columns: usize) -> LoadResult<usize> {
    match tensor.storage {
        Storage::Plain(Dtype::F32) => Ok(columns * 4),
        Storage::Plain(Dtype::F16 | Dtype::BF16) => Ok(columns * 2),
        Storage::Blocks(layout) if layout.scale_span().is_none() => {
            let (weights, bytes) = layout.block();
            Ok(columns / weights * bytes)
        }
        storage => {
            let name = storage.name();
            Err(tensor.error(format!("its values must be floats; its type is {name}")))
        }
    }
}

/// Converts values of a float tensor.
pub(crate) fn read_floats(tensor: &Tensor<'_>, bytes: &[u8], out: &mut [f32]) -> LoadResult<()> {
    assert_eq!(
        bytes.len(),
        row_bytes(tensor, out.len())?,
        "the bytes of the values of `out`"
    );
    if let Storage::Blocks(layout) = tensor.storage {
        layout.read_floats(bytes, out);
        return Ok(());
    }
    if tensor.storage == Storage::Plain(Dtype::F32) {
        for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
            *out = f32::from_le_bytes(*bytes);
        }
        return Ok(());
    }
    if tensor.storage == Storage::Plain(Dtype::BF16) {
        for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
            // BF16 is the upper half of an f32.
            *out = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
        }
        return Ok(());
    }
    let mut halves = [0; CHUNK];
    for (out, bytes) in out.chunks_mut(CHUNK).zip(bytes.chunks(2 * CHUNK)) {
        let halves = &mut halves[..out.len()];
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks().0) {
            *half = u16::from_le_bytes(*bytes);
        }
        halves.reinterpret_cast::<f16>().convert_to_f32_slice(out);
    }
    Ok(())
}

/// Returns the values of a float tensor, whose outermost size counts rows, in the order of the
/// matrix.
pub(crate) fn read_matrix(tensor: &Tensor<'_>) -> LoadResult<Vec<f32>> {
    let rows = tensor.shape[0];
    let columns = tensor.shape[1..].iter().product();
    let row_bytes = row_bytes(tensor, columns)?;
    let mut values = vec![0.0; rows * columns];
    for (row, values) in values.chunks_exact_mut(columns).enumerate() {
        let bytes = &tensor.bytes[tensor.file_row(row) * row_bytes..][..row_bytes];
        read_floats(tensor, bytes, values)?;
    }
    Ok(values)
}

/// # Errors
/// If a value is not finite, or its magnitude is `limit` or more.
pub(crate) fn refuse_non_finite(tensor: &Tensor<'_>, values: &[f32], limit: f32) -> LoadResult<()> {
    let fits = |value: &f32| value.abs() < limit; // False for NaN.
    // Without an early exit, the compiler checks several values at once.
    if values.iter().fold(true, |all, value| all & fits(value)) {
        return Ok(());
    }
    let value = values.iter().find(|value| !fits(value));
    let value = value.unwrap_or(&f32::NAN);
    let problem = format!("its value {value} must be finite and below {limit} in magnitude");
    Err(tensor.error(problem))
}

/// Returns the value of a scale.
pub(crate) fn one_float(tensor: &Tensor<'_>) -> LoadResult<f32> {
    let shape = &tensor.shape;
    let problem = format_args!("its shape is {shape:?}, but a scale is one value");
    tensor.require(shape.iter().product::<usize>() == 1, problem)?;
    let mut value = [0.0];
    read_floats(tensor, tensor.bytes, &mut value)?;
    let [scale] = value;
    let problem = format_args!("a scale must be positive and finite; got {scale}");
    tensor.require(scale.is_normal() && scale > 0.0, problem)?;
    Ok(scale)
}

/// Computes Σ|w| of a row of masters.
pub(crate) fn row_magnitude(
    tensor: &Tensor<'_>,
    row: usize,
    floats: &mut [f32],
) -> LoadResult<f64> {
    let row_bytes = row_bytes(tensor, floats.len())?;
    read_floats(
        tensor,
        &tensor.bytes[row * row_bytes..][..row_bytes],
        floats,
    )?;
    Ok(sum_magnitudes(floats))
}

/// Returns the mean magnitude of masters from the sums of their rows, added in order.
pub(crate) fn mean_of(tensor: &Tensor<'_>, sums: &[f64], columns: usize) -> LoadResult<f32> {
    let sum: f64 = sums.iter().sum();
    let mean = (sum / (sums.len() * columns) as f64) as f32;
    tensor.require(mean.is_finite(), "it has infinite or NaN values")?;
    Ok(mean)
}

/// Computes Σ|x| over eight lanes, in double precision.
fn sum_magnitudes(values: &[f32]) -> f64 {
    let (chunks, rest) = values.as_chunks::<8>();
    let mut lanes = [0.0; 8];
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(value.abs());
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|value| f64::from(value.abs())).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn magnitudes_of_all_values_are_summed() {
        let values: Vec<f32> = (0..1003)
            .map(|i| if i % 2 == 0 { i as f32 } else { -(i as f32) })
            .collect();
        assert_eq!(sum_magnitudes(&values), f64::from((0..1003).sum::<i32>()));
    }
}
