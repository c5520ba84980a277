//! Kernels over single rows: norm, rotation, gates, quantization, and the exponential they and attention share.
//!
//! These bodies are the definition and the implementation at once: each instruction set's file compiles them for itself (but for the joining
//! of lanes), and since Rust neither reorders nor fuses float operations, every compilation gives the same bits. What makes them vectorize
//! is only their shape: whole chunks of sixteen, sums over sixteen lanes. A tail goes through the same operations as a whole chunk.

use crate::PANEL_ROWS;

/// Lanes of every float sum: element i belongs to lane i mod 16.
pub(crate) const LANES: usize = 16;

/// Added to a number below 2²² in magnitude, leaves it rounded to the nearest whole one, ties to even, in the low bits of the sum.
const ROUND: f32 = 12_582_912.0; // 1.5 · 2²³

/// Adds sixteen lanes up in the one order used everywhere: halves onto each other.
///
/// Compiled for itself, and once for all: else the compiler takes the lanes apart, here or in the loops that fill them.
#[inline(never)]
pub(crate) fn sum_lanes(lanes: &[f32; LANES]) -> f32 {
    join_lanes(lanes, |a, b| a + b)
}

/// The largest of sixteen lanes, none of which is no number. Compiled as [`sum_lanes`].
#[inline(never)]
pub(crate) fn largest_lane(lanes: &[f32; LANES]) -> f32 {
    join_lanes(lanes, larger)
}

/// Joins halves onto each other until one is left.
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

/// One instruction, unlike `f32::max`: what is no number is not larger.
#[inline(always)]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// `e^x` within 2e-7 of its value for −87 ≤ x ≤ 88; 0 below, e^88 above.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LN_2_HIGH: f32 = 355.0 / 512.0; // Few bits, so that n · LN_2_HIGH is exact.
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let bounded = if x > 88.0 { 88.0 } else { x };
    let shifted = bounded.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, bounded));
    // e^r = 1 + r + r² p(r) on |r| ≤ ln 2 / 2; the coefficients are those of Cephes' expf.
    let p = 1.987_569_1e-4_f32
        .mul_add(r, 1.398_199_9e-3)
        .mul_add(r, 8.333_452e-3);
    let p = p
        .mul_add(r, 4.166_579_6e-2)
        .mul_add(r, 1.666_666_5e-1)
        .mul_add(r, 0.5);
    let e_r = p.mul_add(r * r, r) + 1.0;
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

/// `out = weight · (x / sqrt(mean(x²) + eps))`.
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
    let inverse = 1.0 / (sum_lanes(&lanes) / x.len() as f32 + eps).sqrt();
    for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
        *out = weight * (x * inverse);
    }
}

/// Rotates the pair (i, i + d/2) of each head by the angle whose cosine and sine are given at i.
#[inline(always)]
pub(crate) fn rope(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    for head in x.chunks_exact_mut(head_dim) {
        let (first, second) = head.split_at_mut(head_dim / 2);
        for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

/// `out = max(gate, 0)² · up`.
#[inline(always)]
pub(crate) fn relu2_gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        let positive = if gate < 0.0 { 0.0 } else { gate };
        *out = positive * positive * up;
    }
}

/// `out = gate / (1 + e^−gate) · up`.
#[inline(always)]
pub(crate) fn silu_gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + exp(-gate)) * up;
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

/// `out = acc · (scale · factor)`: the rows of one panel, each with its own scale, of one token after the other, each with its own
/// factor; and the largest output of each token. Rows without a scale come out as zero.
#[inline(always)]
pub(crate) fn scale_panel(
    acc: &[i32],
    scales: PanelScales<'_>,
    out: &mut [f32],
    largests: &mut [f32],
) {
    let PanelScales {
        row_scales,
        token_factors,
    } = scales;
    let outs = out.as_chunks_mut::<PANEL_ROWS>().0.iter_mut();
    let pieces = outs.zip(acc.as_chunks::<PANEL_ROWS>().0);
    for (((out, acc), &factor), token) in pieces.zip(token_factors).zip(largests) {
        for ((out, &acc), &scale) in out.iter_mut().zip(acc).zip(row_scales) {
            *out = acc as f32 * (scale * factor);
        }
        out[row_scales.len()..].fill(0.0);
        *token = largest(&out[..row_scales.len()]);
    }
}

/// The largest of the values; those that are no numbers are passed over. −∞ if there are none.
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

/// Quantizes one token: `s = 127 / max(max|x|, 1e-5)`, `q = x · s` rounded to nearest even and clamped to −128..=127.
/// Returns `s` and the sum of `q`.
#[inline(always)]
pub(crate) fn quantize(x: &[f32], values: &mut [i8]) -> (f32, i32) {
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

#[inline(always)]
fn largest_magnitude(x: &[f32]) -> f32 {
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

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn exp_is_close_everywhere() {
        let mut worst: f64 = 0.0;
        for step in -87_000..=88_000 {
            let x = step as f32 / 1000.0;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - exact).abs() / exact);
        }
        assert!(worst < 2e-7, "relative error {worst}");
    }

    #[test]
    fn exp_is_exact_where_softmax_relies_on_it() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-87.5), 0.0);
        assert_eq!(exp(f32::INFINITY), exp(88.0));
        assert!(exp(f32::NAN).is_nan());
    }
}
