//! RMS norm with learned weights.

use sterna_kernels::Kernels;

/// An RMS norm.
pub(super) struct Norm {
    pub(super) weight: Vec<f32>,
    pub(super) eps: f32,
}

impl Norm {
    /// Returns the number of values in a row.
    pub(super) fn width(&self) -> usize {
        self.weight.len()
    }

    /// Normalizes one row.
    pub(super) fn apply(&self, kernels: Kernels, x: &[f32], out: &mut [f32]) {
        kernels.rms_norm(x, &self.weight, self.eps, out);
    }

    /// Normalizes each row of `x`.
    pub(super) fn apply_rows(&self, kernels: Kernels, x: &[f32], out: &mut [f32]) {
        let rows = x.chunks_exact(self.width());
        for (x, out) in rows.zip(out.chunks_exact_mut(self.width())) {
            self.apply(kernels, x, out);
        }
    }
}
