//! A tensor as it is in its file, and how files store values.

use std::fmt;

use safetensors::Dtype;

use super::blocks::{self, BlockLayout};
use super::error::{LoadError, LoadResult};
use super::order::FileOrder;

/// The maximum number of tensors in one file: about 20 times as many as the largest models have.
pub(super) const MAX_TENSORS: usize = 1 << 16;

/// The weights of a block of [`Storage::Interleaved`].
pub(crate) const INTERLEAVED_WEIGHTS: usize = 128;

/// How a file stores the values of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    /// One number of this type for each value. U8 has four ternary weights in each number.
    Plain(Dtype),
    Blocks(BlockLayout),
    /// Ternary weights of the rows one after the other, each padded to a multiple of 128 columns.
    /// 128 weights have 32 bytes: bits 7:6 of byte j are the code of weight j, bits 5:4 the code of
    /// weight j + 32, and so on. A code is a weight + 1. The tensor `weight_scale` has the scale.
    Interleaved,
}

impl Storage {
    /// Returns the name that errors and reports use.
    pub(crate) fn name(self) -> String {
        match self {
            Storage::Plain(dtype) => format!("{dtype:?}"),
            Storage::Blocks(layout) => layout.name().to_owned(),
            Storage::Interleaved => "packed ternary weights".to_owned(),
        }
    }

    /// Returns whether the values are blocks of ternary weights.
    pub(crate) fn is_ternary_blocks(self) -> bool {
        match self {
            Storage::Plain(_) => false,
            Storage::Blocks(layout) => layout.scale_span().is_some(),
            Storage::Interleaved => true,
        }
    }

    /// Returns the bytes of a tensor of `rows` rows of `columns` values, or `None` if it cannot be
    /// stored so.
    pub(super) fn tensor_bytes(self, rows: usize, columns: usize) -> Option<usize> {
        match self {
            Storage::Plain(dtype) => rows.checked_mul(columns)?.checked_mul(dtype.bitsize() / 8),
            Storage::Blocks(layout) => layout.tensor_bytes(rows, columns),
            Storage::Interleaved => {
                let is_padded = columns.is_multiple_of(INTERLEAVED_WEIGHTS);
                rows.checked_mul(columns / 4).filter(|_| is_padded)
            }
        }
    }
}

/// One tensor as it is in its file.
#[derive(Clone, Debug)]
pub(crate) struct Tensor<'a> {
    /// The name in the file.
    pub(crate) name: String,
    pub(crate) storage: Storage,
    /// The sizes, the outermost first.
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: &'a [u8],
    /// The order of the rows.
    pub(crate) rows: FileOrder,
    /// The order of the columns, if the weights are ternary.
    pub(crate) columns: FileOrder,
}

impl Tensor<'_> {
    /// Returns an error that names the tensor.
    pub(crate) fn error(&self, problem: impl fmt::Display) -> LoadError {
        LoadError::tensor(&self.name, problem)
    }

    /// Returns which row of the file is row `row` of the matrix.
    pub(crate) fn file_row(&self, row: usize) -> usize {
        self.rows.in_file(row)
    }

    /// Returns the bytes of a row of the matrix. Rows must be stored one after the other.
    pub(crate) fn row_bytes(&self, row: usize) -> &[u8] {
        let bytes = self.bytes.len() / self.shape[0];
        &self.bytes[self.file_row(row) * bytes..][..bytes]
    }

    /// # Errors
    /// If the shape is another.
    pub(crate) fn expect_shape(&self, shape: &[usize]) -> LoadResult<()> {
        let found = &self.shape;
        let problem =
            format_args!("its shape is {found:?}, but the configuration asks for {shape:?}");
        self.require(found == shape, problem)
    }

    /// Reads the codes of a row of [`Storage::Interleaved`] that has `codes.len()` columns without
    /// its padding.
    ///
    /// # Errors
    /// If a code is 3, or the padding holds a weight.
    pub(crate) fn read_interleaved_row(&self, row: usize, codes: &mut [u8]) -> LoadResult<()> {
        let row_bytes = self.shape[1] / 4;
        let bytes = &self.bytes[row * row_bytes..][..row_bytes];
        let whole = codes.len() - codes.len() % INTERLEAVED_WEIGHTS;
        let (first, rest) = codes.split_at_mut(whole);
        blocks::read_interleaved(bytes, first);
        if !rest.is_empty() {
            let mut last = [1; INTERLEAVED_WEIGHTS];
            blocks::read_interleaved(&bytes[whole / 4..], &mut last);
            let (weights, padding) = last.split_at(rest.len());
            let problem = format_args!("its padding in row {row} holds weights that are not zero");
            self.require(padding.iter().all(|code| *code == 1), problem)?;
            rest.copy_from_slice(weights);
        }
        self.refuse_code_3(row, codes)
    }

    /// # Errors
    /// If a code of a row is 3. Some formats allow it, but no published ternary file has it.
    pub(crate) fn refuse_code_3(&self, row: usize, codes: &[u8]) -> LoadResult<()> {
        // Without an early exit, so that the compiler vectorizes the loop.
        let largest = codes.iter().fold(0, |largest, code| largest.max(*code));
        let problem = || {
            let column = codes.iter().position(|code| *code > 2).unwrap_or(0);
            format!("the weight at row {row}, column {column} is +2; -1, 0 and 1 are valid")
        };
        (largest < 3)
            .then_some(())
            .ok_or_else(|| self.error(problem()))
    }

    /// # Errors
    /// Unless `holds`: an error that names the tensor.
    pub(crate) fn require(&self, holds: bool, problem: impl fmt::Display) -> LoadResult<()> {
        holds.then_some(()).ok_or_else(|| self.error(problem))
    }
}
