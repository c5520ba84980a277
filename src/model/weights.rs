//! The weights of a model.

use std::sync::Arc;

use sterna_kernels::DenseMatrix;

use super::layer::Layer;
use super::norm::Norm;
use super::output_head::OutputHead;

/// All weights of a model, in the layouts of the kernels.
pub(super) struct Weights {
    /// The embedding, which a tied output head shares.
    pub(super) embedding: Arc<DenseMatrix>,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Norm,
    pub(super) head: OutputHead,
    /// The bytes of all matrices. A shared matrix counts once.
    pub(super) bytes: usize,
}
