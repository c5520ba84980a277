//! Kernels of a draw from a row of logits: the token with the largest score is drawn.
//!
//! The score of a token is (logit − largest) / temperature + g. Each g is a number of its own of
//! the Gumbel distribution, so each token is drawn with the probability that softmax gives it (the
//! Gumbel-max trick: Gumbel, Statistical Theory of Extreme Values, 1954; Maddison, Tarlow and
//! Minka, A* Sampling, 2014). The numbers are a hash of a key and the token, so each score follows
//! from the token's own logit and the largest: a token cannot be drawn if a bound of its logit has
//! too small a score, whatever the other logits are.
//!
//! As in `softmax.rs`, these bodies are the definition and the implementation at once, and nothing
//! is fused.

use crate::elementwise::{LANES, exp_with};
use crate::softmax::{LOGITS_BLOCK, LogitScale, Rank};

/// The random numbers of one draw, one for each token: the same key and token give the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrawNoise {
    keys: [u32; 3],
}

impl DrawNoise {
    /// Returns the numbers of a key of random bits.
    #[must_use]
    pub fn new(keys: [u32; 3]) -> DrawNoise {
        DrawNoise { keys }
    }

    /// Returns the number of a token, −2.9 to 39, with the same bits as the kernels.
    #[inline(always)]
    #[must_use]
    pub fn of(self, token: u32) -> f32 {
        // The low digits count only if the high ones are almost zero: then the token is drawn.
        let low = ((self.hash(token) ^ self.keys[2]) >> 8) as i32;
        let low = (low as f32 + 0.5) * (1.0 / (1 << 24) as f32);
        let uniform = (self.high_digits(token) as f32 + low) * (1.0 / HIGH as f32);
        let uniform = if uniform < BELOW_ONE {
            uniform
        } else {
            BELOW_ONE
        };
        -ln(exponential(uniform))
    }

    #[inline(always)]
    fn hash(self, token: u32) -> u32 {
        mix(token.wrapping_add(self.keys[0]))
    }

    /// Returns the number of 0..[`HIGH`] by which the noise falls.
    #[inline(always)]
    fn high_digits(self, token: u32) -> i32 {
        ((self.hash(token) ^ self.keys[1]) >> 1) as i32
    }
}

/// The number of values of the high digits of a random number.
const HIGH: u32 = 1 << 31;

/// How the tokens of a row are scored.
#[derive(Clone, Copy, Debug)]
pub struct DrawScores {
    /// The largest logit, and the temperature.
    pub scale: LogitScale,
    /// The random numbers.
    pub noise: DrawNoise,
}

impl DrawScores {
    /// Returns the score of a token, with the same bits as the kernels. It never falls if the logit
    /// rises.
    #[inline(always)]
    #[must_use]
    pub fn of(self, logit: f32, token: u32) -> f32 {
        (logit - self.scale.largest) * self.scale.inverse_temperature + self.noise.of(token)
    }

    /// Returns the scores of a part of a row: its token 0 is the token `first` of the row.
    #[must_use]
    pub fn starting_at(mut self, first: u32) -> DrawScores {
        let key = &mut self.noise.keys[0]; // The hash is one of its sum with the token.
        *key = key.wrapping_add(first);
        self
    }

    /// Returns the scores of at least `floor` and their tokens, of tokens from `first` on whose
    /// logits are at most `peak`.
    pub fn reaching(
        self,
        logits: &[f32],
        first: u32,
        peak: f32,
        floor: f32,
    ) -> impl Iterator<Item = (f32, u32)> {
        let most = self.most_digits(peak, floor);
        let tokens = (first..).zip(logits);
        let possible = tokens.filter(move |(token, _)| self.noise.high_digits(*token) <= most);
        let scored = possible.map(move |(token, logit)| (self.of(*logit, token), token));
        scored.filter(move |(score, _)| *score >= floor)
    }

    /// Returns the greatest value of the high digits with which a token of this logit or a lower
    /// one can have the score `floor`.
    #[inline(always)]
    fn most_digits(self, logit: f32, floor: f32) -> i32 {
        // The noise of the number x is −ln(−ln(1 − x)) ≤ −ln x, so x ≤ e^(scaled logit − score).
        const ROUNDING: f32 = 1e-3;
        let scaled = (logit - self.scale.largest) * self.scale.inverse_temperature;
        let power = scaled - floor + (ROUNDING + floor.abs() * 1e-6);
        if power < 0.0 {
            (exp_with::<false>(power) * HIGH as f32) as i32
        } else {
            i32::MAX
        }
    }
}

/// Returns the largest score above `floor` and its token, of the tokens before `end`; the first of
/// equal ones. Returns `floor` and `u32::MAX` if there is none. Blocks whose peak is below `end`
/// are skipped.
#[inline(always)]
pub(crate) fn best_score(
    logits: &[f32],
    scores: DrawScores,
    end: Rank,
    peaks: &[f32],
    floor: f32,
) -> (f32, u32) {
    let mut best = (floor, u32::MAX);
    for (block, (logits, &peak)) in logits.chunks(LOGITS_BLOCK).zip(peaks).enumerate() {
        if peak < end.logit {
            continue;
        }
        let mut most = scores.most_digits(peak, best.0);
        let mut first = (block * LOGITS_BLOCK) as u32;
        for part in logits.chunks(LANES) {
            // Usually no token of a chunk can have the largest score, and its digits show it.
            let mut least = [0; LANES];
            for (lane, least) in least.iter_mut().enumerate() {
                *least = scores.noise.high_digits(first + lane as u32);
            }
            if least_lane(&least) <= most {
                let mut chunk = [f32::NEG_INFINITY; LANES];
                chunk[..part.len()].copy_from_slice(part);
                let found = best_of_chunk(&chunk, first, scores, end, best);
                if found.0 > best.0 {
                    best = found;
                    most = scores.most_digits(peak, best.0);
                }
            }
            first += LANES as u32;
        }
    }
    best
}

#[inline(always)]
fn least_lane(lanes: &[i32; LANES]) -> i32 {
    let mut lanes = *lanes;
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = lanes[lane].min(lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn best_of_chunk(
    chunk: &[f32; LANES],
    first: u32,
    scores: DrawScores,
    end: Rank,
    mut best: (f32, u32),
) -> (f32, u32) {
    let mut found = [f32::NEG_INFINITY; LANES];
    for (lane, (score, &logit)) in found.iter_mut().zip(chunk).enumerate() {
        let token = first + lane as u32;
        let counts = end.is_after(logit, token);
        *score = if counts {
            scores.of(logit, token)
        } else {
            f32::NEG_INFINITY
        };
    }
    for (lane, score) in found.iter().enumerate() {
        if *score > best.0 {
            best = (*score, first + lane as u32);
        }
    }
    best
}

/// Mixes 32 bits, one to one: `triple32` of Hash Prospector (Wellons, 2018). After two rounds only,
/// the numbers of tokens at some distances depend on each other.
#[inline(always)]
fn mix(x: u32) -> u32 {
    let x = (x ^ (x >> 17)).wrapping_mul(0xed5a_d4bb);
    let x = (x ^ (x >> 11)).wrapping_mul(0xac4c_1b51);
    let x = (x ^ (x >> 15)).wrapping_mul(0x3184_8bab);
    x ^ (x >> 14)
}

/// The largest number below 1.
const BELOW_ONE: f32 = 1.0 - f32::EPSILON / 2.0;

/// Returns −ln(1 − x) of a number in 0..1, with a small relative error however small x is.
#[inline(always)]
fn exponential(x: f32) -> f32 {
    let rest = 1.0 - x;
    (x - (1.0 - rest)) - ln(rest)
}

/// Returns the natural logarithm y of a normal number, with an error below 2e-7 · max(1, |y|).
#[inline(always)]
fn ln(x: f32) -> f32 {
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    /// The bits of the root of a half, the least value of 1 + x below.
    const ROOT: u32 = std::f32::consts::FRAC_1_SQRT_2.to_bits();
    let bits = x.to_bits().wrapping_sub(ROOT);
    let n = ((bits as i32) >> 23) as f32;
    let x = f32::from_bits((bits & 0x007f_ffff).wrapping_add(ROOT)) - 1.0;
    // ln(1 + x) = x − x² / 2 + x³ p(x), with the coefficients of Cephes' logf.
    let p = 7.037_683_6e-2 * x - 1.151_461e-1;
    let p = p * x + 1.167_699_9e-1;
    let p = p * x - 1.242_014_1e-1;
    let p = p * x + 1.424_932_3e-1;
    let p = p * x - 1.666_805_8e-1;
    let p = p * x + 2.000_071_5e-1;
    let p = p * x - 2.499_999_4e-1;
    let p = p * x + 3.333_333e-1;
    let square = x * x;
    let rest = p * x * square + n * LN_2_LOW - 0.5 * square;
    rest + x + n * LN_2_HIGH
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(found: f32, exact: f64) -> f64 {
        (f64::from(found) - exact).abs() / exact.abs()
    }

    #[test]
    fn logarithms_have_small_relative_errors() {
        for i in 1..200_000 {
            let x = i as f32 / 10_000.0;
            let exact = f64::from(x).ln();
            assert!(
                (f64::from(ln(x)) - exact).abs() < 2e-7 * exact.abs().max(1.0),
                "ln {x}"
            );
            let x = i as f32 / 200_000.0;
            let exact = -(-f64::from(x)).ln_1p();
            assert!(error(exponential(x), exact) < 3e-7, "{x}");
            let small = 2_f32.powi(-(i % 56)) * (1.0 - x / 2.0);
            let exact = -(-f64::from(small)).ln_1p();
            assert!(
                small == 1.0 || error(exponential(small), exact) < 3e-7,
                "{small}"
            );
        }
    }

    /// Numbers of this distribution are at most x with the probability e^−e^−x.
    #[test]
    fn the_noise_follows_the_gumbel_distribution_by_token_and_by_key() {
        const BINS: usize = 64;
        const EACH: u32 = 2000;
        let key = |i: u32| [i.wrapping_mul(0x9e37_79b9), !i, i];
        for by_key in [false, true] {
            let mut bins = [0_u32; BINS];
            for i in 0..BINS as u32 * EACH {
                let number = if by_key {
                    DrawNoise::new(key(i)).of(7)
                } else {
                    DrawNoise::new(key(3)).of(i)
                };
                assert!((-2.9..39.0).contains(&number));
                let share = (-(-f64::from(number)).exp()).exp();
                bins[(share * BINS as f64) as usize] += 1;
            }
            let square = |n: &u32| (f64::from(*n) - f64::from(EACH)).powi(2) / f64::from(EACH);
            let chi_square: f64 = bins.iter().map(square).sum();
            assert!(
                chi_square < 110.0,
                "63 degrees of freedom, p < 0.0003: {chi_square}"
            );
        }
    }

    #[test]
    fn all_tokens_that_reach_a_score_are_found() {
        let scale = LogitScale::new(5.01, 0.7);
        let logits: Vec<f32> = (0..20_000)
            .map(|i| (i * 7919 % 2003) as f32 / 400.0)
            .collect();
        for key in 0..20 {
            let noise = DrawNoise::new([key, 5, 6]);
            let scores = DrawScores { scale, noise };
            for floor in [f32::NEG_INFINITY, -5.0, 0.0, 3.0, scores.of(logits[77], 77)] {
                let all = (0..).zip(&logits);
                let all = all.map(|(token, logit)| (scores.of(*logit, token), token));
                let expected: Vec<_> = all.filter(|(score, _)| *score >= floor).collect();
                let found: Vec<_> = scores.reaching(&logits, 0, 5.01, floor).collect();
                assert_eq!(found, expected);
            }
        }
    }

    #[test]
    fn the_least_and_the_greatest_noise_are_finite() {
        assert!((-ln(exponential(BELOW_ONE)) + 2.81).abs() < 0.01);
        let least = (0.5 / (1 << 24) as f32) / (1_u32 << 31) as f32;
        assert!((-ln(exponential(least)) - 56.0 * std::f32::consts::LN_2).abs() < 1e-4);
    }
}
