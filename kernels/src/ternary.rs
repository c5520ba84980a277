//! A matrix of ternary weights, with two bits a weight or five weights a byte.
//!
//! Invariant: rows and columns that only fill the last block have weight zero.

use std::ops::Range;
use std::sync::Arc;

use crate::block::{BLOCK_ROWS, Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::huge::HugeSlice;
use crate::packing::{FIVE_TRIT_COLUMNS, Packing, TWO_BIT_COLUMNS, pack_row};

/// The largest number of columns. Up to it, sums of 64 · code · activation, the largest that a
/// kernel forms, fit an `i32`.
pub const MAX_COLUMNS: usize = 1 << 18;

/// A packed matrix of the weights −1, 0 and +1, `[rows][columns]`.
pub struct TernaryMatrix {
    packing: Packing,
    rows: usize,
    columns: usize,
    memory: Arc<HugeSlice<Block>>, // Several matrices may share it.
    blocks: Range<usize>, // This matrix's part of it: [panel][column block][half of the panel].
}

impl TernaryMatrix {
    /// Makes a matrix of zeros. [`Kernels::packing`](crate::Kernels::packing) returns the packing
    /// that a machine multiplies fastest.
    ///
    /// # Panics
    /// If a dimension is zero or `columns` exceeds [`MAX_COLUMNS`].
    pub fn new(rows: usize, columns: usize, packing: Packing) -> TernaryMatrix {
        assert!(rows > 0 && columns > 0, "a matrix of {rows} × {columns}");
        assert!(
            columns <= MAX_COLUMNS,
            "{columns} columns: sums may not fit an i32"
        );
        let blocks =
            rows.div_ceil(PANEL_ROWS) * PANEL_BLOCKS * columns.div_ceil(packing.block_columns());
        let mut memory = HugeSlice::new(blocks);
        memory.fill(Block([packing.zero_weights(); 64]));
        TernaryMatrix {
            packing,
            rows,
            columns,
            memory: Arc::new(memory),
            blocks: 0..blocks,
        }
    }

    /// Moves matrices into one memory, in this order. The size of a single matrix is rarely a
    /// multiple of the system's largest pages, and the rest of it would be in small pages.
    pub fn put_side_by_side(matrices: &mut [&mut TernaryMatrix]) {
        let all = matrices.iter().map(|matrix| matrix.blocks.len()).sum();
        let mut memory = HugeSlice::new(all);
        let empty = Arc::new(HugeSlice::new(0));
        let mut end = 0;
        for matrix in &mut *matrices {
            let blocks = end..end + matrix.blocks.len();
            memory[blocks.clone()].copy_from_slice(matrix.blocks());
            end = blocks.end;
            // This frees the matrix's own memory before the next matrix is copied.
            (matrix.memory, matrix.blocks) = (Arc::clone(&empty), blocks);
        }
        let memory = Arc::new(memory);
        for matrix in matrices {
            matrix.memory = Arc::clone(&memory);
        }
    }

    /// Returns the packing of the weights.
    pub fn packing(&self) -> Packing {
        self.packing
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

    /// Returns the size of the packed weights, in bytes: what one product reads.
    pub fn bytes(&self) -> usize {
        size_of_val(self.blocks())
    }

    /// Returns the panels, to be filled. Each may be sent to another thread.
    ///
    /// # Panics
    /// If the matrix shares its memory with others.
    pub fn panels_mut(&mut self) -> impl Iterator<Item = PanelMut<'_>> {
        let (packing, rows, columns) = (self.packing, self.rows, self.columns);
        let panel_blocks = self.panel_blocks();
        let memory = Arc::get_mut(&mut self.memory).expect("the matrix shares its memory");
        memory[self.blocks.clone()]
            .chunks_exact_mut(panel_blocks)
            .enumerate()
            .map(move |(panel, blocks)| {
                let first = panel * PANEL_ROWS;
                PanelMut {
                    packing,
                    rows: first..rows.min(first + PANEL_ROWS),
                    columns,
                    blocks,
                }
            })
    }

    /// Returns one weight: −1, 0 or +1.
    ///
    /// # Panics
    /// If there is no such row or column.
    pub fn weight(&self, row: usize, column: usize) -> i8 {
        assert!(
            row < self.rows && column < self.columns,
            "no weight at row {row}, column {column}"
        );
        self.code(row / PANEL_ROWS, row % PANEL_ROWS, column) as i8 - 1
    }

    /// Returns the code (weight + 1) at `row` (0..32) and `column` of a panel.
    #[inline]
    pub(crate) fn code(&self, panel: usize, row: usize, column: usize) -> u8 {
        let block_columns = self.packing.block_columns();
        let block = column / block_columns * PANEL_BLOCKS + row / BLOCK_ROWS;
        let (field, byte) = (column % block_columns / 4, column % 4);
        let byte = self.panel(panel)[block].0[row % BLOCK_ROWS * 4 + byte];
        self.packing.unpack(byte, field)
    }

    /// Returns the blocks of one panel, in the order of the stream.
    #[inline]
    pub(crate) fn panel(&self, panel: usize) -> &[Block] {
        let panel_blocks = self.panel_blocks();
        &self.blocks()[panel * panel_blocks..][..panel_blocks]
    }

    #[inline]
    fn blocks(&self) -> &[Block] {
        &self.memory[self.blocks.clone()]
    }

    fn panel_blocks(&self) -> usize {
        PANEL_BLOCKS * self.columns.div_ceil(self.packing.block_columns())
    }
}

/// One panel of a [`TernaryMatrix`], to be filled.
pub struct PanelMut<'a> {
    packing: Packing,
    rows: Range<usize>,
    columns: usize,
    blocks: &'a mut [Block],
}

impl PanelMut<'_> {
    /// Returns the rows of the matrix that are in this panel, at most [`PANEL_ROWS`].
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Sets a row of the matrix (an absolute index) to `codes[column] - 1`.
    ///
    /// # Panics
    /// If the row is not in this panel, the length is not `columns`, or a code is not 0, 1 or 2.
    pub fn set_row(&mut self, row: usize, codes: &[u8]) {
        assert!(
            self.rows.contains(&row),
            "row {row} is not in the panel of rows {:?}",
            self.rows
        );
        assert_eq!(codes.len(), self.columns, "codes of a row");
        // Without an early exit, so that the compiler vectorizes the loop.
        let largest = codes.iter().fold(0, |largest, &code| code.max(largest));
        assert!(largest <= 2, "a code of row {row} is not 0, 1 or 2");
        let row = row - self.rows.start;
        let blocks = self.blocks[row / BLOCK_ROWS..].iter_mut();
        let lanes = blocks
            .step_by(PANEL_BLOCKS)
            .map(|block| &mut block.0.as_chunks_mut().0[row % BLOCK_ROWS]);
        match self.packing {
            Packing::TwoBit => pack_row::<TWO_BIT_COLUMNS>(Packing::TwoBit, codes, lanes),
            Packing::FiveTrit => pack_row::<FIVE_TRIT_COLUMNS>(Packing::FiveTrit, codes, lanes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::TernaryMatrix;
    use crate::{
        Isa, Kernels, PANEL_ROWS, Packing, PrefetchQueue, QuantizedActivations, ScaledActivations,
    };

    #[test]
    fn putting_matrices_side_by_side_keeps_their_weights() {
        for packing in [Packing::TwoBit, Packing::FiveTrit] {
            let shapes = [(3, 20), (70, 33), (32, 5)];
            let code = |row: usize, column: usize| ((7 * row + 3 * column) % 3) as u8;
            let mut matrices = shapes.map(|(rows, columns)| {
                let mut matrix = TernaryMatrix::new(rows, columns, packing);
                for mut panel in matrix.panels_mut() {
                    for row in panel.rows() {
                        let codes: Vec<u8> = (0..columns).map(|column| code(row, column)).collect();
                        panel.set_row(row, &codes);
                    }
                }
                matrix
            });
            let panels = |matrix: &TernaryMatrix| -> Vec<[u8; 64]> {
                let panels = (0..matrix.panels()).flat_map(|panel| matrix.panel(panel));
                panels.map(|block| block.0).collect()
            };
            let before = matrices.each_ref().map(panels);
            TernaryMatrix::put_side_by_side(&mut matrices.each_mut()[..]);
            assert_eq!(matrices.each_ref().map(panels), before, "{packing:?}");
            let starts = matrices.each_ref().map(|matrix| matrix.panel(0).as_ptr());
            assert_eq!(starts[0].wrapping_add(before[0].len()), starts[1]);
            assert_eq!(starts[1].wrapping_add(before[1].len()), starts[2]);
        }
    }

    /// The quantizer never returns −128, but the kernels must accept every 8-bit value.
    #[test]
    fn products_with_minus_128_are_exact() {
        for (m, k) in [
            (1, 16),
            (2, 2560),
            (3, 6912),
            (4, 8192),
            (5, 1000),
            (6, 300),
            (7, 520),
            (8, 8192),
        ] {
            for code in 0..=2 {
                let filled = |packing| {
                    let mut weights = TernaryMatrix::new(PANEL_ROWS, k, packing);
                    for mut panel in weights.panels_mut() {
                        let rows = panel.rows();
                        rows.for_each(|row| panel.set_row(row, &vec![code; k]));
                    }
                    weights
                };
                let weights = [Packing::TwoBit, Packing::FiveTrit].map(filled);
                let mut x = QuantizedActivations::new(m, k);
                x.reset(m, k);
                for token in x.tokens_mut() {
                    token.values.fill(-128);
                    (*token.scale, *token.sum) = (1.0, -128 * k as i32);
                }
                let kernels = || Isa::available().map(|isa| Kernels::new(isa).unwrap());
                let cases = kernels().flat_map(|kernels| weights.iter().map(move |w| (kernels, w)));
                for (kernels, weights) in cases.filter(|(kernels, w)| kernels.reads(w.packing())) {
                    let isa = kernels.isa();
                    let mut out = vec![0.0; m * PANEL_ROWS];
                    kernels.ternary_matmul(
                        weights,
                        0..1,
                        ScaledActivations {
                            activations: &x,
                            factors: &vec![1.0; m],
                        },
                        &mut out,
                        &mut PrefetchQueue::empty(),
                    );
                    let expected = ((i32::from(code) - 1) * -128 * k as i32) as f32;
                    assert!(
                        out.iter().all(|&sum| sum == expected),
                        "{isa}: code {code}, m {m}, k {k}"
                    );
                }
            }
        }
    }
}
