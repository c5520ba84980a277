//! A matrix of 4-bit weights with a scale for each row: the first look at a large `lm_head`.
//!
//! A block has 16 rows and 8 columns: byte `4 r + i` has column i of row r in its lower bits, and
//! column 4 + i in its upper bits. So the dot-product instructions multiply four neighbouring
//! columns of a row, as in `int8.rs`.
//!
//! Invariant: a code is 0..=15 and stands for the weight `2 · code − 15`. Columns that only fill
//! the last block are multiplied by activations of zero, and the products of rows that only fill
//! the last panel are not read.

use std::ops::Range;

use crate::block::{BLOCK_ROWS, Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::huge::HugeSlice;

/// Columns of a block.
pub(crate) const FOUR_BIT_COLUMNS: usize = 8;
/// Columns whose codes are in the lower, or in the upper, bits of a block.
pub(crate) const HALF_COLUMNS: usize = FOUR_BIT_COLUMNS / 2;
/// Of a code, to its weight: `2 · code − ODD_ZERO`.
pub(crate) const ODD_ZERO: i32 = 15;

/// The step between two neighbouring weights, in standard deviations of a row: the step of sixteen
/// levels that leaves the least error of normally distributed numbers.
///
/// Source: J. Max, "Quantizing for Minimum Distortion", IRE Transactions on Information Theory
/// 6 (1960), table II.
const STEP: f32 = 0.3352;

/// A matrix of 4-bit weights, `[rows][columns]`, with a scale for each row. A weight, an odd number
/// in −15..=15, stands for itself times that scale.
pub struct FourBitMatrix {
    rows: usize,
    columns: usize,
    blocks: HugeSlice<Block>, // [panel][column block][half of the panel]
    scales: Vec<f32>,         // [row]
}

impl FourBitMatrix {
    /// The largest number of columns. Up to it, sums of weight · activation fit an `i32`.
    pub const MAX_COLUMNS: usize = 1 << 16;

    /// Makes a matrix whose rows all have the scale zero.
    ///
    /// # Panics
    /// If a dimension is zero or there are more than [`FourBitMatrix::MAX_COLUMNS`] columns.
    pub fn new(rows: usize, columns: usize) -> FourBitMatrix {
        assert!(rows > 0 && columns > 0, "a matrix of {rows} × {columns}");
        assert!(
            columns <= FourBitMatrix::MAX_COLUMNS,
            "{columns} columns: sums may not fit an i32"
        );
        let panels = rows.div_ceil(PANEL_ROWS);
        FourBitMatrix {
            rows,
            columns,
            blocks: HugeSlice::new(panels * panel_blocks(columns)),
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
    pub fn panels_mut(&mut self) -> impl Iterator<Item = FourBitPanelMut<'_>> {
        let (rows, columns) = (self.rows, self.columns);
        let blocks = self.blocks.chunks_exact_mut(panel_blocks(columns));
        let panels = blocks.zip(self.scales.chunks_mut(PANEL_ROWS));
        panels.enumerate().map(move |(panel, (blocks, scales))| {
            let first = panel * PANEL_ROWS;
            FourBitPanelMut {
                rows: first..rows.min(first + PANEL_ROWS),
                columns,
                blocks,
                scales,
            }
        })
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
        let block = column / FOUR_BIT_COLUMNS * PANEL_BLOCKS + row % PANEL_ROWS / BLOCK_ROWS;
        let byte = row % BLOCK_ROWS * HALF_COLUMNS + column % HALF_COLUMNS;
        let byte = self.panel(row / PANEL_ROWS)[block].0[byte];
        let is_upper = column % FOUR_BIT_COLUMNS >= HALF_COLUMNS;
        let code = if is_upper { byte >> 4 } else { byte & 15 };
        weight_of(code)
    }

    /// Returns the blocks of one panel, in the order of the stream.
    #[inline]
    pub(crate) fn panel(&self, panel: usize) -> &[Block] {
        let blocks = panel_blocks(self.columns);
        &self.blocks[panel * blocks..][..blocks]
    }
}

fn panel_blocks(columns: usize) -> usize {
    PANEL_BLOCKS * columns.div_ceil(FOUR_BIT_COLUMNS)
}

fn weight_of(code: u8) -> i8 {
    2 * code.cast_signed() - ODD_ZERO as i8
}

/// One panel of a [`FourBitMatrix`], to be filled.
pub struct FourBitPanelMut<'a> {
    rows: Range<usize>,
    columns: usize,
    blocks: &'a mut [Block],
    scales: &'a mut [f32],
}

impl FourBitPanelMut<'_> {
    /// Returns the rows of the matrix that are in this panel, at most [`PANEL_ROWS`].
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Returns the scales of the rows.
    pub fn scales(&self) -> &[f32] {
        self.scales
    }

    /// Sets a row of the matrix (an absolute index) to the nearest weights, and `weights` to what
    /// they stand for. The step between them suits weights that are about normally distributed; the
    /// others become the outermost.
    ///
    /// # Panics
    /// If the row is not in this panel or the length is not `columns`.
    pub fn set_row(&mut self, row: usize, weights: &mut [f32]) {
        assert!(
            self.rows.contains(&row),
            "row {row} is not in the panel of rows {:?}",
            self.rows
        );
        assert_eq!(weights.len(), self.columns, "weights of a row");
        let row = row - self.rows.start;
        let squares = weights.iter().map(|weight| weight * weight).sum::<f32>();
        let step = STEP * (squares / weights.len() as f32).sqrt();
        let (scale, per_step) = match step.is_normal() {
            true => (step / 2.0, 1.0 / step),
            false => (0.0, 0.0),
        };
        self.scales[row] = scale;
        let blocks = self.blocks[row / BLOCK_ROWS..].iter_mut();
        let lanes = blocks
            .step_by(PANEL_BLOCKS)
            .map(|block| &mut block.0.as_chunks_mut::<HALF_COLUMNS>().0[row % BLOCK_ROWS]);
        for (weights, lane) in weights.chunks_mut(FOUR_BIT_COLUMNS).zip(lanes) {
            let mut codes = [0; FOUR_BIT_COLUMNS];
            for (code, weight) in codes.iter_mut().zip(weights) {
                // The cast rounds towards zero, and NaN becomes zero.
                *code = ((*weight * per_step + 8.0) as u8).min(15);
                *weight = f32::from(weight_of(*code)) * scale;
            }
            *lane = std::array::from_fn(|i| codes[i] | codes[HALF_COLUMNS + i] << 4);
        }
    }
}
