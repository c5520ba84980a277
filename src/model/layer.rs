//! One transformer layer: attention, then feed-forward, each added to the residual.

use super::activations::{InputRows, Pending};
use super::attention::Attention;
use super::linear::{Linear, Projections};
use super::norm::Norm;
use super::workers::ForwardContext;
use crate::checkpoint::Activation;

/// One transformer layer.
pub(super) struct Layer {
    pub(super) attention_norm: Norm,
    pub(super) attention: Attention,
    pub(super) feed_forward_norm: Norm,
    pub(super) feed_forward: FeedForward,
}

impl Layer {
    /// Computes the layer: `x += attention(norm(x)); x += feed_forward(norm(x))`, where x is the
    /// residual, `[token][hidden]`.
    ///
    /// Each addition waits until the next norm, which reads the residual anyway. So `pending` is
    /// the output of the layer before, and the result is this layer's own output.
    pub(super) fn forward<'m>(
        &'m self,
        context: &mut ForwardContext<'_>,
        residual: &mut [f32],
        pending: Pending<'m>,
    ) -> Pending<'m> {
        let (qkv, gate_up) = (&self.attention.qkv, &self.feed_forward.gate_up);
        let rows = pending.add_and_norm(context, residual, &self.attention_norm, qkv);
        let pending = self.attention.forward(context, rows);
        let rows = pending.add_and_norm(context, residual, &self.feed_forward_norm, gate_up);
        self.feed_forward.forward(context, rows)
    }

    pub(super) fn projections(&self) -> [&Projections; 4] {
        let (attention, feed_forward) = (&self.attention, &self.feed_forward);
        [
            &attention.qkv,
            &attention.output,
            &feed_forward.gate_up,
            &feed_forward.down,
        ]
    }

    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> + Clone {
        let projections = self.projections().into_iter();
        projections.flat_map(Projections::linears)
    }

    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        let (attention, feed_forward) = (&mut self.attention, &mut self.feed_forward);
        let projections = [
            &mut attention.qkv,
            &mut attention.output,
            &mut feed_forward.gate_up,
            &mut feed_forward.down,
        ];
        projections.into_iter().flat_map(Projections::linears_mut)
    }
}

/// The feed-forward half of a layer.
pub(super) struct FeedForward {
    /// Gate, up.
    pub(super) gate_up: Projections,
    pub(super) activation: Activation,
    /// The norm before `down`, if the architecture has one.
    pub(super) sub_norm: Option<Norm>,
    pub(super) down: Projections,
    /// The norm after `down`, if the architecture has one.
    pub(super) post_norm: Option<Norm>,
}

impl FeedForward {
    /// Returns the half's output for `rows`, the normed residual.
    pub(super) fn forward<'m>(
        &'m self,
        context: &mut ForwardContext<'_>,
        rows: InputRows<'m>,
    ) -> Pending<'m> {
        let gated = rows.multiply_gated(context, self.activation);
        let rows = gated.into_rows(context, &self.down, self.sub_norm.as_ref());
        rows.multiply(context).into_pending(self.post_norm.as_ref())
    }
}
