//! A recurrent layer's half in place of attention: a causal convolution, the gated delta rule, and
//! a gated norm (Gated DeltaNet, arXiv:2412.06464, as in Qwen 3.5).
//!
//! For each token, with the projections qkv, z, b and a of its row:
//!
//! ```text
//! q, k, v = silu(convolution of the last tokens' qkv);  q and k of length 1;  q / √key_dim
//! decay = exp(−e^A_log · softplus(a + dt_bias));  strength = sigmoid(b)
//! o = delta rule of the value head's state (kernels/src/delta.rs)
//! out = projection of norm(o) · silu(z)
//! ```
//!
//! Invariant: each token of a sequence is computed after the token before it, by the same
//! operations in the same order, whatever the row, the step and the worker. So neither chunks nor
//! neighbours nor threads change a result.

use super::activations::{InputRows, Pending, Products};
use super::linear::Projections;
use super::pool::{ranges, split_rows};
use super::profile::Stage;
use super::recurrent_head::{HeadRow, RecurrentWeights};
use super::workers::{ForwardContext, Workers};

/// The recurrent half of a layer.
pub(super) struct Recurrence {
    /// The index among the recurrent layers, which finds its states in the store.
    pub(super) layer: usize,
    /// The channels of the convolution, the gate, the strengths, the steps.
    pub(super) input: Projections,
    pub(super) weights: RecurrentWeights,
    pub(super) output: Projections,
    /// Whether the output projection takes the value heads in tiles: one of each key head, and
    /// again one of each. Otherwise the value heads of a key head are side by side.
    pub(super) has_tiled_output: bool,
}

impl Recurrence {
    /// Returns the half's output for `rows`, the normed residual. Reads and writes the states that
    /// the batch's rows name.
    pub(super) fn forward<'m>(
        &'m self,
        context: &mut ForwardContext<'_>,
        rows: InputRows<'m>,
    ) -> Pending<'m> {
        let projected = rows.multiply(context);
        let mixed = projected.attend(self.weights.heads.values(), |products, mixed| {
            self.mix(context, products, mixed);
        });
        context.profile.end(Stage::Attention);
        let tokens = context.placement.tokens();
        let rows = mixed.into_rows(context, &self.output, None, |mixed, _, token, row| {
            self.gather(mixed, tokens, token, row);
        });
        rows.multiply(context).into_pending(None)
    }

    /// Writes to `mixed`, `[key head][token][value head of the group][value]`.
    fn mix(&self, context: &mut ForwardContext<'_>, products: Products<'_>, mixed: &mut [f32]) {
        let Workers {
            kernels,
            pool,
            scratch,
        } = &mut *context.workers;
        let (kernels, batch) = (*kernels, context.batch);
        let inputs = [0, 1, 2, 3].map(|linear| products.product(linear));
        let store = context.kv.states_mut();
        let shape = store.shape();
        let shares = ranges(shape.key_heads, pool.workers());
        let width = batch.token_count() * shape.values();
        let outs = split_rows(mixed, width, shares.clone());
        let parts = shares.clone().zip(store.heads_mut(self.layer, shares));
        let parts = parts.zip(outs).zip(scratch);
        pool.run_parts(parts, |_, (((heads, mut states), out), scratch)| {
            let scratch = &mut scratch.recurrent;
            for (index, out) in out.chunks_exact_mut(width).enumerate() {
                let head = heads.start + index;
                let mut first = 0;
                for row in batch.rows() {
                    let tokens = first..first + row.len();
                    first = tokens.end;
                    let out =
                        &mut out[tokens.start * shape.values()..][..row.len() * shape.values()];
                    let mut head = HeadRow {
                        weights: &self.weights,
                        kernels,
                        shape,
                        head,
                        products: inputs,
                        scratch: &mut *scratch,
                    };
                    head.compute(&mut states, index, row, tokens, out);
                }
            }
        });
    }

    /// Copies one token's value heads, in the order of the output projection's columns, from
    /// `mixed`, which has `tokens` tokens.
    fn gather(&self, mixed: &[f32], tokens: usize, token: usize, out: &mut [f32]) {
        let heads = &self.weights.heads;
        let dim = heads.value_dim;
        let group = heads.group();
        for key_head in 0..heads.key_heads {
            let values = &mixed[(key_head * tokens + token) * group * dim..][..group * dim];
            for (member, values) in values.chunks_exact(dim).enumerate() {
                let place = if self.has_tiled_output {
                    member * heads.key_heads + key_head
                } else {
                    heads.value_head(key_head, member)
                };
                out[place * dim..][..dim].copy_from_slice(values);
            }
        }
    }
}
