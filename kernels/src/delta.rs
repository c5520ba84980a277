//! The gated delta rule of recurrent layers, and the convolution before it (Gated DeltaNet,
//! arXiv:2412.06464).
//!
//! The state of a head is a matrix S, `[key value][value]`. For each token with the key k, the
//! query q, the value v, the decay a and the strength b:
//!
//! ```text
//! d = b · (v − a · Sᵀk)
//! S = a · S + k dᵀ
//! o = Sᵀq = a · S_oldᵀq + (k · q) d
//! ```
//!
//! [`delta_step`] reads and writes the state once per token: it adds what the token before left,
//! and takes both sums of the new token on the way. The story: a decode waits for the memory of the
//! state, so one pass is twice as fast as two.
//!
//! Every column of S has sums of its own over the rows, in ascending order, so no sum crosses
//! lanes. As in `elementwise.rs`, the bodies are the definition and the implementation at once.

use crate::elementwise::exp;

/// The columns of a state that are neighbours in memory.
pub const DELTA_COLUMNS: usize = 32;

/// What a token leaves to add to the state: `S = decay · S + key deltaᵀ`.
#[derive(Clone, Copy)]
pub struct DeltaUpdate<'a> {
    /// The factor of the old state.
    pub decay: f32,
    /// By row of the state.
    pub key: &'a [f32],
    /// By column of the state.
    pub delta: &'a [f32],
}

/// Applies `update` to the state, `[block of 32 columns][row][32]`. Then sets `by_key` to Sᵀ·key
/// and `by_query` to Sᵀ·query.
#[inline(always)]
pub(crate) fn delta_step(
    state: &mut [f32],
    update: DeltaUpdate<'_>,
    [key, query]: [&[f32]; 2],
    [by_key, by_query]: [&mut [f32]; 2],
) {
    let blocks = state.chunks_exact_mut(key.len() * DELTA_COLUMNS);
    let deltas = update.delta.as_chunks::<DELTA_COLUMNS>().0;
    let sums = by_key.as_chunks_mut::<DELTA_COLUMNS>().0.iter_mut();
    let sums = sums.zip(by_query.as_chunks_mut::<DELTA_COLUMNS>().0);
    for ((block, delta), (by_key, by_query)) in blocks.zip(deltas).zip(sums) {
        let (mut of_key, mut of_query) = ([0.0; DELTA_COLUMNS], [0.0; DELTA_COLUMNS]);
        let rows = block.as_chunks_mut::<DELTA_COLUMNS>().0.iter_mut();
        let rows = rows.zip(update.key).zip(key).zip(query);
        for (((row, &last), &key), &query) in rows {
            for lane in 0..DELTA_COLUMNS {
                row[lane] = update.decay * row[lane] + last * delta[lane];
                of_key[lane] += row[lane] * key;
                of_query[lane] += row[lane] * query;
            }
        }
        (*by_key, *by_query) = (of_key, of_query);
    }
}

/// Completes a token: sets `delta` to d and `out` to o, from the sums that [`delta_step`] took.
/// `by_query` is Sᵀq, `key_query` is k · q.
#[inline(always)]
pub(crate) fn delta_finish(
    sums: [&[f32]; 2],
    value: &[f32],
    [decay, strength, key_query]: [f32; 3],
    delta: &mut [f32],
    out: &mut [f32],
) {
    let [by_key, by_query] = sums;
    let outs = delta.iter_mut().zip(out);
    let sums = by_key.iter().zip(by_query);
    for (((delta, out), (by_key, by_query)), value) in outs.zip(sums).zip(value) {
        *delta = strength * (value - decay * by_key);
        *out = decay * by_query + key_query * *delta;
    }
}

/// Computes the causal convolution of a token and its activation, channel by channel:
/// `out = silu(Σ weights[i] · inputs[i])`, where the last input is the token's own. The weights are
/// `[input][channel]`; the sum is in ascending order.
#[inline(always)]
pub(crate) fn convolve(inputs: &[&[f32]], weights: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for (input, weights) in inputs.iter().zip(weights.chunks_exact(out.len())) {
        for ((out, x), weight) in out.iter_mut().zip(*input).zip(weights) {
            *out += weight * x;
        }
    }
    for out in out.iter_mut() {
        *out /= 1.0 + exp(-*out);
    }
}
