//! One transformer layer: attention or a recurrence, then feed-forward, each added to the residual.

use super::activations::{InputRows, Pending};
use super::attention::Attention;
use super::linear::{Linear, Projections};
use super::norm::Norm;
use super::recurrent::Recurrence;
use super::workers::ForwardContext;
use crate::checkpoint::Activation;

/// One transformer layer.
pub(super) struct Layer {
    pub(super) mixer_norm: Norm,
    pub(super) mixer: Mixer,
    pub(super) feed_forward_norm: Norm,
    pub(super) feed_forward: FeedForward,
}

/// The half of a layer that reads other tokens of the sequence.
pub(super) enum Mixer {
    Attention(Attention),
    Recurrent(Recurrence),
}

impl Mixer {
    /// Returns the projections of the half's input.
    pub(super) fn input(&self) -> &Projections {
        match self {
            Mixer::Attention(attention) => &attention.qkv,
            Mixer::Recurrent(recurrence) => &recurrence.input,
        }
    }

    fn output(&self) -> &Projections {
        match self {
            Mixer::Attention(attention) => &attention.output,
            Mixer::Recurrent(recurrence) => &recurrence.output,
        }
    }

    fn projections_mut(&mut self) -> [&mut Projections; 2] {
        match self {
            Mixer::Attention(attention) => [&mut attention.qkv, &mut attention.output],
            Mixer::Recurrent(recurrence) => [&mut recurrence.input, &mut recurrence.output],
        }
    }

    /// Returns the half's output for `rows`, the normed residual.
    fn forward<'m>(&'m self, context: &mut ForwardContext<'_>, rows: InputRows<'m>) -> Pending<'m> {
        match self {
            Mixer::Attention(attention) => attention.forward(context, rows),
            Mixer::Recurrent(recurrence) => recurrence.forward(context, rows),
        }
    }
}

impl Layer {
    /// Computes the layer: `x += mixer(norm(x)); x += feed_forward(norm(x))`, where x is the
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
        let (input, gate_up) = (self.mixer.input(), &self.feed_forward.gate_up);
        let rows = pending.add_and_norm(context, residual, &self.mixer_norm, input);
        let pending = self.mixer.forward(context, rows);
        let rows = pending.add_and_norm(context, residual, &self.feed_forward_norm, gate_up);
        self.feed_forward.forward(context, rows)
    }

    pub(super) fn projections(&self) -> [&Projections; 4] {
        let feed_forward = &self.feed_forward;
        [
            self.mixer.input(),
            self.mixer.output(),
            &feed_forward.gate_up,
            &feed_forward.down,
        ]
    }

    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> + Clone {
        let projections = self.projections().into_iter();
        projections.flat_map(Projections::linears)
    }

    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        let feed_forward = &mut self.feed_forward;
        let [input, output] = self.mixer.projections_mut();
        let projections = [
            input,
            output,
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
