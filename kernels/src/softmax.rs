//! Kernels over a row of logits, for sampling: the largest logit, the weights
//! e^((logit − largest) / temperature), and their sums.
//!
//! As in `elementwise.rs`, these bodies are the definition and the implementation at once. A row is
//! long, so results are given for each block of [`LOGITS_BLOCK`], and the caller can skip blocks.
//!
//! Invariant: no multiplication is fused with an addition. On a CPU without fused instructions, the
//! scalar kernels would call a function for each.

use crate::elementwise::{LANES, exp_with, join_lanes, larger, sum_lanes};

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
    /// Returns the scale of a row with this largest logit, at a temperature above 0.
    #[must_use]
    pub fn new(largest: f32, temperature: f32) -> LogitScale {
        LogitScale {
            largest,
            inverse_temperature: (1.0 / temperature).min(f32::MAX),
        }
    }

    /// Returns the weight of one logit, with the same bits as the kernels.
    #[inline(always)]
    pub fn weight(self, logit: f32) -> f32 {
        exp((logit - self.largest) * self.inverse_temperature)
    }
}

/// A place in the order of falling logits, of equal ones by rising tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rank {
    /// The logit of the token at this place.
    pub logit: f32,
    /// The token at this place.
    pub token: u32,
}

impl Rank {
    /// The place after all tokens.
    pub const END: Rank = Rank {
        logit: f32::NEG_INFINITY,
        token: u32::MAX,
    };

    /// Returns whether a token comes before this place.
    #[inline(always)]
    #[must_use]
    pub fn is_after(self, logit: f32, token: u32) -> bool {
        (logit > self.logit) | ((logit == self.logit) & (token < self.token))
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

/// Writes the sum of the weights of each block, of the tokens before `end`. Blocks whose peak is
/// below `end` are skipped.
#[inline(always)]
pub(crate) fn sum_weights(
    logits: &[f32],
    scale: LogitScale,
    end: Rank,
    peaks: &[f32],
    masses: &mut [f32],
) {
    let blocks = logits.chunks(LOGITS_BLOCK).zip(peaks).zip(masses);
    for (block, ((logits, &peak), mass)) in blocks.enumerate() {
        *mass = 0.0;
        if peak < end.logit {
            continue;
        }
        let mut sums = [0.0; LANES];
        let (chunks, rest) = logits.as_chunks::<LANES>();
        let mut first = (block * LOGITS_BLOCK) as u32;
        for chunk in chunks {
            add_weights(chunk, first, scale, end, &mut sums);
            first += LANES as u32;
        }
        if !rest.is_empty() {
            let mut chunk = [f32::NEG_INFINITY; LANES]; // Its weight is 0.
            chunk[..rest.len()].copy_from_slice(rest);
            add_weights(&chunk, first, scale, end, &mut sums);
        }
        *mass = sum_lanes(&sums);
    }
}

#[inline(always)]
fn add_weights(
    chunk: &[f32; LANES],
    first: u32,
    scale: LogitScale,
    end: Rank,
    sums: &mut [f32; LANES],
) {
    for (lane, (sum, &logit)) in sums.iter_mut().zip(chunk).enumerate() {
        let weight = scale.weight(logit);
        let counts = end.is_after(logit, first + lane as u32);
        *sum += if counts { weight } else { 0.0 };
    }
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
