//! Packs tensors into the layouts of the kernels: two bits per ternary weight, and half or single
//! precision for the rest.
//!
//! Invariant: every packed value is finite and every weight code is 0, 1 or 2. Otherwise packing
//! returns an error that names the tensor.
//!
//! Invariant: the number of workers changes no value.

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use indicatif::ProgressBar;
use safetensors::Dtype;
use sterna_kernels::{DenseMatrix, GroupSize, HugeSlice, Packing, PanelMut, TernaryMatrix};

use crate::checkpoint::{
    FileOrder, INTERLEAVED_WEIGHTS, LoadResult, OneScale, RowMemory, Storage, Tensor, TensorFiles,
    WeightStatistics, half_bits, mean_of, read_floats, refuse_non_finite, refuse_other_than_signs,
    rounded_code, row_bytes, row_magnitude, take_codes,
};
use crate::model::pool::{Pool, ranges, split_rows};

/// The smallest magnitude that rounds to infinity in half precision.
const F16_OVERFLOW: f32 = 65_520.0;

/// The number of values that are converted at once.
const CHUNK: usize = 1024;

/// The number of bytes of a tensor after which the pages of its file are released.
const RELEASED_AT_ONCE: usize = 32 << 20;

/// Packs one matrix after the other on all workers, and counts the weights.
pub(super) struct Packer<'a> {
    pub(super) pool: &'a mut Pool,
    pub(super) packing: Packing,
    pub(super) statistics: WeightStatistics,
    pub(super) progress: ProgressBar,
    pub(super) files: &'a TensorFiles<'a>,
}

impl Packer<'_> {
    /// Packs U8 `[rows / 4, columns]`. Bits 2i and 2i + 1 of byte (j, c) are the code of row
    /// i · rows / 4 + j.
    pub(super) fn packed(
        &mut self,
        tensor: &Tensor<'_>,
        [rows, columns]: [usize; 2],
    ) -> LoadResult<TernaryMatrix> {
        let problem = format_args!("its {rows} rows are not a multiple of four");
        tensor.require(rows.is_multiple_of(4), problem)?;
        let quarter = rows / 4;
        tensor.expect_shape(&[quarter, columns])?;
        let matrix = TernaryMatrix::new(rows, columns, self.packing);
        self.pack(tensor, matrix, |panel, row, memory| {
            let bytes = &tensor.bytes[row % quarter * columns..][..columns];
            let problem = format_args!("a packed code of row {row} is 3; 0, 1 and 2 are valid");
            tensor.require(take_codes(bytes, row / quarter, &mut memory.codes), problem)?;
            panel.set_row(row, &memory.codes);
            Ok(())
        })
    }

    /// Packs rows of [`Storage::Interleaved`]. Their padding must be zero.
    pub(super) fn interleaved(
        &mut self,
        tensor: &Tensor<'_>,
        [rows, columns]: [usize; 2],
    ) -> LoadResult<TernaryMatrix> {
        tensor.expect_shape(&[rows, columns.next_multiple_of(INTERLEAVED_WEIGHTS)])?;
        let matrix = TernaryMatrix::new(rows, columns, self.packing);
        self.pack(tensor, matrix, |panel, row, memory| {
            tensor.read_interleaved_row(row, &mut memory.codes)?;
            panel.set_row(row, &memory.codes);
            Ok(())
        })
    }

    /// Packs weights that are ternary already and have one scale: blocks, or floats that are each
    /// −s, 0 or s. Returns the matrix and the scale.
    pub(super) fn ternary_values(
        &mut self,
        tensor: &Tensor<'_>,
        shape: [usize; 2],
    ) -> LoadResult<(TernaryMatrix, f32)> {
        tensor.expect_shape(&shape)?;
        let scale = OneScale::default();
        let matrix = TernaryMatrix::new(shape[0], shape[1], self.packing);
        let matrix = self.pack(tensor, matrix, |panel, row, memory| {
            memory.read(tensor, row, None)?;
            for (codes, group_scale) in memory.groups() {
                scale.accept(tensor, codes, group_scale)?;
            }
            panel.set_row(row, &memory.codes);
            Ok(())
        })?;
        Ok((matrix, scale.value()))
    }

    /// Packs weights that are ternary already and have a scale for each group of columns.
    pub(super) fn grouped(
        &mut self,
        tensor: &Tensor<'_>,
        shape: [usize; 2],
        group: GroupSize,
    ) -> LoadResult<TernaryMatrix> {
        tensor.expect_shape(&shape)?;
        let matrix = TernaryMatrix::with_groups(shape[0], shape[1], self.packing, group);
        let matrix = matrix.map_err(|error| tensor.error(error))?;
        self.pack(tensor, matrix, |panel, row, memory| {
            memory.read(tensor, row, Some(group))?;
            let bits = memory
                .scales
                .iter()
                .map(|scale| half_bits(tensor, row, *scale))
                .collect::<LoadResult<Vec<u16>>>()?;
            panel.set_row(row, &memory.codes);
            panel.set_scales(row, &bits);
            Ok(())
        })
    }

    /// Packs floats of the given shape.
    pub(super) fn masters(
        &mut self,
        tensor: &Tensor<'_>,
        shape: [usize; 2],
        rounding: Rounding,
    ) -> LoadResult<TernaryMatrix> {
        tensor.expect_shape(&shape)?;
        let row_bytes = row_bytes(tensor, shape[1])?;
        let matrix = TernaryMatrix::new(shape[0], shape[1], self.packing);
        self.pack(tensor, matrix, |panel, row, memory| {
            let RowMemory { codes, floats, .. } = memory;
            let bytes = &tensor.bytes[tensor.file_row(row) * row_bytes..][..row_bytes];
            read_floats(tensor, bytes, floats)?;
            let factor = match rounding {
                Rounding::Scaled(factor) => factor,
                Rounding::MustBeTernary => {
                    refuse_other_than_signs(tensor, row, floats)?;
                    1.0
                }
            };
            for (code, float) in codes.iter_mut().zip(floats) {
                *code = rounded_code(*float * factor);
            }
            panel.set_row(row, codes);
            Ok(())
        })
    }

    /// Fills `matrix` on all workers. `write_row(panel, row, memory)` writes a row of the panel,
    /// and leaves its codes in the memory.
    fn pack(
        &mut self,
        tensor: &Tensor<'_>,
        mut matrix: TernaryMatrix,
        write_row: impl Fn(&mut PanelMut<'_>, usize, &mut RowMemory) -> LoadResult<()> + Sync,
    ) -> LoadResult<TernaryMatrix> {
        let columns = matrix.columns();
        // Weights without zeros are usual in such a layout.
        let counts = !matches!(tensor.storage, Storage::Blocks(layout) if layout.has_no_zeros());
        let mut panels: Vec<PanelMut<'_>> = matrix.panels_mut().collect();
        let shares = ranges(panels.len(), self.pool.workers());
        let parts = split_rows(&mut panels, 1, shares);
        let results = self.pool.run_parts(parts, |_, panels| {
            let mut memory = RowMemory::of_columns(columns);
            let mut statistics = WeightStatistics::default();
            for panel in panels {
                for row in panel.rows() {
                    write_row(panel, row, &mut memory)?;
                    if counts {
                        statistics.count(&memory.codes);
                    }
                }
            }
            Ok(statistics)
        });
        for statistics in results {
            self.statistics.add(statistics?);
        }
        drop(panels);
        self.consumed(tensor.bytes);
        Ok(matrix)
    }

    /// Computes mean|W|. The sums of the rows are added in the order of the rows, so the number of
    /// workers does not matter.
    pub(super) fn mean_magnitude(
        &mut self,
        tensor: &Tensor<'_>,
        [rows, columns]: [usize; 2],
    ) -> LoadResult<f32> {
        tensor.expect_shape(&[rows, columns])?;
        let mut sums = vec![0.0; rows];
        let shares = ranges(rows, self.pool.workers());
        let parts = shares.clone().zip(split_rows(&mut sums, 1, shares));
        let results = self.pool.run_parts(parts, |_, (rows, sums)| {
            let mut floats = vec![0.0; columns];
            for (row, sum) in rows.zip(sums) {
                *sum = row_magnitude(tensor, row, &mut floats)?;
            }
            Ok(())
        });
        results.into_iter().collect::<LoadResult<()>>()?;
        mean_of(tensor, &sums, columns)
    }

    /// Packs a float matrix: in single precision from F32, otherwise in half precision. Values of
    /// quantized blocks are rounded to it.
    pub(super) fn dense(
        &mut self,
        tensor: &Tensor<'_>,
        [rows, columns]: [usize; 2],
    ) -> LoadResult<DenseMatrix> {
        tensor.expect_shape(&[rows, columns])?;
        if tensor.storage.is_ternary_blocks() {
            return self.dense_from_blocks(tensor, [rows, columns]);
        }
        if tensor.storage == Storage::Plain(Dtype::F32) {
            let mut values = HugeSlice::new(rows * columns);
            self.convert(tensor, columns, &mut values, |bytes, out| {
                read_floats(tensor, bytes, out)?;
                refuse_non_finite(tensor, out, f32::MAX)
            })?;
            put_in_order(tensor, columns, &mut values);
            Ok(DenseMatrix::from_f32(rows, columns, values))
        } else {
            let mut values = HugeSlice::new(rows * columns);
            self.convert(tensor, columns, &mut values, |bytes, out| {
                read_halves(tensor, bytes, out)
            })?;
            put_in_order(tensor, columns, &mut values);
            Ok(DenseMatrix::from_f16(rows, columns, values))
        }
    }

    /// Packs a small float matrix without rounding: in half precision if it holds each value,
    /// otherwise in single precision.
    pub(super) fn exact(
        &mut self,
        tensor: &Tensor<'_>,
        [rows, columns]: [usize; 2],
    ) -> LoadResult<DenseMatrix> {
        tensor.expect_shape(&[rows, columns])?;
        let mut values = HugeSlice::<f32>::new(rows * columns);
        self.convert(tensor, columns, &mut values, |bytes, out| {
            read_floats(tensor, bytes, out)?;
            refuse_non_finite(tensor, out, f32::MAX)
        })?;
        put_in_order(tensor, columns, &mut values);
        let mut halves = HugeSlice::<u16>::new(rows * columns);
        for (half, value) in halves.iter_mut().zip(values.iter()) {
            *half = f16::from_f32(*value).to_bits();
        }
        let is_same = |(half, value): (&u16, &f32)| f16::from_bits(*half).to_f32() == *value;
        match halves.iter().zip(values.iter()).all(is_same) {
            true => Ok(DenseMatrix::from_f16(rows, columns, halves)),
            false => Ok(DenseMatrix::from_f32(rows, columns, values)),
        }
    }

    /// Packs the transpose of a small float matrix, in the precision of [`Packer::dense`].
    pub(super) fn transposed(
        &mut self,
        tensor: &Tensor<'_>,
        [rows, columns]: [usize; 2],
    ) -> LoadResult<DenseMatrix> {
        tensor.expect_shape(&[rows, columns])?;
        let row_bytes = row_bytes(tensor, columns)?;
        let is_single = tensor.storage == Storage::Plain(Dtype::F32);
        let limit = if is_single { f32::MAX } else { F16_OVERFLOW };
        let mut values = HugeSlice::<f32>::new(rows * columns);
        let mut floats = vec![0.0; columns];
        for (row, bytes) in tensor.bytes.chunks_exact(row_bytes).enumerate() {
            read_floats(tensor, bytes, &mut floats)?;
            refuse_non_finite(tensor, &floats, limit)?;
            for (column, float) in floats.iter().enumerate() {
                values[column * rows + row] = *float;
            }
        }
        self.consumed(tensor.bytes);
        if is_single {
            return Ok(DenseMatrix::from_f32(columns, rows, values));
        }
        let mut halves = HugeSlice::<u16>::new(rows * columns);
        let out = halves.reinterpret_cast_mut::<f16>();
        out.convert_from_f32_slice(&values);
        Ok(DenseMatrix::from_f16(columns, rows, halves))
    }

    /// Packs ternary blocks as a float matrix in half precision.
    fn dense_from_blocks(
        &mut self,
        tensor: &Tensor<'_>,
        [rows, columns]: [usize; 2],
    ) -> LoadResult<DenseMatrix> {
        let mut values = HugeSlice::<u16>::new(rows * columns);
        let shares = ranges(rows, self.pool.workers());
        let parts = shares.clone().zip(split_rows(&mut values, columns, shares));
        let results = self.pool.run_parts(parts, |_, (rows, out)| {
            let mut memory = RowMemory::new(tensor);
            for (row, out) in rows.zip(out.chunks_exact_mut(columns)) {
                memory.read(tensor, row, None)?;
                memory.write_floats();
                refuse_non_finite(tensor, &memory.floats, F16_OVERFLOW)?;
                let out = out.reinterpret_cast_mut::<f16>();
                out.convert_from_f32_slice(&memory.floats);
            }
            Ok(())
        });
        results.into_iter().collect::<LoadResult<()>>()?;
        self.consumed(tensor.bytes);
        Ok(DenseMatrix::from_f16(rows, columns, values))
    }

    /// Fills rows of `columns` values from their bytes, on all workers.
    fn convert<T: Send>(
        &mut self,
        tensor: &Tensor<'_>,
        columns: usize,
        values: &mut [T],
        convert: impl Fn(&[u8], &mut [T]) -> LoadResult<()> + Sync,
    ) -> LoadResult<()> {
        let row_bytes = row_bytes(tensor, columns)?;
        let at_once = (RELEASED_AT_ONCE / row_bytes).max(1);
        let rounds = values.chunks_mut(at_once * columns);
        for (values, bytes) in rounds.zip(tensor.bytes.chunks(at_once * row_bytes)) {
            let shares = ranges(values.len() / columns, self.pool.workers());
            let parts = shares.clone().zip(split_rows(values, columns, shares));
            let results = self.pool.run_parts(parts, |_, (rows, out)| {
                convert(&bytes[rows.start * row_bytes..rows.end * row_bytes], out)
            });
            results.into_iter().collect::<LoadResult<()>>()?;
            self.consumed(bytes);
        }
        Ok(())
    }

    /// Records that `bytes` of a file are packed, and releases their memory.
    fn consumed(&mut self, bytes: &[u8]) {
        self.progress.inc(bytes.len() as u64);
        self.files.release(bytes);
    }
}

/// How floats become −1, 0 or 1.
#[derive(Clone, Copy)]
pub(super) enum Rounding {
    /// Round w · factor, and clamp the result.
    Scaled(f32),
    /// Keep −1, 0 and 1; other values are an error.
    MustBeTernary,
}

/// Moves rows in the order of the file to their places in the matrix.
fn put_in_order<T: Copy>(tensor: &Tensor<'_>, columns: usize, values: &mut [T]) {
    if tensor.rows == FileOrder::Same {
        return;
    }
    let in_file = values.to_vec();
    for (row, out) in values.chunks_exact_mut(columns).enumerate() {
        out.copy_from_slice(&in_file[tensor.file_row(row) * columns..][..columns]);
    }
}

/// Converts values of a tensor to the bits of IEEE half precision.
fn read_halves(tensor: &Tensor<'_>, bytes: &[u8], out: &mut [u16]) -> LoadResult<()> {
    let mut floats = [0.0; CHUNK];
    let chunk_bytes = row_bytes(tensor, CHUNK)?;
    for (out, bytes) in out.chunks_mut(CHUNK).zip(bytes.chunks(chunk_bytes)) {
        let floats = &mut floats[..out.len()];
        read_floats(tensor, bytes, floats)?;
        refuse_non_finite(tensor, floats, F16_OVERFLOW)?;
        out.reinterpret_cast_mut::<f16>()
            .convert_from_f32_slice(floats);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn tensor(dtype: Dtype, bytes: &[u8]) -> Tensor<'_> {
        Tensor {
            name: "t".to_owned(),
            storage: Storage::Plain(dtype),
            shape: vec![bytes.len() / 2],
            bytes,
            rows: FileOrder::Same,
            columns: FileOrder::Same,
        }
    }

    #[test]
    fn bf16_becomes_f16_or_is_refused_if_too_large() {
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
}
