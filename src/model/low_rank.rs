//! Low-rank corrections of ternary linears: y += U · (Vᵀ · x), where x is not quantized.
//!
//! They make up for a part of what quantization loses (arXiv 2412.07902). Workers compute Vᵀ · x
//! while they make the input rows, and add U times that to their share of the product.
//!
//! Invariant: a token's correction depends on that token alone. Each sum has the fixed order of a
//! float matrix.

use std::ops::Range;

use sterna_kernels::{DenseMatrix, Kernels, PANEL_ROWS};

/// The correction of one linear.
pub(super) struct LowRankCorrection {
    /// Vᵀ, `[rank][columns]`.
    down: DenseMatrix,
    /// U, `[rows][rank]`.
    up: DenseMatrix,
}

impl LowRankCorrection {
    pub(super) fn new(down: DenseMatrix, up: DenseMatrix) -> LowRankCorrection {
        assert_eq!(down.rows(), up.columns(), "both matrices have the rank");
        LowRankCorrection { down, up }
    }

    /// Returns the number of values between the two matrices.
    pub(super) fn rank(&self) -> usize {
        self.up.columns()
    }

    /// Returns the number of values that [`LowRankCorrection::lower`] writes for each token.
    pub(super) fn lowered_width(&self) -> usize {
        self.down.panels() * PANEL_ROWS
    }

    /// Returns the bytes of both matrices.
    pub(super) fn bytes(&self) -> usize {
        self.down.bytes() + self.up.bytes()
    }

    /// Computes Vᵀ · x for `tokens` rows, panel-major, `[panel][token][PANEL_ROWS]`.
    pub(super) fn lower(&self, kernels: Kernels, rows: &[f32], tokens: usize, out: &mut [f32]) {
        kernels.dense_matmul(&self.down, 0..self.down.panels(), rows, tokens, out);
    }

    /// Adds U · `lowered` to the panels of a product, `[panel of the range][token][PANEL_ROWS]`.
    /// `lowered` is `[token][rank]`; `spare` has room for a panel.
    pub(super) fn add(
        &self,
        kernels: Kernels,
        panels: Range<usize>,
        lowered: &[f32],
        spare: &mut [f32],
        out: &mut [f32],
    ) {
        let tokens = lowered.len() / self.rank();
        let panel = tokens * PANEL_ROWS;
        let at_once = spare.len() / panel;
        let starts = panels.clone().step_by(at_once);
        for (start, out) in starts.zip(out.chunks_mut(at_once * panel)) {
            let end = panels.end.min(start + at_once);
            let spare = &mut spare[..out.len()];
            kernels.dense_matmul(&self.up, start..end, lowered, tokens, spare);
            out.iter_mut()
                .zip(spare)
                .for_each(|(out, more)| *out += *more);
        }
    }
}
