//! Tensors into the kernels' layouts: two bits a ternary weight, half or single precision for the rest.
//!
//! Always true: every value that is kept is finite and every weight code is 0, 1 or 2, or it is an error
//! that names the tensor. The number of workers changes no value.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use indicatif::ProgressBar;
use safetensors::Dtype;
use sterna_kernels::{DenseMatrix, Packing, PanelMut, TernaryMatrix};

use super::census::Census;
use super::checkpoint::{LoadError, Tensor};
use super::pool::{Pool, ranges, split_rows};

/// Magnitudes from here on round to infinity in half precision.
const F16_OVERFLOW: f32 = 65_520.0;
/// Values that are converted at once.
const CHUNK: usize = 1024;

/// Packs one matrix after the other on all workers, and counts what it packs.
pub(super) struct Packer<'a> {
    pub(super) pool: &'a mut Pool,
    pub(super) packing: Packing,
    pub(super) census: Census,
    pub(super) progress: ProgressBar,
}

impl Packer<'_> {
    /// Packs U8 `[rows / 4, columns]`: bits 2i and 2i + 1 of byte (j, c) are the code of row i · rows /
    /// 4 + j.
    pub(super) fn packed(
        &mut self,
        tensor: &Tensor<'_>,
        rows: usize,
        columns: usize,
    ) -> Result<TernaryMatrix, LoadError> {
        if !rows.is_multiple_of(4) {
            return Err(tensor.error(format!("{rows} rows cannot be packed by four")));
        }
        let quarter = rows / 4;
        tensor.expect_shape(&[quarter, columns])?;
        self.pack(tensor, rows, columns, |row, codes, _| {
            let bytes = &tensor.bytes[row % quarter * columns..][..columns];
            let shift = 2 * (row / quarter);
            let mut invalid = 0;
            for (code, byte) in codes.iter_mut().zip(bytes) {
                *code = byte >> shift & 3;
                invalid |= *code & (*code >> 1);
            }
            if invalid == 0 {
                Ok(())
            } else {
                Err(tensor.error(format!("a packed code of row {row} is 3")))
            }
        })
    }

    /// Packs floats `[rows, columns]`.
    pub(super) fn masters(
        &mut self,
        tensor: &Tensor<'_>,
        rows: usize,
        columns: usize,
        rounding: Rounding,
    ) -> Result<TernaryMatrix, LoadError> {
        tensor.expect_shape(&[rows, columns])?;
        let row_bytes = row_bytes(tensor, columns)?;
        self.pack(tensor, rows, columns, |row, codes, floats| {
            read_floats(
                tensor,
                &tensor.bytes[row * row_bytes..][..row_bytes],
                floats,
            )?;
            match rounding {
                // Rounding half to even and clamping: ±0.5 becomes 0, and everything beyond ±1.
                Rounding::Scaled(factor) => {
                    for (code, float) in codes.iter_mut().zip(floats) {
                        let scaled = *float * factor;
                        *code = 1 + u8::from(scaled > 0.5) - u8::from(scaled < -0.5);
                    }
                }
                Rounding::MustBeTernary => {
                    if floats.iter().any(|float| ![-1.0, 0.0, 1.0].contains(float)) {
                        return Err(
                            tensor.error(format!("row {row} has a weight that is not -1, 0 or 1"))
                        );
                    }
                    for (code, float) in codes.iter_mut().zip(floats) {
                        *code = 1 + u8::from(*float > 0.0) - u8::from(*float < 0.0);
                    }
                }
            }
            Ok(())
        })
    }

    /// Packs a matrix on all workers. `write_codes(row, codes, floats)` writes weight + 1 for a row;
    /// `floats` is memory for it.
    fn pack(
        &mut self,
        tensor: &Tensor<'_>,
        rows: usize,
        columns: usize,
        write_codes: impl Fn(usize, &mut [u8], &mut [f32]) -> Result<(), LoadError> + Sync,
    ) -> Result<TernaryMatrix, LoadError> {
        let mut matrix = TernaryMatrix::new(rows, columns, self.packing);
        let mut panels: Vec<PanelMut<'_>> = matrix.panels_mut().collect();
        let shares: Vec<_> = ranges(panels.len(), self.pool.workers()).collect();
        let results = self
            .pool
            .run_parts(split_rows(&mut panels, 1, shares), |_, panels| {
                let (mut codes, mut floats, mut census) =
                    (vec![1; columns], vec![0.0; columns], Census::default());
                for panel in panels {
                    for row in panel.rows() {
                        write_codes(row, &mut codes, &mut floats)?;
                        census.count(&codes);
                        panel.set_row(row, &codes);
                    }
                }
                Ok(census)
            });
        for census in results {
            self.census += census?;
        }
        self.progress.inc(tensor.bytes.len() as u64);
        Ok(matrix)
    }

    /// mean|W|. Sums of rows are added in the order of the rows, so the number of workers does not matter.
    pub(super) fn mean_magnitude(
        &mut self,
        tensor: &Tensor<'_>,
        rows: usize,
        columns: usize,
    ) -> Result<f32, LoadError> {
        let row_bytes = row_bytes(tensor, columns)?;
        let mut sums = vec![0.0; rows];
        let shares = ranges(rows, self.pool.workers());
        let parts = shares.clone().zip(split_rows(&mut sums, 1, shares));
        let results = self.pool.run_parts(parts, |_, (rows, sums)| {
            let mut floats = vec![0.0; columns];
            for (row, sum) in rows.zip(sums) {
                read_floats(
                    tensor,
                    &tensor.bytes[row * row_bytes..][..row_bytes],
                    &mut floats,
                )?;
                *sum = sum_magnitudes(&floats);
            }
            Ok(())
        });
        results.into_iter().collect::<Result<(), LoadError>>()?;
        let sum: f64 = sums.iter().sum();
        let mean = (sum / (rows * columns) as f64) as f32;
        if mean.is_finite() {
            Ok(mean)
        } else {
            Err(tensor.error("it has values that are not finite"))
        }
    }

    /// A float matrix: half precision from both half formats, single from single.
    pub(super) fn dense(
        &mut self,
        tensor: &Tensor<'_>,
        rows: usize,
        columns: usize,
    ) -> Result<DenseMatrix, LoadError> {
        tensor.expect_shape(&[rows, columns])?;
        let bytes = row_bytes(tensor, columns)?;
        let shares = ranges(rows, self.pool.workers());
        let matrix = if tensor.dtype == Dtype::F32 {
            let mut values = vec![0.0; rows * columns];
            let parts = shares.clone().zip(split_rows(&mut values, columns, shares));
            let results = self.pool.run_parts(parts, |_, (rows, out)| {
                read_floats(
                    tensor,
                    &tensor.bytes[rows.start * bytes..rows.end * bytes],
                    out,
                )?;
                refuse_non_finite(tensor, out, f32::MAX)
            });
            results.into_iter().collect::<Result<(), LoadError>>()?;
            DenseMatrix::from_f32(rows, columns, values)
        } else {
            let mut values = vec![0_u16; rows * columns];
            let parts = shares.clone().zip(split_rows(&mut values, columns, shares));
            let results = self.pool.run_parts(parts, |_, (rows, out)| {
                read_halves(
                    tensor,
                    &tensor.bytes[rows.start * bytes..rows.end * bytes],
                    out,
                )
            });
            results.into_iter().collect::<Result<(), LoadError>>()?;
            DenseMatrix::from_f16(rows, columns, values)
        };
        self.progress.inc(tensor.bytes.len() as u64);
        Ok(matrix)
    }
}

/// How floats become −1, 0 or 1.
#[derive(Clone, Copy)]
pub(super) enum Rounding {
    /// round(w · factor), clamped.
    Scaled(f32),
    /// They are already.
    MustBeTernary,
}

/// Bytes of a row of a float tensor.
fn row_bytes(tensor: &Tensor<'_>, columns: usize) -> Result<usize, LoadError> {
    match tensor.dtype {
        Dtype::F32 => Ok(columns * 4),
        Dtype::F16 | Dtype::BF16 => Ok(columns * 2),
        dtype => Err(tensor.error(format!(
            "{dtype:?} where floats (F32, F16 or BF16) are expected"
        ))),
    }
}

/// Converts values of a float tensor.
pub(super) fn read_floats(
    tensor: &Tensor<'_>,
    bytes: &[u8],
    out: &mut [f32],
) -> Result<(), LoadError> {
    assert_eq!(
        bytes.len(),
        row_bytes(tensor, out.len())?,
        "the bytes of as many values"
    );
    if tensor.dtype == Dtype::F32 {
        for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
            *out = f32::from_le_bytes(*bytes);
        }
        return Ok(());
    }
    let mut halves = [0; CHUNK];
    for (out, bytes) in out.chunks_mut(CHUNK).zip(bytes.chunks(2 * CHUNK)) {
        let halves = &mut halves[..out.len()];
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks().0) {
            *half = u16::from_le_bytes(*bytes);
        }
        if tensor.dtype == Dtype::BF16 {
            halves.reinterpret_cast::<bf16>().convert_to_f32_slice(out);
        } else {
            halves.reinterpret_cast::<f16>().convert_to_f32_slice(out);
        }
    }
    Ok(())
}

/// Converts values of a half-precision tensor of either format to IEEE half precision, as bits.
fn read_halves(tensor: &Tensor<'_>, bytes: &[u8], out: &mut [u16]) -> Result<(), LoadError> {
    let mut floats = [0.0; CHUNK];
    for (out, bytes) in out.chunks_mut(CHUNK).zip(bytes.chunks(2 * CHUNK)) {
        let floats = &mut floats[..out.len()];
        read_floats(tensor, bytes, floats)?;
        refuse_non_finite(tensor, floats, F16_OVERFLOW)?;
        out.reinterpret_cast_mut::<f16>()
            .convert_from_f32_slice(floats);
    }
    Ok(())
}

/// # Errors
/// If a value is not finite, or its magnitude is `limit` or more.
pub(super) fn refuse_non_finite(
    tensor: &Tensor<'_>,
    values: &[f32],
    limit: f32,
) -> Result<(), LoadError> {
    let fits = |value: &f32| value.abs() < limit; // NaN does not.
    // Without leaving early, so that this takes several values at once.
    if values.iter().fold(true, |all, value| all & fits(value)) {
        return Ok(());
    }
    let value = values
        .iter()
        .find(|value| !fits(value))
        .unwrap_or(&f32::NAN);
    Err(tensor.error(format!(
        "{value} does not fit the range of the format that it is kept in"
    )))
}

/// The only value of a scale.
pub(super) fn one_float(tensor: &Tensor<'_>) -> Result<f32, LoadError> {
    if tensor.shape.iter().product::<usize>() != 1 {
        return Err(tensor.error(format!(
            "its shape is {:?}, a scale is one value",
            tensor.shape
        )));
    }
    let mut value = [0.0];
    row_bytes(tensor, 1)?;
    read_floats(tensor, tensor.bytes, &mut value)?;
    match value[0] {
        scale if scale.is_normal() && scale > 0.0 => Ok(scale),
        scale => Err(tensor.error(format!("{scale} cannot be a scale"))),
    }
}

/// Σ|x| over eight lanes, in double precision.
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

    fn tensor(dtype: Dtype, bytes: &[u8]) -> Tensor<'_> {
        Tensor {
            name: "t".to_owned(),
            dtype,
            shape: vec![bytes.len() / 2],
            bytes,
        }
    }

    #[test]
    fn bf16_becomes_f16_or_is_refused_when_too_large() {
        let to_bytes = |values: &[f32]| {
            values
                .iter()
                .flat_map(|&v| bf16::from_f32(v).to_le_bytes())
                .collect::<Vec<_>>()
        };
        let bytes = to_bytes(&[1.0, -0.5, 3.25, 65_024.0]);
        let mut out = [0; 4];
        read_halves(&tensor(Dtype::BF16, &bytes), &bytes, &mut out).unwrap();
        assert_eq!(
            out.map(|bits| f16::from_bits(bits).to_f32()),
            [1.0, -0.5, 3.25, 65_024.0]
        );
        for large in [65_536.0, f32::INFINITY, f32::NAN] {
            let bytes = to_bytes(&[1.0, large]);
            let error = read_halves(&tensor(Dtype::BF16, &bytes), &bytes, &mut out[..2])
                .expect_err("too large");
            assert!(error.to_string().contains("tensor t"), "{error}");
        }
    }

    #[test]
    fn magnitudes_are_summed_whole() {
        let values: Vec<f32> = (0..1003)
            .map(|i| if i % 2 == 0 { i as f32 } else { -(i as f32) })
            .collect();
        assert_eq!(sum_magnitudes(&values), f64::from((0..1003).sum::<i32>()));
    }
}
