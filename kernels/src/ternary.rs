//! A matrix of ternary weights, with two bits a weight or five weights a byte.
//!
//! A matrix without groups has one scale, which is part of the factors of a product. In a matrix
//! with groups, each row has a scale for each group of columns ([`GroupSize`]). These scales are
//! stored beside the weights, in half precision as in files.
//!
//! A binary weight, −1 or +1, is a ternary weight that is never 0.
//!
//! # The product
//!
//! A stored code is the weight plus 1, so 0, 1 or 2. Then Σ weight · q = Σ code · q − Σ q, where q
//! are the 8-bit activations. The first sum multiplies unsigned by signed bytes, as the dot-product
//! instructions do, and the second does not depend on the row. A step is two blocks: 32 rows of 4 F
//! columns, where F is the number of fields of a byte. AVX-512 unpacks the codes in registers.
//! Without groups:
//!
//! ```text
//! for each 256 tokens, for each panel of 32 rows, for each tile of up to 8 of these tokens:
//!     sums[token][row] = −Σ q(token)
//!     for each step of the panel:
//!         packed[row] = the four bytes of the row
//!         for f in 0..F:
//!             codes[row] = field f of each of the four bytes: columns 4 f..4 f + 4 of the step
//!             for each token of the tile:
//!                 sums[token][row] += codes[row] · (the activations of these four columns)
//!     out[token][row] = sums[token][row] · factor(token)
//! ```
//!
//! In the two-bit packing, field f of a byte v is `v >> 2 f & 3`. In the five-trit packing,
//! v = t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4, and bytes wrap around:
//!
//! ```text
//! u = min(v, v − 81), then u = min(u, u − 81)   # v mod 81: a negative byte wraps to a larger one
//! t0, t1, t2, t3 = the two-bit fields of table[u]
//! t4 = the two highest bits of v − u            # v − u is 81 · t4
//! ```
//!
//! With groups, each group has sums of its own, which start at −Σ q of the group. Then
//! `out[token][row] += sums[token][row] · (scale(row) · factor(token))`, with the scale and the
//! factor of the group.
//!
//! One or two tokens wait for memory, not for the multiplications. For them, AVX-512 multiplies
//! each field where it is in its byte, and shifts or divides the sums at the end
//! (`x86_64/avx512/ternary.rs`).
//!
//! The alternative is to unpack 256 columns once for all tokens, into a byte for each weight. This
//! costs stores and loads. On AVX-512 the alternative was slower with most groups and never clearly
//! faster, so it was rejected there (`benches/record/engine.md`). AVX2 has too few registers for
//! the fields and the sums of several tokens, so AVX2 does unpack once for three tokens or more.
//!
//! Invariant: rows and columns that only fill the last block have weight zero.

use std::ops::Range;
use std::sync::Arc;

use crate::block::{BLOCK_ROWS, Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::dense::f32_from_f16;
use crate::groups::{GroupSize, PartialGroup, RecordShape};
use crate::huge::HugeSlice;
use crate::packing::{FIVE_TRIT_COLUMNS, Packing, TWO_BIT_COLUMNS, pack_row};
use crate::prefetch::prefetch;

/// How much of a panel [`TernaryMatrix::prefetch_panel`] prefetches: 2 KiB.
const PREFETCHED_BLOCKS: usize = 32;

/// The largest number of columns. Up to it, sums of 64 · code · activation, the largest that a
/// kernel forms, fit an `i32`.
pub const MAX_COLUMNS: usize = 1 << 18;

/// A packed matrix of the weights −1, 0 and +1, `[rows][columns]`, which may have a scale for each
/// row and group of columns.
#[derive(Clone)]
pub struct TernaryMatrix {
    packing: Packing,
    group: Option<GroupSize>, // `None` if the matrix has one scale, outside of it.
    rows: usize,
    columns: usize,
    panel_blocks: usize,           // The blocks of a panel.
    memory: Arc<HugeSlice<Block>>, // Several matrices may share it.
    /// This matrix's part of the memory: `[panel][column block][half of the panel]`, or
    /// `[panel][group][blocks of a record]`.
    blocks: Range<usize>,
}

impl TernaryMatrix {
    /// Makes a matrix of zeros without groups. [`Kernels::packing`](crate::Kernels::packing)
    /// returns the packing that a machine multiplies fastest.
    ///
    /// # Panics
    /// If a dimension is zero or `columns` exceeds [`MAX_COLUMNS`].
    pub fn new(rows: usize, columns: usize, packing: Packing) -> TernaryMatrix {
        let panel_blocks = PANEL_BLOCKS * columns.div_ceil(packing.block_columns());
        let mut matrix = TernaryMatrix::unfilled(rows, columns, packing, panel_blocks);
        matrix
            .memory_mut()
            .fill(Block([packing.zero_weights(); 64]));
        matrix
    }

    /// Makes a matrix of zeros with groups, whose scales are zero too.
    ///
    /// # Errors
    /// If the columns are not whole groups.
    ///
    /// # Panics
    /// If a dimension is zero or `columns` exceeds [`MAX_COLUMNS`].
    pub fn with_groups(
        rows: usize,
        columns: usize,
        packing: Packing,
        group: GroupSize,
    ) -> Result<TernaryMatrix, PartialGroup> {
        let shape = RecordShape::new(packing, group);
        let panel_blocks = group.count(columns)? * shape.blocks();
        let mut matrix = TernaryMatrix::unfilled(rows, columns, packing, panel_blocks);
        matrix.group = Some(group);
        let records = matrix.memory_mut().chunks_exact_mut(shape.blocks());
        records.for_each(|record| shape.clear(record));
        Ok(matrix)
    }

    /// Makes a matrix of bytes 0.
    fn unfilled(
        rows: usize,
        columns: usize,
        packing: Packing,
        panel_blocks: usize,
    ) -> TernaryMatrix {
        assert!(rows > 0 && columns > 0, "a matrix of {rows} × {columns}");
        assert!(
            columns <= MAX_COLUMNS,
            "{columns} columns: sums may not fit an i32"
        );
        let blocks = rows.div_ceil(PANEL_ROWS) * panel_blocks;
        TernaryMatrix {
            packing,
            group: None,
            rows,
            columns,
            panel_blocks,
            memory: Arc::new(HugeSlice::new(blocks)),
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

    /// Returns the size of the groups of columns that have a scale of their own, if any have.
    pub fn group(&self) -> Option<GroupSize> {
        self.group
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

    /// Returns the size of the packed weights and scales, in bytes: what one product reads.
    pub fn bytes(&self) -> usize {
        size_of_val(self.blocks())
    }

    /// Returns the panels, to be filled. Each may be sent to another thread.
    ///
    /// # Panics
    /// If the matrix shares its memory with others.
    pub fn panels_mut(&mut self) -> impl Iterator<Item = PanelMut<'_>> {
        let (packing, group) = (self.packing, self.group);
        let (rows, columns) = (self.rows, self.columns);
        let panel_blocks = self.panel_blocks;
        self.memory_mut()
            .chunks_exact_mut(panel_blocks)
            .enumerate()
            .map(move |(panel, blocks)| {
                let first = panel * PANEL_ROWS;
                PanelMut {
                    packing,
                    group,
                    rows: first..rows.min(first + PANEL_ROWS),
                    columns,
                    blocks,
                }
            })
    }

    /// Returns one weight: −1, 0 or +1, without its scale.
    ///
    /// # Panics
    /// If there is no such row or column.
    pub fn weight(&self, row: usize, column: usize) -> i8 {
        assert!(
            row < self.rows && column < self.columns,
            "no weight at row {row}, column {column}"
        );
        let (panel, row) = (row / PANEL_ROWS, row % PANEL_ROWS);
        let code = match self.group {
            None => self.code(panel, row, column),
            Some(_) => self.grouped_code(panel, row, column),
        };
        code as i8 - 1
    }

    /// Returns the scale of a row in one group of its columns, or 1 if the matrix has no groups.
    ///
    /// # Panics
    /// If there is no such row or group.
    pub fn scale(&self, row: usize, group: usize) -> f32 {
        assert!(row < self.rows, "no row {row} in a matrix of {}", self.rows);
        self.panel_scale(row / PANEL_ROWS, row % PANEL_ROWS, group)
    }

    /// Copies one row as f32, each weight times the scale of its group: for example the embedding
    /// of a token. Every value is exact.
    ///
    /// # Panics
    /// If there is no such row or `out` is not `columns` long.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "no row {row} in a matrix of {}", self.rows);
        assert_eq!(out.len(), self.columns, "values of a row");
        let (panel, row) = (row / PANEL_ROWS, row % PANEL_ROWS);
        let columns = self.columns_of_scale();
        for (group, out) in out.chunks_exact_mut(columns).enumerate() {
            let scale = self.panel_scale(panel, row, group);
            let value = |code| (f32::from(code) - 1.0) * scale;
            self.unpack(panel, row, group * columns, out, value);
        }
    }

    /// Writes `value(code)`, where a code is weight + 1, for the columns from `first` on at `row`
    /// (0..32) of a panel. The columns begin with a group; without groups, with a block. In a
    /// matrix with groups they end with this group at the latest.
    pub(crate) fn unpack<T>(
        &self,
        panel: usize,
        row: usize,
        first: usize,
        out: &mut [T],
        value: impl Fn(u8) -> T,
    ) {
        let (panel, packing) = (self.panel(panel), self.packing);
        if self.group.is_none() {
            let steps = &panel[first / packing.block_columns() * PANEL_BLOCKS..];
            return unpack_steps(packing, steps, row, out, value);
        }
        let shape = self.record_shape();
        let record = first / self.columns_of_scale() * shape.blocks();
        let record = &panel[record..record + shape.blocks()];
        let (stepped, rest) = out.split_at_mut(shape.step_columns());
        unpack_steps(packing, record, row, stepped, &value);
        for (k, out) in rest.iter_mut().enumerate() {
            let place = shape.place(row, shape.step_columns() + k);
            let byte = record[place.block].0[row % BLOCK_ROWS * 4 + k % 4];
            *out = value(place.packing.unpack(byte, place.field));
        }
    }

    /// Returns the scale at `row` (0..32) of a panel in one group, or 1 if there are no groups.
    pub(crate) fn panel_scale(&self, panel: usize, row: usize, group: usize) -> f32 {
        if self.group.is_none() {
            return 1.0;
        }
        let record = self.record_shape().records(self.panel(panel)).nth(group);
        let record = record.unwrap_or_else(|| panic!("no group {group} in a row"));
        f32_from_f16(record.scales[row / BLOCK_ROWS][row % BLOCK_ROWS])
    }

    /// Returns the code (weight + 1) at `row` (0..32) and `column` of a panel without groups.
    fn code(&self, panel: usize, row: usize, column: usize) -> u8 {
        let block_columns = self.packing.block_columns();
        let block = column / block_columns * PANEL_BLOCKS + row / BLOCK_ROWS;
        let (field, byte) = (column % block_columns / 4, column % 4);
        let byte = self.panel(panel)[block].0[row % BLOCK_ROWS * 4 + byte];
        self.packing.unpack(byte, field)
    }

    /// Returns the code (weight + 1) at `row` (0..32) and `column` of a panel with groups.
    fn grouped_code(&self, panel: usize, row: usize, column: usize) -> u8 {
        let (shape, columns) = (self.record_shape(), self.columns_of_scale());
        let place = shape.place(row, column % columns);
        let record = column / columns * shape.blocks();
        let byte = row % BLOCK_ROWS * 4 + column % 4;
        let byte = self.panel(panel)[record + place.block].0[byte];
        place.packing.unpack(byte, place.field)
    }

    /// Returns the number of neighbouring columns that share a scale.
    pub(crate) fn columns_of_scale(&self) -> usize {
        self.group.map_or(self.columns, GroupSize::columns)
    }

    /// Returns the shape of the records of a matrix with groups.
    ///
    /// # Panics
    /// If the matrix has no groups.
    #[inline]
    pub(crate) fn record_shape(&self) -> RecordShape {
        RecordShape::new(self.packing, self.group.expect("a matrix with groups"))
    }

    /// Returns the blocks of one panel, in the order of the stream.
    #[inline]
    pub(crate) fn panel(&self, panel: usize) -> &[Block] {
        &self.blocks()[panel * self.panel_blocks..][..self.panel_blocks]
    }

    /// Prefetches the beginning of a panel, for a product that follows. The processor itself finds
    /// the rest as it is read.
    pub fn prefetch_panel(&self, panel: usize) {
        let blocks = self.panel(panel);
        prefetch(&blocks[..blocks.len().min(PREFETCHED_BLOCKS)]);
    }

    #[inline]
    fn blocks(&self) -> &[Block] {
        &self.memory[self.blocks.clone()]
    }

    fn memory_mut(&mut self) -> &mut [Block] {
        let memory = Arc::get_mut(&mut self.memory).expect("the matrix shares its memory");
        &mut memory[self.blocks.clone()]
    }
}

/// One panel of a [`TernaryMatrix`], to be filled.
pub struct PanelMut<'a> {
    packing: Packing,
    group: Option<GroupSize>,
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
        assert_eq!(codes.len(), self.columns, "codes of a row");
        // Without an early exit, so that the compiler vectorizes the loop.
        let largest = codes.iter().fold(0, |largest, &code| code.max(largest));
        assert!(largest <= 2, "a code of row {row} is not 0, 1 or 2");
        let row = self.index_of(row);
        let Some(group) = self.group else {
            return pack_codes(self.packing, self.blocks, row, codes);
        };
        let shape = RecordShape::new(self.packing, group);
        let groups = codes.chunks_exact(group.columns());
        for (record, codes) in self.blocks.chunks_exact_mut(shape.blocks()).zip(groups) {
            let (stepped, rest) = codes.split_at(shape.step_columns());
            let steps = &mut record[..shape.step_blocks()];
            pack_codes(self.packing, steps, row, stepped);
            shape.set_rest(record, row, rest);
        }
    }

    /// Sets the scales of a row of the matrix (an absolute index), one for each group of its
    /// columns, to the bits of half-precision numbers.
    ///
    /// # Panics
    /// If the row is not in this panel, or the matrix does not have this many groups.
    pub fn set_scales(&mut self, row: usize, scales: &[u16]) {
        let row = self.index_of(row);
        let group = self.group.expect("a matrix with groups has scales");
        let shape = RecordShape::new(self.packing, group);
        assert_eq!(
            scales.len(),
            self.columns / group.columns(),
            "scales of a row"
        );
        for (record, scale) in self.blocks.chunks_exact_mut(shape.blocks()).zip(scales) {
            shape.scales_mut(record)[row] = *scale;
        }
    }

    /// Returns the place of a row in this panel.
    fn index_of(&self, row: usize) -> usize {
        assert!(
            self.rows.contains(&row),
            "row {row} is not in the panel of rows {:?}",
            self.rows
        );
        row - self.rows.start
    }
}

/// Writes the values of the codes of a row (0..32) of some steps.
fn unpack_steps<T>(
    packing: Packing,
    steps: &[Block],
    row: usize,
    out: &mut [T],
    value: impl Fn(u8) -> T,
) {
    let blocks = steps[row / BLOCK_ROWS..].iter().step_by(PANEL_BLOCKS);
    for (block, out) in blocks.zip(out.chunks_mut(packing.block_columns())) {
        let lane = &block.0.as_chunks::<4>().0[row % BLOCK_ROWS];
        for (field, out) in out.chunks_mut(4).enumerate() {
            for (out, byte) in out.iter_mut().zip(lane) {
                *out = value(packing.unpack(*byte, field));
            }
        }
    }
}

/// Packs the codes of a row (0..32) into the steps of a panel or of a group.
fn pack_codes(packing: Packing, steps: &mut [Block], row: usize, codes: &[u8]) {
    let blocks = steps[row / BLOCK_ROWS..].iter_mut();
    let lanes = blocks
        .step_by(PANEL_BLOCKS)
        .map(|block| &mut block.0.as_chunks_mut().0[row % BLOCK_ROWS]);
    match packing {
        Packing::TwoBit => pack_row::<TWO_BIT_COLUMNS>(Packing::TwoBit, codes, lanes),
        Packing::FiveTrit => pack_row::<FIVE_TRIT_COLUMNS>(Packing::FiveTrit, codes, lanes),
    }
}

#[cfg(test)]
mod tests {
    use super::TernaryMatrix;
    use crate::{
        GroupSize, Isa, Kernels, PANEL_ROWS, Packing, PrefetchQueue, QuantizedActivations,
        ScaledActivations, f16_from_f32,
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
                fill_with_minus_128(&mut x);
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

    fn fill_with_minus_128(x: &mut QuantizedActivations) {
        for token in x.tokens_mut() {
            let sum = -128 * (token.values.len() / token.sums.len()) as i32;
            token.values.fill(-128);
            token.scales.fill(1.0);
            token.sums.fill(sum);
        }
    }

    #[test]
    fn grouped_products_with_minus_128_are_exact() {
        for (m, code, group) in (1..=9).flat_map(|m| {
            let cases = (0..=2).flat_map(|code| GroupSize::ALL.map(|group| (code, group)));
            cases.map(move |(code, group)| (m, code, group))
        }) {
            let columns = 3 * group.columns();
            let mut x = QuantizedActivations::new(m, columns);
            x.reset_groups(m, columns, group).unwrap();
            fill_with_minus_128(&mut x);
            for packing in [Packing::TwoBit, Packing::FiveTrit] {
                let mut weights =
                    TernaryMatrix::with_groups(PANEL_ROWS, columns, packing, group).unwrap();
                for mut panel in weights.panels_mut() {
                    for row in panel.rows() {
                        panel.set_row(row, &vec![code; columns]);
                        panel.set_scales(row, &[f16_from_f32(1.0); 3]);
                    }
                }
                let kernels = Isa::available().map(|isa| Kernels::new(isa).unwrap());
                for kernels in kernels.filter(|kernels| kernels.reads(packing)) {
                    let mut out = vec![0.0; m * PANEL_ROWS];
                    let x = ScaledActivations {
                        activations: &x,
                        factors: &vec![1.0; 3 * m],
                    };
                    let mut prefetches = PrefetchQueue::empty();
                    kernels.ternary_matmul(&weights, 0..1, x, &mut out, &mut prefetches);
                    let expected = ((i32::from(code) - 1) * -128 * columns as i32) as f32;
                    assert!(
                        out.iter().all(|&sum| sum == expected),
                        "{}: code {code}, m {m}, {packing:?}, {group:?}",
                        kernels.isa()
                    );
                }
            }
        }
    }
}
