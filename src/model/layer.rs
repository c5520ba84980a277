//! One transformer layer: attention or a recurrence, then feed-forward, each added to the residual.

use sterna_kernels::TernaryMatrix;

use super::activations::{InputRows, Pending};
use super::attention::Attention;
use super::linear::{Linear, Projections};
use super::mixture::{Expert, Mixture};
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
        let (input, format) = (self.mixer.input(), self.mixer.input().input_format());
        let rows = pending.add_and_norm(context, residual, &self.mixer_norm, (input, format));
        let pending = self.mixer.forward(context, rows);
        let norm = &self.feed_forward_norm;
        match &self.feed_forward {
            FeedForward::Dense(dense) => {
                let input = (&dense.gate_up, dense.gate_up.input_format());
                let rows = pending.add_and_norm(context, residual, norm, input);
                dense.forward(context, rows)
            }
            FeedForward::Mixture(mixture) => {
                let input = (&mixture.router, mixture.input_format());
                let rows = pending.add_and_norm(context, residual, norm, input);
                rows.mix(context, mixture)
            }
        }
    }

    pub(super) fn projections(&self) -> impl Iterator<Item = &Projections> + Clone {
        let of_feed_forward = match &self.feed_forward {
            FeedForward::Dense(dense) => [Some(&dense.gate_up), Some(&dense.down)],
            FeedForward::Mixture(mixture) => [Some(&mixture.router), None],
        };
        let of_mixer = [self.mixer.input(), self.mixer.output()];
        of_mixer
            .into_iter()
            .chain(of_feed_forward.into_iter().flatten())
    }

    /// Returns the mixture, if the feed-forward half is one.
    pub(super) fn mixture(&self) -> Option<&Mixture> {
        match &self.feed_forward {
            FeedForward::Dense(_) => None,
            FeedForward::Mixture(mixture) => Some(mixture),
        }
    }

    /// Returns all linears, except those of experts.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> + Clone {
        self.projections().flat_map(Projections::linears)
    }

    /// Returns all ternary matrices.
    pub(super) fn ternary_mut(&mut self) -> Vec<&mut TernaryMatrix> {
        let [input, output] = self.mixer.projections_mut();
        let (of_feed_forward, experts): (Vec<_>, &mut [Expert]) = match &mut self.feed_forward {
            FeedForward::Dense(dense) => (vec![&mut dense.gate_up, &mut dense.down], &mut []),
            FeedForward::Mixture(mixture) => (vec![&mut mixture.router], &mut mixture.experts),
        };
        let projections = [input, output].into_iter().chain(of_feed_forward);
        let linears = projections.flat_map(Projections::linears_mut);
        let ternary = linears.filter_map(|linear| match linear {
            Linear::Ternary(linear) => Some(&mut linear.weights),
            Linear::Dense(_) => None,
        });
        let experts = experts.iter_mut().flat_map(Expert::linears_mut);
        ternary
            .chain(experts.map(|linear| &mut linear.weights))
            .collect()
    }
}

/// The feed-forward half of a layer.
pub(super) enum FeedForward {
    Dense(DenseFeedForward),
    Mixture(Mixture),
}

/// A feed-forward half that every token uses whole.
pub(super) struct DenseFeedForward {
    /// Gate, up.
    pub(super) gate_up: Projections,
    pub(super) activation: Activation,
    /// The norm before `down`, if the architecture has one.
    pub(super) sub_norm: Option<Norm>,
    pub(super) down: Projections,
    /// The norm after `down`, if the architecture has one.
    pub(super) post_norm: Option<Norm>,
}

impl DenseFeedForward {
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
