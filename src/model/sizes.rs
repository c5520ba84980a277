//! How much there is to read and to multiply: what a step's limits follow from.

use sterna_kernels::PAGE_TOKENS;

use super::kv_store::KvShape;
use super::layer::Layer;
use super::linear::{Linear, Projections};
use super::load::Weights;

/// Bytes as they lie in memory, and weights as the checkpoint has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of all matrices of the layers: every step reads them.
    pub layer_bytes: usize,
    /// Those of them that are ternary.
    pub ternary_bytes: usize,
    /// Ternary weights of the layers: every token is multiplied by them.
    pub ternary_weights: usize,
    /// Bytes of the output head: every step reads them that wants logits.
    pub head_bytes: usize,
    /// Weights of the output head.
    pub head_weights: usize,
    /// Keys and values of one token, all layers.
    pub kv_bytes_per_token: usize,
}

impl Sizes {
    pub(super) fn of(weights: &Weights, kv: KvShape) -> Sizes {
        let projections = || weights.layers.iter().flat_map(Layer::projections);
        let ternary = || {
            projections().flat_map(|projections| {
                let columns = projections.columns();
                let linears = projections.linears().iter();
                linears
                    .filter(|linear| matches!(linear, Linear::Ternary(_)))
                    .map(move |linear| (linear.bytes(), linear.rows() * columns))
            })
        };
        let head = weights.head.linears();
        Sizes {
            layer_bytes: projections()
                .flat_map(Projections::linears)
                .map(Linear::bytes)
                .sum(),
            ternary_bytes: ternary().map(|(bytes, _)| bytes).sum(),
            ternary_weights: ternary().map(|(_, weights)| weights).sum(),
            head_bytes: head.iter().map(Linear::bytes).sum(),
            head_weights: head.iter().map(Linear::rows).sum::<usize>() * weights.head.columns(),
            kv_bytes_per_token: kv.page_bytes() / PAGE_TOKENS,
        }
    }

    /// Of the ternary matrices, padding included: it tells the packing.
    #[must_use]
    pub fn bits_per_weight(&self) -> f64 {
        8.0 * self.ternary_bytes as f64 / self.ternary_weights.max(1) as f64
    }
}
