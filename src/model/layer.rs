//! One layer: attention, then feed-forward, each added to what it was given.

use sterna_kernels::{Kernels, PANEL_ROWS};

use super::Pass;
use super::attention::Attention;
use super::config::Activation;
use super::linear::{Norm, Product, Projections, add_product};

/// One transformer layer.
pub(super) struct Layer {
    pub(super) attention: Attention,
    pub(super) feed_forward: FeedForward,
}

impl Layer {
    /// Turns the hidden states `[token][hidden]` that the layer is given into those that it hands on.
    pub(super) fn forward(&self, pass: &mut Pass<'_>, hidden: &mut [f32]) {
        self.attention.forward(pass, hidden);
        self.feed_forward.forward(pass, hidden);
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
    /// hidden += down(activation(gate(x)) * up(x)) with x = norm(hidden).
    fn forward(&self, pass: &mut Pass<'_>, hidden: &mut [f32]) {
        let tokens = pass.placement.tokens();
        let (kernels, width) = (pass.crew.kernels, self.gate_up.columns());
        pass.inputs
            .fill(pass.crew, &self.gate_up, tokens, |token, row, _| {
                self.norm
                    .apply(kernels, &hidden[token * width..][..width], row);
            });
        self.gate_up.multiply(pass.crew, pass.inputs, pass.products);
        let gate = self.gate_up.product(0, pass.products, tokens);
        let up = self.gate_up.product(1, pass.products, tokens);
        pass.inputs.fill(
            pass.crew,
            &self.down,
            tokens,
            |token, row, spare| match &self.sub_norm {
                Some(norm) => {
                    let spare = &mut spare[..row.len()];
                    self.gate(kernels, (gate, up), token, spare);
                    norm.apply(kernels, spare, row);
                }
                None => self.gate(kernels, (gate, up), token, row),
            },
        );
        self.down.multiply(pass.crew, pass.inputs, pass.products);
        add_product(
            pass.crew,
            self.down.product(0, pass.products, tokens),
            hidden,
        );
    }

    /// One token's activation(gate) * up.
    fn gate(
        &self,
        kernels: Kernels,
        (gate, up): (Product<'_>, Product<'_>),
        token: usize,
        out: &mut [f32],
    ) {
        let pieces = gate.pieces(token).zip(up.pieces(token));
        for (out, (gate, up)) in out.chunks_mut(PANEL_ROWS).zip(pieces) {
            match self.activation {
                Activation::Relu2 => kernels.relu2_gate(gate, up, out),
                Activation::Silu => kernels.silu_gate(gate, up, out),
            }
        }
    }
}
