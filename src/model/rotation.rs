//! The rotation of rows: the input of rotated matrices, and the rows of a rotated embedding.

use std::sync::Arc;

use sterna_kernels::Kernels;

use crate::checkpoint::Rotation;

/// The rotation of rows of one width.
pub(super) struct RowRotation {
    block: usize,
    signs: Option<Arc<[f32]>>, // `None` if all are 1.
}

impl RowRotation {
    /// Returns how a model's rotation turns rows of `columns` values.
    pub(super) fn new(rotation: &Rotation, columns: usize) -> RowRotation {
        RowRotation {
            block: rotation.block,
            signs: rotation.signs(columns).cloned(),
        }
    }

    /// Rotates an input row: `x = H·D·x`.
    pub(super) fn rotate(&self, kernels: Kernels, row: &mut [f32]) {
        self.change_signs(row);
        kernels.hadamard(row, self.block);
    }

    /// Turns back a row of a rotated embedding: `x = D·H·x`.
    pub(super) fn turn_back(&self, kernels: Kernels, row: &mut [f32]) {
        kernels.hadamard(row, self.block);
        self.change_signs(row);
    }

    fn change_signs(&self, row: &mut [f32]) {
        if let Some(signs) = &self.signs {
            row.iter_mut()
                .zip(&**signs)
                .for_each(|(x, sign)| *x *= sign);
        }
    }
}
