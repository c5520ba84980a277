//! The weights of a model, and how much of them a step reads and multiplies. The bounds on its
//! speed follow from this.

use sterna_kernels::TernaryMatrix;

use super::embedding::Embedding;
use super::kv_store::KvShape;
use super::layer::Layer;
use super::linear::{Linear, Projections};
use super::mixture::Mixture;
use super::norm::Norm;
use super::output_head::OutputHead;
use crate::checkpoint::ModelConfig;

/// All weights of a model, in the layouts of the kernels.
pub(super) struct Weights {
    /// The embedding, which a tied output head shares.
    pub(super) embedding: Embedding,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Norm,
    pub(super) head: Option<OutputHead>,
    /// The bytes of all matrices. A shared matrix counts once. What [`Model::prepare`] builds does
    /// not count.
    ///
    /// [`Model::prepare`]: super::Model::prepare
    pub(super) bytes: usize,
}

impl Weights {
    /// Returns the largest number of factors that a token has for one product.
    pub(super) fn factors_per_token(&self) -> usize {
        let projections = self.layers.iter().flat_map(Layer::projections);
        let formats = projections.map(Projections::input_format);
        let formats = formats.chain(self.head.as_ref().map(OutputHead::input_format));
        let mixtures = self.layers.iter().filter_map(Layer::mixture);
        let of_experts = mixtures.flat_map(|mixture| {
            let formats = [mixture.input_format(), mixture.gated_format()];
            formats.map(|format| format.scales_per_token())
        });
        let factors = formats.map(|format| format.scales_per_token());
        let factors = factors.chain(of_experts);
        factors.max().unwrap_or(1)
    }

    /// Returns whether linears have low-rank corrections.
    pub(super) fn have_corrections(&self) -> bool {
        let projections = self.layers.iter().flat_map(Layer::projections);
        let formats = projections.map(Projections::input_format);
        let mut formats = formats.chain(self.head.as_ref().map(OutputHead::input_format));
        formats.any(|format| format.corrections.iter().any(Option::is_some))
    }
}

/// Gate, up and down.
const MATRICES_OF_AN_EXPERT: usize = 3;

/// Bytes as they are in memory, and numbers of weights as in the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The bytes of all matrices of the layers, without experts. Every step reads them.
    pub layer_bytes: usize,
    /// The bytes of one expert of one layer; 0 without experts. A step reads those of the experts
    /// that its rows use.
    pub expert_bytes: usize,
    /// The experts that a token uses, added over the layers.
    pub experts_per_token: usize,
    /// The bytes of `ternary_weights`.
    pub ternary_bytes: usize,
    /// The ternary weights of the layers that one token is multiplied by.
    pub ternary_weights: usize,
    /// The bytes of the output head; 0 without one. Every step that computes all
    /// logits reads them.
    pub head_bytes: usize,
    /// The weights of the output head; 0 without one.
    pub head_weights: usize,
    /// The bytes of the keys and values of one token, all layers.
    pub kv_bytes_per_token: usize,
    /// The part of them that belongs to layers whose tokens attend to a window.
    pub local_kv_bytes_per_token: usize,
    /// The tokens of that window; 0 without such layers.
    pub window: usize,
    /// The bytes of the states of one sequence, all layers. A decode reads and writes them.
    pub state_bytes: usize,
}

impl Sizes {
    pub(super) fn of(
        (config, weights): (&ModelConfig, &Weights),
        kv: KvShape,
        state_bytes: usize,
    ) -> Sizes {
        let linears = weights.layers.iter().flat_map(Layer::linears);
        let ternary = linears.clone().filter_map(|linear| match linear {
            Linear::Ternary(linear) => Some(&linear.weights),
            Linear::Dense(_) => None,
        });
        let mixtures = weights.layers.iter().filter_map(Layer::mixture);
        let used = mixtures.flat_map(Mixture::used_by_a_token);
        let weights_of = |matrix: &TernaryMatrix| matrix.rows() * matrix.columns();
        let used_bytes: usize = used.clone().map(TernaryMatrix::bytes).sum();
        let experts_per_token = used.clone().count() / MATRICES_OF_AN_EXPERT;
        let ternary = ternary.chain(used);
        let local_layers = (0..config.layers).filter(|layer| config.is_local(*layer));
        Sizes {
            layer_bytes: linears.map(Linear::bytes).sum(),
            expert_bytes: used_bytes.checked_div(experts_per_token).unwrap_or(0),
            experts_per_token,
            ternary_bytes: ternary.clone().map(TernaryMatrix::bytes).sum(),
            ternary_weights: ternary.map(weights_of).sum(),
            head_bytes: weights.head.as_ref().map_or(0, OutputHead::bytes),
            head_weights: weights.head.as_ref().map_or(0, OutputHead::weights),
            kv_bytes_per_token: kv.token_bytes(),
            local_kv_bytes_per_token: kv.token_bytes() / kv.layers.max(1) * local_layers.count(),
            window: config.local.as_ref().map_or(0, |local| local.window),
            state_bytes,
        }
    }

    /// Returns the bits of a ternary weight, padding included. They tell the packing.
    pub fn bits_per_weight(&self) -> f64 {
        8.0 * self.ternary_bytes as f64 / self.ternary_weights.max(1) as f64
    }
}
