//! Ternary weights, packed: two bits each, in blocks that a vector register holds.
//!
//! A block is 64 bytes: 16 rows × 16 columns. Byte `4 r + i` holds, for row `r` of the block, the four columns `4 f + i` (f = 0..4) in the
//! bits `2 f` and `2 f + 1`. So a 32-bit lane is one row, and `(lane >> 2 f) & 0x03030303` is four neighbouring columns of it: what the
//! dot-product instructions multiply with four neighbouring activations.
//! A panel of 32 rows is one stream: `[block 0 of rows 0..16][block 0 of rows 16..32][block 1 of rows 0..16]…`.
//!
//! Always true: a field is `weight + 1`, so 0, 1 or 2; rows and columns that exist only to fill the last block hold 1, the weight zero.

use std::ops::Range;

use crate::PANEL_ROWS;

/// Columns of a block.
pub(crate) const BLOCK_COLUMNS: usize = 16;
/// Rows of a block.
pub(crate) const BLOCK_ROWS: usize = 16;
/// Blocks side by side in a panel.
pub(crate) const PANEL_BLOCKS: usize = PANEL_ROWS / BLOCK_ROWS;
/// The most columns a matrix may have: sums of 64 · code · activation, the largest that a kernel forms, then fit an `i32` with room.
pub const MAX_COLUMNS: usize = 1 << 18;

/// Four fields that are all 1, the weight zero.
const ZERO_WEIGHTS: u8 = 0b01_01_01_01;

/// 16 rows × 16 columns.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(crate) struct Block(pub(crate) [u8; 64]);

/// A matrix of weights −1, 0 and +1, `rows` × `columns`, in the packed layout that every kernel reads.
pub struct TernaryMatrix {
    rows: usize,
    columns: usize,
    blocks: Vec<Block>, // [panel][column block][half of the panel]
}

impl TernaryMatrix {
    /// A matrix of zeros.
    ///
    /// # Panics
    /// If a dimension is zero or `columns` exceeds [`MAX_COLUMNS`].
    #[must_use]
    pub fn new(rows: usize, columns: usize) -> TernaryMatrix {
        assert!(rows > 0 && columns > 0, "a matrix of {rows} × {columns}");
        assert!(
            columns <= MAX_COLUMNS,
            "{columns} columns: sums might not fit an i32"
        );
        let blocks = rows.div_ceil(PANEL_ROWS) * PANEL_BLOCKS * columns.div_ceil(BLOCK_COLUMNS);
        TernaryMatrix {
            rows,
            columns,
            blocks: vec![Block([ZERO_WEIGHTS; 64]); blocks],
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

    /// Columns, rounded up to whole blocks.
    #[must_use]
    pub fn padded_columns(&self) -> usize {
        self.columns.next_multiple_of(BLOCK_COLUMNS)
    }

    /// Panels of [`PANEL_ROWS`] rows; the last one may be partly filled.
    #[must_use]
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL_ROWS)
    }

    /// Memory of the packed weights, in bytes: what one product reads.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(self.blocks.as_slice())
    }

    /// The panels, to be filled; each may go to another thread.
    pub fn panels_mut(&mut self) -> impl Iterator<Item = PanelMut<'_>> {
        let (rows, columns, panel_blocks) = (self.rows, self.columns, self.panel_blocks());
        self.blocks
            .chunks_exact_mut(panel_blocks)
            .enumerate()
            .map(move |(panel, blocks)| {
                let first = panel * PANEL_ROWS;
                PanelMut {
                    rows: first..rows.min(first + PANEL_ROWS),
                    columns,
                    blocks,
                }
            })
    }

    /// One weight: −1, 0 or +1.
    ///
    /// # Panics
    /// If there is no such row or column.
    #[must_use]
    pub fn weight(&self, row: usize, column: usize) -> i8 {
        assert!(
            row < self.rows && column < self.columns,
            "no weight at row {row}, column {column}"
        );
        code(self.panel(row / PANEL_ROWS), row % PANEL_ROWS, column) as i8 - 1
    }

    /// The blocks of one panel, in the order of the stream.
    #[inline]
    pub(crate) fn panel(&self, panel: usize) -> &[Block] {
        let panel_blocks = self.panel_blocks();
        &self.blocks[panel * panel_blocks..][..panel_blocks]
    }

    fn panel_blocks(&self) -> usize {
        PANEL_BLOCKS * self.columns.div_ceil(BLOCK_COLUMNS)
    }
}

/// The field (weight + 1) at `row` (0..32) and `column` of a panel.
#[inline]
pub(crate) fn code(panel: &[Block], row: usize, column: usize) -> u8 {
    let block = &panel[column / BLOCK_COLUMNS * PANEL_BLOCKS + row / BLOCK_ROWS];
    let (field, byte) = (column % BLOCK_COLUMNS / 4, column % 4);
    (block.0[row % BLOCK_ROWS * 4 + byte] >> (2 * field)) & 3
}

/// One panel of a [`TernaryMatrix`], to be filled.
pub struct PanelMut<'a> {
    rows: Range<usize>,
    columns: usize,
    blocks: &'a mut [Block],
}

impl PanelMut<'_> {
    /// The rows of the matrix that this panel holds, at most [`PANEL_ROWS`].
    #[must_use]
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
        assert_eq!(codes.len(), self.columns, "one code a column");
        assert!(
            codes.iter().all(|&code| code <= 2),
            "a code of row {row} is not 0, 1 or 2"
        );
        let row = row - self.rows.start;
        let (half, lane) = (row / BLOCK_ROWS, row % BLOCK_ROWS);
        let (chunks, rest) = codes.as_chunks::<BLOCK_COLUMNS>();
        let mut last = [1; BLOCK_COLUMNS];
        last[..rest.len()].copy_from_slice(rest);
        let blocks = self.blocks.iter_mut().skip(half).step_by(PANEL_BLOCKS);
        for (block, codes) in blocks.zip(chunks.iter().chain([&last])) {
            block.0[4 * lane..][..4].copy_from_slice(&pack(codes));
        }
    }
}

/// Sixteen codes of one row as the four bytes of its lane.
fn pack(codes: &[u8; BLOCK_COLUMNS]) -> [u8; 4] {
    let (fields, _) = codes.as_chunks::<4>();
    let lane = (0..4).fold(0, |lane, f| lane | u32::from_le_bytes(fields[f]) << (2 * f));
    lane.to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::TernaryMatrix;
    use crate::{Isa, Kernels, PANEL_ROWS, QuantizedActivations};

    /// No quantizer makes −128 of an absolute maximum, but 8 bits hold it, so the kernels must.
    #[test]
    fn products_with_minus_128_are_exact() {
        for (m, k) in [(1, 16), (2, 2560), (3, 6912), (4, 8192), (8, 8192)] {
            for code in 0..=2 {
                let mut weights = TernaryMatrix::new(PANEL_ROWS, k);
                for mut panel in weights.panels_mut() {
                    panel
                        .rows()
                        .for_each(|row| panel.set_row(row, &vec![code; k]));
                }
                let mut x = QuantizedActivations::new(m, k);
                x.reset(m, k);
                for token in x.tokens_mut() {
                    token.values.fill(-128);
                    (*token.scale, *token.sum) = (1.0, -128 * k as i32);
                }
                for isa in Isa::available() {
                    let mut out = vec![0; m * PANEL_ROWS];
                    Kernels::new(isa)
                        .unwrap()
                        .ternary_matmul(&weights, 0..1, &x, &mut out);
                    let expected = (i32::from(code) - 1) * -128 * k as i32;
                    assert!(
                        out.iter().all(|&sum| sum == expected),
                        "{isa}: code {code}, m {m}, k {k}"
                    );
                }
            }
        }
    }
}
