//! A matrix of 8-bit weights with a scale a row: the quick first pass over a large output head.
//!
//! A block is 64 bytes: 16 rows × 4 columns, byte `4 r + i` being row r, column i. A panel of 32 rows is one stream: `[block 0 of rows
//! 0..16][block 0 of rows 16..32][block 1 of rows 0..16]…`. So a 32-bit lane is four neighbouring columns of a row, what the dot-product
//! instructions multiply with four neighbouring activations.
//!
//! Always true: a byte is the weight + 128, the weight within −127..=127; rows and columns that only fill the last block have weight zero.

use std::ops::Range;

use crate::ternary::{BLOCK_ROWS, Block, PANEL_BLOCKS};
use crate::{HugeSlice, PANEL_ROWS};

/// Columns of a block.
pub(crate) const INT8_COLUMNS: usize = 4;
/// What is added to a weight to make a byte of it.
pub(crate) const BYTE_ZERO: u8 = 128;
/// Weights that are rounded before they are put into blocks.
const ROUNDED_AT_ONCE: usize = 64;
/// Weights of 8 bits, `rows` × `columns`: row r's weight is its byte's value times the scale of r.
pub struct Int8Matrix {
    rows: usize,
    columns: usize,
    blocks: HugeSlice<Block>, // [panel][column block][half of the panel]
    scales: Vec<f32>,         // [row]
}

impl Int8Matrix {
    /// The most columns: sums of byte · activation, the largest that a kernel forms, then fit an `i32`.
    pub const MAX_COLUMNS: usize = 1 << 16;

    /// A matrix of zeros.
    ///
    /// # Panics
    /// If a dimension is zero or there are more than [`Int8Matrix::MAX_COLUMNS`] columns.
    #[must_use]
    pub fn new(rows: usize, columns: usize) -> Int8Matrix {
        assert!(rows > 0 && columns > 0, "a matrix of {rows} × {columns}");
        assert!(
            columns <= Int8Matrix::MAX_COLUMNS,
            "{columns} columns: sums might not fit an i32"
        );
        let blocks = rows.div_ceil(PANEL_ROWS) * PANEL_BLOCKS * columns.div_ceil(INT8_COLUMNS);
        let mut memory = HugeSlice::new(blocks);
        memory.fill(Block([BYTE_ZERO; 64]));
        Int8Matrix {
            rows,
            columns,
            blocks: memory,
            scales: vec![0.0; rows],
        }
    }

    /// Rows: the outputs of a product.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns: the inputs of a product.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Panels of [`PANEL_ROWS`] rows; the last one may be partly filled.
    #[must_use]
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL_ROWS)
    }

    /// The rows of a panel that exist: their scales, a weight's value being byte · scale.
    #[must_use]
    pub fn scales(&self, panel: usize) -> &[f32] {
        let first = panel * PANEL_ROWS;
        &self.scales[first..self.rows.min(first + PANEL_ROWS)]
    }

    /// Memory of weights and scales, in bytes: what one product reads.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&self.blocks[..]) + size_of_val(self.scales.as_slice())
    }

    /// The panels, to be filled; each may go to another thread.
    pub fn panels_mut(&mut self) -> impl Iterator<Item = Int8PanelMut<'_>> {
        let (rows, columns, panel_blocks) = (self.rows, self.columns, self.panel_blocks());
        let scales = self.scales.chunks_mut(PANEL_ROWS);
        let panels = self.blocks.chunks_exact_mut(panel_blocks).zip(scales);
        panels.enumerate().map(move |(panel, (blocks, scales))| {
            let first = panel * PANEL_ROWS;
            Int8PanelMut {
                rows: first..rows.min(first + PANEL_ROWS),
                columns,
                blocks,
                scales,
            }
        })
    }

    /// One weight, without its row's scale.
    ///
    /// # Panics
    /// If there is no such row or column.
    #[must_use]
    pub fn weight(&self, row: usize, column: usize) -> i8 {
        assert!(
            row < self.rows && column < self.columns,
            "no weight at row {row}, column {column}"
        );
        let block = column / INT8_COLUMNS * PANEL_BLOCKS + row % PANEL_ROWS / BLOCK_ROWS;
        let byte = row % BLOCK_ROWS * INT8_COLUMNS + column % INT8_COLUMNS;
        (self.panel(row / PANEL_ROWS)[block].0[byte] ^ BYTE_ZERO).cast_signed()
    }

    /// The blocks of one panel, in the order of the stream.
    #[inline]
    pub(crate) fn panel(&self, panel: usize) -> &[Block] {
        let panel_blocks = self.panel_blocks();
        &self.blocks[panel * panel_blocks..][..panel_blocks]
    }

    fn panel_blocks(&self) -> usize {
        PANEL_BLOCKS * self.columns.div_ceil(INT8_COLUMNS)
    }
}

/// One panel of an [`Int8Matrix`], to be filled.
pub struct Int8PanelMut<'a> {
    rows: Range<usize>,
    columns: usize,
    blocks: &'a mut [Block],
    scales: &'a mut [f32],
}

impl Int8PanelMut<'_> {
    /// The rows of the matrix that this panel holds, at most [`PANEL_ROWS`].
    #[must_use]
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Sets a row of the matrix (an absolute index) to the nearest of 255 even steps from −max|w| to max|w|.
    ///
    /// # Panics
    /// If the row is not in this panel or the length is not `columns`.
    pub fn set_row(&mut self, row: usize, weights: &[f32]) {
        assert!(
            self.rows.contains(&row),
            "row {row} is not in the panel of rows {:?}",
            self.rows
        );
        assert_eq!(weights.len(), self.columns, "one weight a column");
        let row = row - self.rows.start;
        let step = largest_magnitude(weights) / 127.0;
        // A row of nothing but (next to) nothing has no step that can be divided by.
        let per_step = if step.is_normal() { 1.0 / step } else { 0.0 };
        self.scales[row] = step;
        let blocks = self.blocks[row / BLOCK_ROWS..].iter_mut();
        let mut lanes = blocks
            .step_by(PANEL_BLOCKS)
            .map(|block| &mut block.0.as_chunks_mut().0[row % BLOCK_ROWS]);
        // Rounded many at a time, and only then put where each four of them belong.
        let mut bytes = [BYTE_ZERO; ROUNDED_AT_ONCE];
        for weights in weights.chunks(ROUNDED_AT_ONCE) {
            bytes[weights.len()..].fill(BYTE_ZERO);
            for (byte, weight) in bytes.iter_mut().zip(weights) {
                *byte = rounded(weight * per_step) ^ BYTE_ZERO;
            }
            let fours = bytes.as_chunks::<INT8_COLUMNS>().0;
            for (four, lane) in fours.iter().zip(&mut lanes) {
                *lane = *four;
            }
        }
    }
}

/// max|w|, of eight shares that are compared side by side. Values that are no numbers are passed over.
fn largest_magnitude(weights: &[f32]) -> f32 {
    let mut largest = [0.0_f32; 8];
    let (chunks, rest) = weights.as_chunks::<8>();
    for chunk in chunks {
        for (largest, weight) in largest.iter_mut().zip(chunk) {
            let magnitude = weight.abs();
            // Not `max`, which has a rule for each of the two that may be no number.
            *largest = if magnitude > *largest {
                magnitude
            } else {
                *largest
            };
        }
    }
    let all = largest.into_iter().chain(rest.iter().map(|w| w.abs()));
    all.fold(0.0, f32::max)
}

/// The nearest whole number of −127..=127, ties to even, as the byte that holds it.
///
/// Next to 1.5 · 2²³ floats are whole numbers: the addition rounds as any other, and leaves the number in the lowest bits. A call of
/// `round_ties_even` would be one for each weight, on a CPU of which nothing is known when this is compiled.
#[inline(always)]
fn rounded(steps: f32) -> u8 {
    const WHOLE: f32 = 12_582_912.0;
    let above = if steps > -127.0 { steps } else { -127.0 };
    let within = if above < 127.0 { above } else { 127.0 };
    (within + WHOLE).to_bits() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_by_addition_is_rounding_to_even() {
        for sixteenths in -130 * 16..=130 * 16 {
            for nudge in [-1e-5, 0.0, 1e-5] {
                let steps = sixteenths as f32 / 16.0 + nudge;
                let expected = steps.round_ties_even().clamp(-127.0, 127.0) as i8;
                assert_eq!(rounded(steps).cast_signed(), expected, "{steps}");
            }
        }
        for (steps, expected) in [(f32::INFINITY, 127), (f32::NEG_INFINITY, -127), (-0.0, 0)] {
            assert_eq!(rounded(steps).cast_signed(), expected, "{steps}");
        }
    }

    #[test]
    fn the_largest_magnitude_is_found_wherever_it_stands() {
        for len in [1, 7, 8, 9, 64, 67] {
            for at in 0..len {
                let mut weights = vec![0.5; len];
                weights[at] = -3.0;
                assert_eq!(largest_magnitude(&weights), 3.0, "{len}, {at}");
            }
        }
        assert_eq!(largest_magnitude(&[f32::NAN, -1.0]), 1.0);
    }
}
