//! One transformer layer: attention, then feed-forward, each added to the residual.

use super::activations::Pending;
use super::attention::Attention;
use super::context::ForwardContext;
use super::feed_forward::FeedForward;
use super::linear::Projections;
use super::norm::Norm;

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
        let Layer {
            attention_norm,
            attention,
            feed_forward_norm,
            feed_forward,
        } = self;
        let rows = pending.add_and_norm(context, residual, attention_norm, &attention.qkv);
        let pending = attention.forward(context, rows);
        let rows =
            pending.add_and_norm(context, residual, feed_forward_norm, &feed_forward.gate_up);
        feed_forward.forward(context, rows)
    }

    pub(super) fn projections(&self) -> [&Projections; 4] {
        [
            &self.attention.qkv,
            &self.attention.output,
            &self.feed_forward.gate_up,
            &self.feed_forward.down,
        ]
    }

    pub(super) fn projections_mut(&mut self) -> [&mut Projections; 4] {
        [
            &mut self.attention.qkv,
            &mut self.attention.output,
            &mut self.feed_forward.gate_up,
            &mut self.feed_forward.down,
        ]
    }
}
