//! Ternary linears, however a checkpoint stores them.
//!
//! Invariant: the loader and the converter ask [`TernaryForm::of`] what a tensor holds, so both
//! read the same weights and scales.

use safetensors::Dtype;
use sterna_kernels::GroupSize;

use super::floats::{mean_of, read_floats, row_bytes, row_magnitude};
use super::groups::{self, OneScale, RowMemory};
use crate::checkpoint::architecture::ScaleDirection;
use crate::checkpoint::config::{Quantization, StoredWeights};
use crate::checkpoint::{INTERLEAVED_WEIGHTS, LoadError, LoadResult, Storage, Tensor};

/// The smallest mean magnitude of master weights that is divided by, as in the reference.
const MIN_MEAN_MAGNITUDE: f32 = 1e-5;

/// How a checkpoint stores the weights of a ternary linear.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum TernaryForm {
    /// Four codes in a byte. The product is multiplied by the scale.
    Packed {
        /// The factor of the product.
        scale: f32,
    },
    /// Rows of [`Storage::Interleaved`]. The product is multiplied by the scale.
    Interleaved {
        /// The factor of the product.
        scale: f32,
    },
    /// The floats −1, 0 and 1. The product is multiplied by the scale.
    Signs {
        /// The factor of the product.
        scale: f32,
    },
    /// Float masters, which are rounded.
    Masters,
    /// Weights that are ternary already and have one scale.
    OneScale {
        /// A further factor of the product, from a tensor beside the weights.
        factor: f32,
    },
    /// Weights that are ternary already and have a scale for each group of columns.
    Groups(GroupSize),
}

impl TernaryForm {
    /// Returns what `tensor` holds. `scale` is the value of its `weight_scale`, if it has one, and
    /// `group` is the size of the model's groups.
    ///
    /// # Errors
    /// If the tensor contradicts `quantization`.
    pub(crate) fn of(
        tensor: &Tensor<'_>,
        scale: Option<f32>,
        quantization: &Quantization,
        group: Option<GroupSize>,
    ) -> LoadResult<TernaryForm> {
        let scale = scale.map(|scale| match quantization.scale {
            ScaleDirection::Multiply => scale,
            ScaleDirection::Divide => 1.0 / scale,
        });
        if quantization.stored == StoredWeights::Unpacked {
            return match (group, scale) {
                (None, scale) => Ok(TernaryForm::OneScale {
                    factor: scale.unwrap_or(1.0),
                }),
                (Some(group), None) => Ok(TernaryForm::Groups(group)),
                (Some(_), Some(_)) => Err(tensor.error(
                    "it has a scale for each group of columns and one for the tensor, which is \
                     not supported",
                )),
            };
        }
        let missing = || LoadError::missing_tensor(&format!("{}_scale", tensor.name));
        let dtype = match tensor.storage {
            Storage::Plain(dtype) => dtype,
            Storage::Interleaved => {
                let scale = scale.ok_or_else(missing)?;
                return Ok(TernaryForm::Interleaved { scale });
            }
            Storage::Blocks(layout) => {
                let name = layout.name();
                return Err(tensor.error(format!("its type {name} does not belong to config.json")));
            }
        };
        match (dtype, scale, quantization.stored == StoredWeights::Masters) {
            (Dtype::U8, Some(scale), _) => Ok(TernaryForm::Packed { scale }),
            (Dtype::U8, None, _) => Err(missing()),
            // Floats with a scale are ternary already, only not packed.
            (_, Some(scale), false) => Ok(TernaryForm::Signs { scale }),
            (_, None, true) => Ok(TernaryForm::Masters),
            (dtype, Some(_), true) => Err(tensor.error(format!(
                "it is {dtype:?} with a weight_scale, but quantization_mode is \"online\", which \
                 means master weights without one"
            ))),
            (dtype, None, false) => Err(tensor.error(format!(
                "it is {dtype:?} without a weight_scale; master weights need \
                 \"quantization_mode\": \"online\" in config.json"
            ))),
        }
    }
}

/// Returns what masters are multiplied by before they are rounded. `mean` is their mean magnitude.
pub(crate) fn master_factor(mean: f32) -> f32 {
    1.0 / mean.max(MIN_MEAN_MAGNITUDE)
}

/// Returns the code of a master weight that was multiplied by its factor: rounding half to even and
/// clamping make ±0.5 zero, and larger magnitudes ±1.
pub(crate) fn rounded_code(scaled: f32) -> u8 {
    1 + u8::from(scaled > 0.5) - u8::from(scaled < -0.5)
}

/// The scales of a ternary linear.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum TernaryScales {
    /// The factor of the whole product.
    Tensor(f32),
    /// One for each group of columns of a row.
    Groups(GroupSize),
}

/// A linear that is ternary in its file: its codes and scales, row by row.
pub(crate) struct TernaryTensor<'a> {
    tensor: Tensor<'a>,
    shape: [usize; 2],
    form: TernaryForm,
    scales: TernaryScales,
    /// What masters are multiplied by; 1 in other forms.
    factor: f32,
}

impl<'a> TernaryTensor<'a> {
    /// Reads the scale of a tensor of this shape.
    ///
    /// # Errors
    /// If the shape is another, or the values are not ternary already.
    pub(crate) fn new(
        tensor: Tensor<'a>,
        shape: [usize; 2],
        form: TernaryForm,
    ) -> LoadResult<TernaryTensor<'a>> {
        let mut factor = 1.0;
        match form {
            TernaryForm::Packed { .. } => {
                let rows = shape[0];
                let problem = format_args!("its {rows} rows are not a multiple of four");
                tensor.require(rows.is_multiple_of(4), problem)?;
                tensor.expect_shape(&[rows / 4, shape[1]])?;
            }
            TernaryForm::Interleaved { .. } => {
                let padded = shape[1].next_multiple_of(INTERLEAVED_WEIGHTS);
                tensor.expect_shape(&[shape[0], padded])?;
            }
            _ => tensor.expect_shape(&shape)?,
        }
        let scales = match form {
            TernaryForm::Packed { scale }
            | TernaryForm::Interleaved { scale }
            | TernaryForm::Signs { scale } => TernaryScales::Tensor(scale),
            TernaryForm::Masters => {
                let problem = "its values are not ternary: they have several magnitudes. Sterna \
                               serves such masters, but it converts only what is ternary already";
                tensor.require(groups::has_one_magnitude(&tensor, None)?, problem)?;
                factor = master_factor(mean_magnitude(&tensor, shape)?);
                TernaryScales::Tensor(1.0 / factor)
            }
            TernaryForm::OneScale { factor } => {
                TernaryScales::Tensor(one_scale(&tensor, shape)? * factor)
            }
            TernaryForm::Groups(group) => TernaryScales::Groups(group),
        };
        Ok(TernaryTensor {
            tensor,
            shape,
            form,
            scales,
            factor,
        })
    }

    /// Returns the rows and the columns.
    pub(crate) fn shape(&self) -> [usize; 2] {
        self.shape
    }

    pub(crate) fn scales(&self) -> TernaryScales {
        self.scales
    }

    /// Returns the scale that a `weight_scale` in this direction has.
    pub(crate) fn weight_scale(&self, direction: ScaleDirection, scale: f32) -> f32 {
        match (self.form, direction) {
            (_, ScaleDirection::Multiply) => scale,
            // Dividing twice would round twice.
            (TernaryForm::Masters, ScaleDirection::Divide) => self.factor,
            (_, ScaleDirection::Divide) => 1.0 / scale,
        }
    }

    /// Returns whether the tensor beside the weights is the whole scale.
    pub(crate) fn has_stored_scale(&self) -> bool {
        matches!(
            self.form,
            TernaryForm::Packed { .. }
                | TernaryForm::Interleaved { .. }
                | TernaryForm::Signs { .. }
        )
    }

    /// Returns the bytes in the file.
    pub(crate) fn bytes(&self) -> &'a [u8] {
        self.tensor.bytes
    }

    /// Returns an error that names the tensor.
    pub(crate) fn error(&self, problem: impl std::fmt::Display) -> LoadError {
        self.tensor.error(problem)
    }

    /// Reads the codes of a row, and its scales: one, or one for each group.
    ///
    /// # Errors
    /// If a value is not ternary, or a scale is not exact in half precision where the engine has it
    /// so.
    pub(crate) fn read_row(&self, row: usize, memory: &mut RowMemory) -> LoadResult<()> {
        let tensor = &self.tensor;
        match self.form {
            TernaryForm::Packed { .. } => {
                let (quarter, columns) = (self.shape[0] / 4, self.shape[1]);
                let bytes = &tensor.bytes[row % quarter * columns..][..columns];
                let problem = format_args!("a packed code of row {row} is 3; 0, 1 and 2 are valid");
                let is_valid = take_codes(bytes, row / quarter, &mut memory.codes);
                tensor.require(is_valid, problem)?;
            }
            TernaryForm::Interleaved { .. } => {
                tensor.read_interleaved_row(row, &mut memory.codes)?;
            }
            TernaryForm::Signs { .. } | TernaryForm::Masters => {
                let row_bytes = row_bytes(tensor, self.shape[1])?;
                let bytes = &tensor.bytes[tensor.file_row(row) * row_bytes..][..row_bytes];
                let RowMemory { codes, floats, .. } = memory;
                read_floats(tensor, bytes, floats)?;
                if self.form != TernaryForm::Masters {
                    refuse_other_than_signs(tensor, row, floats)?;
                }
                for (code, float) in codes.iter_mut().zip(floats) {
                    *code = rounded_code(*float * self.factor);
                }
            }
            TernaryForm::OneScale { .. } => memory.read(tensor, row, None)?,
            TernaryForm::Groups(group) => {
                memory.read(tensor, row, Some(group))?;
                for scale in &memory.scales {
                    groups::half_bits(tensor, row, *scale)?;
                }
            }
        }
        if let TernaryScales::Tensor(scale) = self.scales {
            memory.scales.clear();
            memory.scales.push(scale);
        }
        Ok(())
    }
}

/// Extracts the codes of one quarter of the rows (0..4) from packed bytes. Returns whether none of
/// them is 3. Without an early exit, so that the compiler vectorizes the loop.
pub(crate) fn take_codes(bytes: &[u8], quarter: usize, codes: &mut [u8]) -> bool {
    let mut largest = 0;
    for (code, byte) in codes.iter_mut().zip(bytes) {
        *code = byte >> (2 * quarter) & 3;
        largest = largest.max(*code);
    }
    largest < 3
}

/// # Errors
/// If a value of the row is not −1, 0 or 1.
pub(crate) fn refuse_other_than_signs(
    tensor: &Tensor<'_>,
    row: usize,
    floats: &[f32],
) -> LoadResult<()> {
    let is_sign = |float: &f32| [-1.0, 0.0, 1.0].contains(float);
    let problem = format_args!("a weight of row {row} is not -1, 0 or 1");
    tensor.require(floats.iter().all(is_sign), problem)
}

/// Returns the one scale of weights that are ternary already.
fn one_scale(tensor: &Tensor<'_>, [rows, columns]: [usize; 2]) -> LoadResult<f32> {
    let scale = OneScale::default();
    let mut memory = RowMemory::of_columns(columns);
    for row in 0..rows {
        memory.read(tensor, row, None)?;
        for (codes, group_scale) in memory.groups() {
            scale.accept(tensor, codes, group_scale)?;
        }
    }
    Ok(scale.value())
}

/// Computes the mean magnitude as the packer does, on one thread.
fn mean_magnitude(tensor: &Tensor<'_>, [rows, columns]: [usize; 2]) -> LoadResult<f32> {
    let mut floats = vec![0.0; columns];
    let sums = (0..rows).map(|row| row_magnitude(tensor, row, &mut floats));
    let sums = sums.collect::<LoadResult<Vec<f64>>>()?;
    mean_of(tensor, &sums, columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_come_from_their_quarter_and_a_3_is_found_anywhere() {
        for columns in [1, 7, 8, 9, 40, 67] {
            let code = |quarter: usize, column: usize| ((quarter + column * column) % 3) as u8;
            let byte = |column| {
                (0..4).fold(0, |byte, quarter| {
                    byte | code(quarter, column) << (2 * quarter)
                })
            };
            let bytes: Vec<u8> = (0..columns).map(byte).collect();
            for quarter in 0..4 {
                let mut codes = vec![9; columns];
                assert!(take_codes(&bytes, quarter, &mut codes));
                let expected: Vec<u8> = (0..columns).map(|column| code(quarter, column)).collect();
                assert_eq!(codes, expected, "quarter {quarter} of {columns}");
                for wrong in 0..columns {
                    let mut bytes = bytes.clone();
                    bytes[wrong] |= 3 << (2 * quarter);
                    assert!(!take_codes(&bytes, quarter, &mut codes), "{wrong}");
                    assert!(take_codes(&bytes, (quarter + 1) % 4, &mut codes), "{wrong}");
                }
            }
        }
    }
}
