//! Kernels over single rows: norm, rotation, gates, quantization, and the exponential.
//!
//! These bodies are the definition and the implementation at once. `row_kernels.rs` compiles them
//! for each instruction set, except the joining of lanes. The compiler vectorizes them because of
//! their shape: whole chunks of sixteen, sums over sixteen lanes. A partial chunk at the end goes
//! through the same operations as a whole one.
//!
//! Invariant: every compilation gives the same bits, because Rust neither reorders nor fuses float
//! operations.

use crate::activation::QuantizedTokenMut;
use crate::block::PANEL_ROWS;

/// Lanes of every float sum. Element i belongs to lane i mod 16.
pub(crate) const LANES: usize = 16;

/// The sum of this and a number below 2²² in magnitude holds in its low bits that number, rounded
/// to the nearest integer, ties to even.
pub(crate) const ROUND: f32 = 12_582_912.0; // 1.5 · 2²³

/// Adds up sixteen lanes in the one order used everywhere: the upper half onto the lower, until one
/// lane remains.
///
/// It is never inlined: otherwise the compiler splits the vectors into single lanes, here or in the
/// loops that fill them.
#[inline(never)]
pub(crate) fn sum_lanes(lanes: &[f32; LANES]) -> f32 {
    join_lanes(lanes, |a, b| a + b)
}

/// Returns the largest of sixteen lanes, none of which is NaN. Never inlined, as [`sum_lanes`].
#[inline(never)]
pub(crate) fn largest_lane(lanes: &[f32; LANES]) -> f32 {
    join_lanes(lanes, larger)
}

/// Joins the upper half of the lanes onto the lower, until one lane remains.
#[inline(always)]
pub(crate) fn join_lanes<const N: usize>(lanes: &[f32; N], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = *lanes;
    let mut half = N / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = join(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// Returns `a` if it is larger than `b`, otherwise `b`. NaN is not larger than anything. This is
/// one instruction, unlike `f32::max`.
#[inline(always)]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// Computes `e^x` with a relative error below 2e-7 for −87 ≤ x ≤ 88. Returns 0 below and e^88 above
/// that range.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    exp_with::<true>(x)
}

/// Computes `e^x`, with multiplications and additions fused or not. Returns 0 below −87. Unless
/// fused, x must not be positive.
#[inline(always)]
pub(crate) fn exp_with<const FUSED: bool>(x: f32) -> f32 {
    const LN_2_HIGH: f32 = 355.0 / 512.0; // Few bits, so that n · LN_2_HIGH is exact.
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let bounded = if FUSED && x > 88.0 { 88.0 } else { x };
    let shifted = multiply_add::<FUSED>(bounded, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = multiply_add::<FUSED>(n, -LN_2_HIGH, bounded);
    let r = multiply_add::<FUSED>(n, -LN_2_LOW, r);
    // e^r = 1 + r + r² p(r) on |r| ≤ ln 2 / 2, with the coefficients of Cephes' expf.
    let p = multiply_add::<FUSED>(1.987_569_1e-4, r, 1.398_199_9e-3);
    let p = multiply_add::<FUSED>(p, r, 8.333_452e-3);
    let p = multiply_add::<FUSED>(p, r, 4.166_579_6e-2);
    let p = multiply_add::<FUSED>(p, r, 1.666_666_5e-1);
    let p = multiply_add::<FUSED>(p, r, 0.5);
    let e_r = multiply_add::<FUSED>(p, r * r, r) + 1.0;
    let power = shifted
        .to_bits()
        .wrapping_sub(ROUND.to_bits())
        .wrapping_add(127)
        << 23;
    if x < -87.0 {
        0.0
    } else {
        e_r * f32::from_bits(power)
    }
}

/// Returns a · b + c, rounded once if fused.
#[inline(always)]
fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// Computes `out = weight · (x / sqrt(mean(x²) + eps))`. If a value of x or the sum of the squares
/// is not finite, every output is infinite, which `quantize` does not lose.
#[inline(always)]
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += x * x;
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += x * x;
    }
    let sum = sum_lanes(&lanes);
    if !sum.is_finite() {
        return out.fill(f32::INFINITY);
    }
    let inverse = 1.0 / (sum / x.len() as f32 + eps).sqrt();
    for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
        *out = weight * (x * inverse);
    }
}

/// Rotates the pair (i, i + head_dim / 2) of each head by the angle whose cosine and sine are at i.
#[inline(always)]
pub(crate) fn rope(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    for head in x.chunks_exact_mut(head_dim) {
        let (first, second) = head.split_at_mut(head_dim / 2);
        for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

/// Computes `out = max(gate, 0)² · up`.
#[inline(always)]
pub(crate) fn relu2_gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        let positive = if gate < 0.0 { 0.0 } else { gate };
        *out = positive * positive * up;
    }
}

/// Computes `out = gate / (1 + e^−gate) · up`.
#[inline(always)]
pub(crate) fn silu_gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + exp(-gate)) * up;
    }
}

/// Computes `out = x / (1 + e^−gate)`.
#[inline(always)]
pub(crate) fn sigmoid_gate(gate: &[f32], x: &[f32], out: &mut [f32]) {
    for ((out, &gate), &x) in out.iter_mut().zip(gate).zip(x) {
        *out = x / (1.0 + exp(-gate));
    }
}

/// The factors that turn the integer sums of one panel into floats.
#[derive(Clone, Copy)]
pub struct PanelScales<'a> {
    /// The scale of each row of the panel that exists.
    pub row_scales: &'a [f32],
    /// The factor of each token.
    pub token_factors: &'a [f32],
}

/// Computes `out = sum · (row scale · token factor)` for one panel, `[token][32]`, and the largest
/// output of each token. Rows without a scale become zero.
#[inline(always)]
pub(crate) fn scale_panel(
    sums: &[i32],
    scales: PanelScales<'_>,
    out: &mut [f32],
    maxima: &mut [f32],
) {
    let PanelScales {
        row_scales,
        token_factors,
    } = scales;
    let outs = out.as_chunks_mut::<PANEL_ROWS>().0.iter_mut();
    let tokens = outs.zip(sums.as_chunks::<PANEL_ROWS>().0);
    for (((out, sums), &factor), max) in tokens.zip(token_factors).zip(maxima) {
        for ((out, &sum), &scale) in out.iter_mut().zip(sums).zip(row_scales) {
            *out = sum as f32 * (scale * factor);
        }
        out[row_scales.len()..].fill(0.0);
        *max = largest(&out[..row_scales.len()]);
    }
}

/// Returns the largest value, ignoring NaN, or −∞ if all are NaN.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(x, *lane);
        }
    }
    let all = lanes.iter().chain(rest);
    all.fold(f32::NEG_INFINITY, |a, &b| larger(b, a))
}

/// Quantizes one token, or each of its groups: `s = 127 / max(max|x|, 1e-5)`, `q = x · s`, rounded
/// to nearest even and clamped to −128..=127. Also writes `s` and the sum of `q`.
#[inline(always)]
pub(crate) fn quantize(x: &[f32], out: &mut QuantizedTokenMut<'_>) {
    let QuantizedTokenMut {
        values,
        scales,
        sums,
    } = out;
    // A loop over one group would take a tenth more instructions.
    if let ([scale], [sum]) = (&mut **scales, &mut **sums) {
        (*scale, *sum) = quantize_group(x, values);
        return;
    }
    let group = x.len() / scales.len();
    let groups = x.chunks_exact(group).zip(values.chunks_exact_mut(group));
    for (((x, values), scale), sum) in groups.zip(scales.iter_mut()).zip(sums.iter_mut()) {
        (*scale, *sum) = quantize_group(x, values);
    }
}

/// Quantizes values that share a scale. Returns the scale and the sum of the results.
#[inline(always)]
fn quantize_group(x: &[f32], values: &mut [i8]) -> (f32, i32) {
    let scale = 127.0 / largest_magnitude(x).max(1e-5);
    let mut sum = 0;
    for (value, &x) in values.iter_mut().zip(x) {
        let rounded = (x * scale + ROUND)
            .to_bits()
            .wrapping_sub(ROUND.to_bits())
            .cast_signed();
        *value = rounded.clamp(-128, 127) as i8;
        sum += i32::from(*value);
    }
    (scale, sum)
}

/// Returns the largest magnitude, ignoring NaN.
#[inline(always)]
pub(crate) fn largest_magnitude(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [0.0_f32; LANES];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(x.abs(), *lane);
        }
    }
    rest.iter()
        .fold(largest_lane(&lanes), |a, b| larger(b.abs(), a))
}

/// Returns whether all numbers are finite.
#[inline(always)]
pub(crate) fn all_finite(x: &[f32]) -> bool {
    let mut zeros = [0.0; LANES]; // An infinity or NaN, times zero, makes a lane NaN.
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (zero, &x) in zeros.iter_mut().zip(chunk) {
            *zero += x * 0.0;
        }
    }
    zeros.iter().all(|&zero| zero == 0.0) && rest.iter().all(|x| x.is_finite())
}

#[cfg(test)]
mod tests {
    use super::{exp, largest_magnitude};

    #[test]
    fn the_relative_error_of_exp_is_below_2e_7() {
        let mut worst: f64 = 0.0;
        for step in -87_000..=88_000 {
            let x = step as f32 / 1000.0;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - exact).abs() / exact);
        }
        assert!(worst < 2e-7, "relative error {worst}");
    }

    #[test]
    fn exp_is_exact_at_the_values_that_softmax_relies_on() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-87.5), 0.0);
        assert_eq!(exp(f32::INFINITY), exp(88.0));
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn the_largest_magnitude_is_found_at_every_index() {
        for len in [1, 7, 8, 9, 64, 67] {
            for at in 0..len {
                let mut weights = vec![0.5; len];
                weights[at] = -3.0;
                assert_eq!(largest_magnitude(&weights), 3.0, "{len}, {at}");
            }
        }
        assert_eq!(largest_magnitude(&[f32::NAN, -1.0]), 1.0);
    }
}
