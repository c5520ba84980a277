//! The embedding: the hidden state with which each token begins.

use std::sync::Arc;

use sterna_kernels::{DenseMatrix, Kernels, TernaryMatrix};

use super::linear::{Linear, TernaryLinear};
use super::rotation::RowRotation;

/// The hidden state of each token, `[token][hidden]`. A tied output head shares the matrix.
pub(super) struct Embedding {
    pub(super) matrix: EmbeddingMatrix,
    /// The rotation of the rows, if they are stored rotated.
    pub(super) rotation: Option<RowRotation>,
}

/// The matrix of an embedding.
pub(super) enum EmbeddingMatrix {
    Dense(Arc<DenseMatrix>),
    /// Ternary weights with a scale for each group.
    Ternary(TernaryMatrix),
}

impl Embedding {
    /// Copies the hidden state of `token`.
    pub(super) fn copy_row(&self, kernels: Kernels, token: usize, out: &mut [f32]) {
        match &self.matrix {
            EmbeddingMatrix::Dense(matrix) => kernels.dense_row(matrix, token, out),
            EmbeddingMatrix::Ternary(matrix) => matrix.copy_row(token, out),
        }
        if let Some(rotation) = &self.rotation {
            rotation.turn_back(kernels, out);
        }
    }
}

impl EmbeddingMatrix {
    /// Returns a linear that shares the matrix.
    pub(super) fn as_head(&self) -> Linear {
        match self {
            EmbeddingMatrix::Dense(weights) => Linear::Dense(Arc::clone(weights)),
            EmbeddingMatrix::Ternary(weights) => Linear::Ternary(TernaryLinear {
                weights: weights.clone(),
                scale: 1.0,
                input_norm: None,
                correction: None,
                bias: None,
            }),
        }
    }

    /// Returns the bytes of the matrix.
    pub(super) fn bytes(&self) -> usize {
        match self {
            EmbeddingMatrix::Dense(matrix) => matrix.bytes(),
            EmbeddingMatrix::Ternary(matrix) => matrix.bytes(),
        }
    }
}
