//! One layer: attention, then feed-forward, each added to what it was given.

use super::Pass;
use super::attention::Attention;
use super::config::Activation;
use super::linear::{Norm, Projections, add_product};
use super::profile::Stage;

/// One transformer layer.
pub(super) struct Layer {
    pub(super) attention: Attention,
    pub(super) feed_forward: FeedForward,
}

impl Layer {
    /// Turns the hidden states `[token][hidden]` that the layer is given into those that it hands on, but for the last addition: what the
    /// feed-forward makes of them stands in the products. The next layer adds it in passing, or [`Layer::finish`] does; likewise this one
    /// adds what the layer `before` left.
    pub(super) fn forward(&self, pass: &mut Pass<'_>, before: Option<&Layer>, hidden: &mut [f32]) {
        let before = before.map(|layer| &layer.feed_forward.down);
        self.attention.forward(pass, before, hidden);
        self.feed_forward.forward(pass, &self.attention, hidden);
    }

    /// Adds what [`Layer::forward`] left in the products to the hidden states.
    pub(super) fn finish(&self, pass: &mut Pass<'_>, hidden: &mut [f32]) {
        let tokens = pass.placement.tokens();
        let product = self.feed_forward.down.product(0, pass.products, tokens);
        add_product(pass.crew, product, hidden);
        pass.profile.end(Stage::Rows);
    }

    pub(super) fn projections_mut(&mut self) -> [&mut Projections; 4] {
        [
            &mut self.attention.qkv,
            &mut self.attention.output,
            &mut self.feed_forward.gate_up,
            &mut self.feed_forward.down,
        ]
    }

    pub(super) fn projections(&self) -> [&Projections; 4] {
        [
            &self.attention.qkv,
            &self.attention.output,
            &self.feed_forward.gate_up,
            &self.feed_forward.down,
        ]
    }
}

/// The feed-forward half of a layer.
pub(super) struct FeedForward {
    pub(super) norm: Norm,
    /// Gate, up.
    pub(super) gate_up: Projections,
    pub(super) activation: Activation,
    pub(super) sub_norm: Option<Norm>,
    pub(super) down: Projections,
}

impl FeedForward {
    /// hidden += attended, then leaves down(activation(gate(x)) * up(x)) with x = norm(hidden) in the products, to be added to the hidden
    /// states.
    fn forward(&self, pass: &mut Pass<'_>, attention: &Attention, hidden: &mut [f32]) {
        let tokens = pass.placement.tokens();
        let (kernels, width) = (pass.crew.kernels, self.gate_up.columns());
        let attended = attention.output.product(0, pass.products, tokens);
        pass.inputs
            .fill_blocks(pass.crew, &self.gate_up, (hidden, width), tokens, |block| {
                attended.add_to(block.tokens, block.states);
                self.norm.apply_all(kernels, block.states, block.rows);
            });
        pass.profile.end(Stage::Rows);
        let gated =
            self.gate_up
                .multiply_gated(pass.crew, pass.inputs, self.activation, pass.products);
        pass.profile.end(Stage::Products);
        pass.inputs.fill_blocks(
            pass.crew,
            &self.down,
            (&mut [], 0),
            tokens,
            |block| match &self.sub_norm {
                Some(norm) => {
                    let gates = &mut block.spare[..block.rows.len()];
                    gated.copy_to(block.tokens, gates);
                    norm.apply_all(kernels, gates, block.rows);
                }
                None => gated.copy_to(block.tokens, block.rows),
            },
        );
        pass.profile.end(Stage::Rows);
        self.down.multiply(pass.crew, pass.inputs, pass.products);
        pass.profile.end(Stage::Products);
    }
}
