//! Kernels over a row of logits, for sampling: the largest logit, the weights
//! e^((logit − largest) / temperature), and their sums.
//!
//! As in `elementwise.rs`, these bodies are the definition and the implementation at once. A row is
//! long, so results are given for each block of [`LOGITS_BLOCK`], and the caller can skip blocks.
//!
//! Invariant: no multiplication is fused with an addition. On a CPU without fused instructions, the
//! scalar kernels would call a function for each.

use crate::elementwise::{LANES, exp_with, join_lanes, larger, largest_lane, sum_lanes};

/// Logits of a block.
pub const LOGITS_BLOCK: usize = 256;

/// Logits that [`scan_logits`] compares at once. The result does not depend on the order, so the
/// number is chosen for speed.
const SCAN_LANES: usize = 2 * LANES;

/// How the weights of a row follow from its logits.
#[derive(Clone, Copy, Debug)]
pub struct LogitScale {
    /// The row's largest logit, whose weight is 1.
    pub largest: f32,
    /// One divided by the temperature.
    pub inverse_temperature: f32,
}

impl LogitScale {
    /// Returns the weight of one logit, with the same bits as the kernels.
    #[inline(always)]
    pub fn weight(self, logit: f32) -> f32 {
        exp((logit - self.largest) * self.inverse_temperature)
    }
}

/// Writes the largest logit of each block, ignoring NaN. Returns whether all logits are finite.
#[inline(always)]
pub(crate) fn scan_logits(logits: &[f32], peaks: &mut [f32]) -> bool {
    let mut zeros = [0.0; SCAN_LANES]; // An infinity or NaN, times zero, makes a lane NaN.
    for (block, peak) in logits.chunks(LOGITS_BLOCK).zip(peaks) {
        let mut largest = [f32::NEG_INFINITY; SCAN_LANES];
        let (chunks, rest) = block.as_chunks::<SCAN_LANES>();
        for chunk in chunks {
            (largest, zeros) = scan_chunk(chunk, &largest, &zeros);
        }
        if let Some(&first) = rest.first() {
            let mut chunk = [first; SCAN_LANES]; // Comparing a logit twice changes nothing.
            chunk[..rest.len()].copy_from_slice(rest);
            (largest, zeros) = scan_chunk(&chunk, &largest, &zeros);
        }
        *peak = join_lanes(&largest, larger);
    }
    zeros.iter().all(|&lane| lane == 0.0)
}

#[inline(always)]
fn scan_chunk(
    chunk: &[f32; SCAN_LANES],
    largest: &[f32; SCAN_LANES],
    zeros: &[f32; SCAN_LANES],
) -> ([f32; SCAN_LANES], [f32; SCAN_LANES]) {
    (
        std::array::from_fn(|lane| larger(chunk[lane], largest[lane])),
        std::array::from_fn(|lane| zeros[lane] + chunk[lane] * 0.0),
    )
}

/// Writes the weights of all logits, and the sum and the largest weight of each block.
#[inline(always)]
pub(crate) fn weigh_logits(
    logits: &[f32],
    scale: LogitScale,
    weights: &mut [f32],
    masses: &mut [f32],
    heaviest: &mut [f32],
) {
    let blocks = logits.chunks(LOGITS_BLOCK);
    let blocks = blocks.zip(weights.chunks_mut(LOGITS_BLOCK));
    for (((logits, weights), mass), heaviest) in blocks.zip(masses).zip(heaviest) {
        let (mut sums, mut largest) = ([0.0; LANES], [0.0; LANES]);
        let (chunks, rest) = logits.as_chunks::<LANES>();
        let (outs, out_rest) = weights.as_chunks_mut::<LANES>();
        for (chunk, out) in chunks.iter().zip(outs) {
            *out = weigh_chunk(chunk, scale);
            sums = std::array::from_fn(|lane| sums[lane] + out[lane]);
            largest = std::array::from_fn(|lane| larger(out[lane], largest[lane]));
        }
        if !rest.is_empty() {
            let weights = weigh_rest(rest, scale);
            out_rest.copy_from_slice(&weights[..rest.len()]);
            sums = std::array::from_fn(|lane| sums[lane] + weights[lane]);
            largest = std::array::from_fn(|lane| larger(weights[lane], largest[lane]));
        }
        *mass = sum_lanes(&sums);
        *heaviest = largest_lane(&largest);
    }
}

/// Writes only the sums of [`weigh_logits`].
#[inline(always)]
pub(crate) fn sum_weights(logits: &[f32], scale: LogitScale, masses: &mut [f32]) {
    for (logits, mass) in logits.chunks(LOGITS_BLOCK).zip(masses) {
        let mut sums = [0.0; LANES];
        let (chunks, rest) = logits.as_chunks::<LANES>();
        for chunk in chunks {
            let weights = weigh_chunk(chunk, scale);
            sums = std::array::from_fn(|lane| sums[lane] + weights[lane]);
        }
        if !rest.is_empty() {
            let weights = weigh_rest(rest, scale);
            sums = std::array::from_fn(|lane| sums[lane] + weights[lane]);
        }
        *mass = sum_lanes(&sums);
    }
}

#[inline(always)]
fn weigh_chunk(chunk: &[f32; LANES], scale: LogitScale) -> [f32; LANES] {
    let mut weights = [0.0; LANES];
    for (weight, &logit) in weights.iter_mut().zip(chunk) {
        *weight = scale.weight(logit);
    }
    weights
}

/// Returns the weights of the partial chunk at the end of a row. Surplus lanes have weight zero.
#[inline(always)]
fn weigh_rest(rest: &[f32], scale: LogitScale) -> [f32; LANES] {
    let mut chunk = [0.0; LANES];
    chunk[..rest.len()].copy_from_slice(rest);
    let mut weights = weigh_chunk(&chunk, scale);
    weights[rest.len()..].fill(0.0);
    weights
}

/// Returns the sum and the number of the weights that are at least `threshold`. Blocks whose
/// heaviest weight is below it are skipped.
#[inline(always)]
pub(crate) fn weights_from(threshold: f32, weights: &[f32], heaviest: &[f32]) -> (f64, usize) {
    let (mut mass, mut count) = (0.0, 0);
    for (block, &heaviest) in weights.chunks(LOGITS_BLOCK).zip(heaviest) {
        if heaviest < threshold {
            continue;
        }
        let (mut sums, mut counts) = ([0.0; LANES], [0; LANES]);
        let (chunks, rest) = block.as_chunks::<LANES>();
        for chunk in chunks {
            add_from(threshold, chunk, &mut sums, &mut counts);
        }
        if !rest.is_empty() {
            let mut chunk = [f32::NAN; LANES]; // NaN is below any threshold.
            chunk[..rest.len()].copy_from_slice(rest);
            add_from(threshold, &chunk, &mut sums, &mut counts);
        }
        mass += f64::from(sum_lanes(&sums));
        count += sum_counts(&counts);
    }
    (mass, count)
}

#[inline(always)]
fn add_from(
    threshold: f32,
    chunk: &[f32; LANES],
    sums: &mut [f32; LANES],
    counts: &mut [u32; LANES],
) {
    for ((sum, count), &weight) in sums.iter_mut().zip(counts).zip(chunk) {
        let reaches = weight >= threshold;
        *sum += if reaches { weight } else { 0.0 };
        *count += u32::from(reaches);
    }
}

/// Sets weights below `threshold` to zero and writes the sum of each block's other weights. A block
/// whose heaviest weight is below `threshold` is not written; its sum is zero.
#[inline(always)]
pub(crate) fn drop_weights(
    threshold: f32,
    weights: &mut [f32],
    heaviest: &[f32],
    masses: &mut [f32],
) {
    let blocks = weights.chunks_mut(LOGITS_BLOCK).zip(heaviest);
    for ((block, &heaviest), mass) in blocks.zip(masses) {
        if heaviest < threshold {
            *mass = 0.0;
            continue;
        }
        let mut sums = [0.0; LANES];
        let (chunks, rest) = block.as_chunks_mut::<LANES>();
        for chunk in chunks {
            drop_and_add(threshold, chunk, &mut sums);
        }
        if !rest.is_empty() {
            let mut chunk = [0.0; LANES];
            chunk[..rest.len()].copy_from_slice(rest);
            drop_and_add(threshold, &mut chunk, &mut sums);
            rest.copy_from_slice(&chunk[..rest.len()]);
        }
        *mass = sum_lanes(&sums);
    }
}

#[inline(always)]
fn drop_and_add(threshold: f32, chunk: &mut [f32; LANES], sums: &mut [f32; LANES]) {
    for (sum, weight) in sums.iter_mut().zip(chunk) {
        *weight = if *weight >= threshold { *weight } else { 0.0 };
        *sum += *weight;
    }
}

/// Adds up counts. Never inlined, as [`sum_lanes`].
#[inline(never)]
fn sum_counts(lanes: &[u32; LANES]) -> usize {
    lanes.iter().sum::<u32>() as usize
}

/// Computes `e^x` for x ≤ 0 with a relative error below 3e-7. Returns 0 below −87.
#[inline(always)]
fn exp(x: f32) -> f32 {
    exp_with::<false>(x)
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn the_relative_error_of_exp_is_below_3e_7() {
        for i in 0..=87_000 {
            let x = -i as f32 / 1000.0;
            let relative = f64::from(exp(x)) / f64::from(x).exp() - 1.0;
            assert!(relative.abs() < 3e-7, "e^{x} is off by {relative}");
        }
        assert_eq!(exp(0.0), 1.0, "the weight of the most likely token");
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
    }
}
