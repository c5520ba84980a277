//! The feed-forward half of a layer: down(activation(gate(x)) · up(x)).

use super::activations::{InputRows, Pending};
use super::architecture::Activation;
use super::context::ForwardContext;
use super::linear::Projections;
use super::norm::Norm;

/// The feed-forward half of a layer.
pub(super) struct FeedForward {
    /// Gate, up.
    pub(super) gate_up: Projections,
    pub(super) activation: Activation,
    /// The norm before `down`, if the architecture has one.
    pub(super) sub_norm: Option<Norm>,
    pub(super) down: Projections,
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
        rows.multiply(context).into_pending()
    }
}
