//! A matrix of 8-bit weights with a scale for each row: the fast first pass over a large `lm_head`.
//!
//! A block has 16 rows and 4 columns: byte `4 r + i` is row r, column i. So a 32-bit lane is four
//! neighbouring columns of a row, which the dot-product instructions multiply by four neighbouring
//! activations.
//!
//! Invariant: a byte is the weight + 128, with a weight in −127..=127. Rows and columns that only
//! fill the last block have weight zero.

use std::ops::Range;

use crate::block::{BLOCK_ROWS, Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::elementwise::{LANES, ROUND, largest_magnitude};
use crate::huge::HugeSlice;

/// Columns of a block.
pub(crate) const INT8_COLUMNS: usize = 4;
/// The byte of the weight zero.
pub(crate) const BYTE_ZERO: u8 = 128;

/// Weights that are rounded at a time, so that the compiler vectorizes the loop.
const ROUNDED_AT_ONCE: usize = 64;

/// A matrix of 8-bit weights, `[rows][columns]`, with a scale for each row. A weight stands for
/// itself times that scale.
pub struct Int8Matrix {
    rows: usize,
    columns: usize,
    blocks: HugeSlice<Block>, // [panel][column block][half of the panel]
    scales: Vec<f32>,         // [row]
}

impl Int8Matrix {
    /// The largest number of columns. Up to it, sums of byte · activation, the largest that a
    /// kernel forms, fit an `i32`.
    pub const MAX_COLUMNS: usize = 1 << 16;

    /// Makes a matrix of zeros.
    ///
    /// # Panics
    /// If a dimension is zero or there are more than [`Int8Matrix::MAX_COLUMNS`] columns.
    pub fn new(rows: usize, columns: usize) -> Int8Matrix {
        assert!(rows > 0 && columns > 0, "a matrix of {rows} × {columns}");
        assert!(
            columns <= Int8Matrix::MAX_COLUMNS,
            "{columns} columns: sums may not fit an i32"
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

    /// Returns the number of rows: the outputs of a product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns: the inputs of a product.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the number of panels of [`PANEL_ROWS`] rows. The rows may not fill the last one.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL_ROWS)
    }

    /// Returns the scales of a panel's rows, as many as exist.
    pub fn scales(&self, panel: usize) -> &[f32] {
        let first = panel * PANEL_ROWS;
        &self.scales[first..self.rows.min(first + PANEL_ROWS)]
    }

    /// Returns the size of weights and scales, in bytes: what one product reads.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.blocks[..]) + size_of_val(self.scales.as_slice())
    }

    /// Returns the panels, to be filled. Each may be sent to another thread.
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

    /// Rounds the weights of a row whose scale is `step` to what a matrix stores for them.
    pub fn round(weights: &mut [f32], step: f32) {
        let per_step = per_step(step);
        for weight in weights {
            *weight = (shifted(*weight * per_step) - ROUND) * step;
        }
    }

    /// Returns one weight, without the scale of its row.
    ///
    /// # Panics
    /// If there is no such row or column.
    pub fn weight(&self, row: usize, column: usize) -> i8 {
        assert!(
            row < self.rows && column < self.columns,
            "no weight at row {row}, column {column}"
        );
        let block = column / INT8_COLUMNS * PANEL_BLOCKS + row % PANEL_ROWS / BLOCK_ROWS;
        let byte = row % BLOCK_ROWS * INT8_COLUMNS + column % INT8_COLUMNS;
        (self.panel(row / PANEL_ROWS)[block].0[byte] ^ BYTE_ZERO).cast_signed()
    }

    /// Returns the blocks of one panel, in the order of the stream.
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
    /// Returns the rows of the matrix that are in this panel, at most [`PANEL_ROWS`].
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Returns the scales of the rows.
    pub fn scales(&self) -> &[f32] {
        self.scales
    }

    /// Sets a row of the matrix (an absolute index). Each weight is rounded to the nearest of 255
    /// equal steps from −max|w| to max|w|.
    ///
    /// # Panics
    /// If the row is not in this panel or the length is not `columns`.
    pub fn set_row(&mut self, row: usize, weights: &[f32]) {
        assert!(
            self.rows.contains(&row),
            "row {row} is not in the panel of rows {:?}",
            self.rows
        );
        assert_eq!(weights.len(), self.columns, "weights of a row");
        let row = row - self.rows.start;
        let step = largest_magnitude(weights) / 127.0;
        let per_step = per_step(step);
        self.scales[row] = step;
        let blocks = self.blocks[row / BLOCK_ROWS..].iter_mut();
        let mut lanes = blocks
            .step_by(PANEL_BLOCKS)
            .map(|block| &mut block.0.as_chunks_mut().0[row % BLOCK_ROWS]);
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

/// Returns by what weights are multiplied to get steps. If all weights are (almost) zero, the step
/// is too small to divide by.
#[inline(always)]
fn per_step(step: f32) -> f32 {
    if step.is_normal() { 1.0 / step } else { 0.0 }
}

/// Computes `Σ rounded(weight / step) · q` exactly. Sums of up to 512 products of at most
/// 127 · 128 are exact in f32.
#[inline(always)]
pub(crate) fn rounded_dot(weights: &[f32], step: f32, q: &[i8]) -> i32 {
    const EXACT_PRODUCTS: usize = 512;
    let per_step = per_step(step);
    let mut sum = 0;
    let parts = weights.chunks(EXACT_PRODUCTS * LANES);
    for (weights, q) in parts.zip(q.chunks(EXACT_PRODUCTS * LANES)) {
        let (weights, weights_left) = weights.as_chunks::<LANES>();
        let (q, q_left) = q.as_chunks::<LANES>();
        let mut lanes = [0.0_f32; LANES];
        for (weights, q) in weights.iter().zip(q) {
            for lane in 0..LANES {
                lanes[lane] += (shifted(weights[lane] * per_step) - ROUND) * f32::from(q[lane]);
            }
        }
        sum += lanes.iter().map(|lane| *lane as i32).sum::<i32>();
        let left = weights_left.iter().zip(q_left);
        sum += left
            .map(|(weight, q)| (shifted(weight * per_step) - ROUND) as i32 * i32::from(*q))
            .sum::<i32>();
    }
    sum
}

/// Returns the byte of the nearest integer in −127..=127, ties to even.
#[inline(always)]
fn rounded(steps: f32) -> u8 {
    shifted(steps).to_bits() as u8
}

/// Returns the nearest integer in −127..=127, ties to even, plus [`ROUND`].
///
/// Floats near 1.5 · 2²³ are integers: the addition rounds, and its result has the integer in the
/// lowest bits. `round_ties_even` would be a function call for each weight, because this is
/// compiled for a CPU without a rounding instruction.
#[inline(always)]
fn shifted(steps: f32) -> f32 {
    let above = if steps > -127.0 { steps } else { -127.0 };
    let within = if above < 127.0 { above } else { 127.0 };
    within + ROUND
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_by_addition_rounds_ties_to_even() {
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
}
