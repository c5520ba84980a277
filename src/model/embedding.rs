//! The embedding: the hidden state with which each token begins.

use std::sync::Arc;

use sterna_kernels::{DenseMatrix, Kernels, TernaryMatrix};

use super::linear::{Linear, TernaryLinear};

/// The hidden state of each token, `[token][hidden]`. A tied output head shares the matrix.
pub(super) enum Embedding {
    Dense(Arc<DenseMatrix>),
    /// Ternary weights with a scale for each group.
    Ternary(TernaryMatrix),
}

impl Embedding {
    /// Copies the hidden state of `token`.
    pub(super) fn copy_row(&self, kernels: Kernels, token: usize, out: &mut [f32]) {
        match self {
            Embedding::Dense(matrix) => kernels.dense_row(matrix, token, out),
            Embedding::Ternary(matrix) => matrix.copy_row(token, out),
        }
    }

    /// Returns a linear that shares the matrix.
    pub(super) fn as_head(&self) -> Linear {
        match self {
            Embedding::Dense(weights) => Linear::Dense(Arc::clone(weights)),
            Embedding::Ternary(weights) => Linear::Ternary(TernaryLinear {
                weights: weights.clone(),
                scale: 1.0,
                input_norm: None,
                correction: None,
            }),
        }
    }

    /// Returns the bytes of the matrix.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Embedding::Dense(matrix) => matrix.bytes(),
            Embedding::Ternary(matrix) => matrix.bytes(),
        }
    }
}
