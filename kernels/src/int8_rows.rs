//! Queries and weights of attention as integers, for keys and values of 8 bits.
//!
//! The keys and values are stored as 8-bit integers with a scale for each token. Both products of
//! attention are sums of integers, so they are exact in any order:
//!
//! 1. A query is quantized to 8 bits with one scale for the head. The product of its integers with
//!    a key's, times both scales and 1 / √head_dim, is the score.
//! 2. The softmax is in single precision. Each weight is multiplied by the scale of its token's
//!    value. The results are quantized to 14 bits with one scale for the query and span.
//! 3. The weighted sum of the values is a sum of integers, times the scale of the weights.
//!
//! Two alternatives were rejected. Widening keys and values to single precision needs as many
//! multiplications as half precision does. These are then the limit, not memory, so half the bytes
//! gain little. Integers need a quarter of these instructions for keys and half for values. Weights
//! of 8 bits would make one more product of the four unnecessary, but a weight below 1/510 of the
//! largest would be lost. 14 bits are two halves of 7 bits, whose products with 8 bits AVX2 adds up
//! in pairs without an overflow.
//!
//! Invariant: no sum overflows. A product with a key is at most 127² · 256, a weighted sum of
//! values at most 16,383 · 127 · 256.

use crate::elementwise::{LANES, ROUND, all_finite, largest_magnitude};
use crate::kv_geometry::{INT8_STEP, MAX_HEAD_DIM, SPAN_TOKENS};

/// The largest magnitude of a quantized query.
const QUERY_MAX: f32 = 127.0;

/// The largest quantized weight.
const WEIGHT_MAX: f32 = 16383.0;

/// Bits of the lower half of a weight.
pub(crate) const LOW_BITS: u32 = 7;

/// Magnitudes of queries and weights count as at least this. So no scale is zero.
const SMALLEST: f32 = 1e-30;

/// A query, and its weights in the current span, as integers.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Int8Row {
    /// Four neighbouring dimensions each.
    pub(crate) query: [[i8; INT8_STEP]; MAX_HEAD_DIM / INT8_STEP],
    /// The upper 7 bits of the weights of four neighbouring tokens each.
    pub(crate) high: [[u8; INT8_STEP]; SPAN_TOKENS / INT8_STEP],
    /// The lower 7 bits.
    pub(crate) low: [[u8; INT8_STEP]; SPAN_TOKENS / INT8_STEP],
    pub(crate) query_sum: i32,
    pub(crate) query_scale: f32,
    pub(crate) weight_scale: f32,
}

impl Int8Row {
    pub(crate) const ZERO: Int8Row = Int8Row {
        query: [[0; INT8_STEP]; MAX_HEAD_DIM / INT8_STEP],
        high: [[0; INT8_STEP]; SPAN_TOKENS / INT8_STEP],
        low: [[0; INT8_STEP]; SPAN_TOKENS / INT8_STEP],
        query_sum: 0,
        query_scale: 0.0,
        weight_scale: 0.0,
    };

    /// Quantizes a query. If a number is not finite, the scale is NaN, and so are all scores.
    #[inline(always)]
    pub(crate) fn set_query(&mut self, x: &[f32]) {
        let largest = largest_magnitude(x).max(SMALLEST);
        let is_finite = all_finite(x);
        let inverse = if is_finite { QUERY_MAX / largest } else { 0.0 };
        self.query_scale = if is_finite {
            largest / QUERY_MAX
        } else {
            f32::NAN
        };
        self.query_sum = 0;
        for (code, &x) in self.query.as_flattened_mut().iter_mut().zip(x) {
            // NaN times zero becomes an unspecified integer of 8 bits.
            *code = nearest_integer(x * inverse) as i8;
            self.query_sum += i32::from(*code);
        }
    }

    /// Quantizes weights, which are not negative, for whole pages. If a weight is not finite, the
    /// scale is NaN, and so are all sums.
    #[inline(always)]
    pub(crate) fn set_weights(&mut self, weights: &[f32]) {
        let largest = largest_magnitude(weights).max(SMALLEST);
        let is_finite = all_finite(weights);
        let inverse = if is_finite { WEIGHT_MAX / largest } else { 0.0 };
        self.weight_scale = if is_finite {
            largest / WEIGHT_MAX
        } else {
            f32::NAN
        };
        let high = self.high.as_flattened_mut().as_chunks_mut::<LANES>().0;
        let low = self.low.as_flattened_mut().as_chunks_mut::<LANES>().0;
        let weights = weights.as_chunks::<LANES>().0;
        for ((high, low), weights) in high.iter_mut().zip(low).zip(weights) {
            // One loop for each step, or the compiler does not vectorize them.
            let mut codes = [0; LANES];
            for (code, &weight) in codes.iter_mut().zip(weights) {
                *code = nearest_integer(weight * inverse);
            }
            for (high, code) in high.iter_mut().zip(&codes) {
                *high = (code >> LOW_BITS & 0x7f) as u8;
            }
            for (low, code) in low.iter_mut().zip(&codes) {
                *low = (code & 0x7f) as u8;
            }
        }
    }
}

/// Returns a number as the nearest integer, ties to even.
#[inline(always)]
fn nearest_integer(x: f32) -> i32 {
    (x + ROUND)
        .to_bits()
        .wrapping_sub(ROUND.to_bits())
        .cast_signed()
}
