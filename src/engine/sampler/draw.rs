//! The draw from a row of logits at a temperature above 0.
//!
//! Of the tokens that the filters keep, the one with the largest score is drawn: its logit divided
//! by the temperature, plus a random number of its own (`kernels/src/draw.rs`). So a token is drawn
//! with the probability that softmax gives it among the kept ones, and whether it is drawn depends
//! on no token that has surely a smaller score.
//!
//! Top-k, top-p and min-p each keep the first tokens in the order of falling logits. So if the
//! token with the largest score is not kept, no token after it is, and the search goes on among the
//! tokens before it.

use sterna_kernels::{DrawNoise, DrawScores, LogitScale, Rank};
use sterna_random::{GOLDEN, mix};
use sterna_scheduler::TokenId;

use super::row::{ScannedRow, likelier_first};
use crate::engine::sampling_params::SamplingParams;
use crate::fault::{self, Place};

/// Memory for one draw at a time.
#[derive(Default)]
pub(super) struct DrawMemory {
    pub(super) masses: Vec<f32>,   // By block of logits.
    pub(super) largest: Vec<Rank>, // In no order.
}

/// More than the relative error of a sum of weights.
const ROUNDING: f64 = 1e-4;

/// Returns the random numbers of the draw at one position of one seed: SplitMix64 in counter mode.
pub(super) fn noise(seed: u64, position: u64) -> DrawNoise {
    let key = mix(seed.wrapping_add(GOLDEN));
    let first = mix(key.wrapping_add(position.wrapping_add(1).wrapping_mul(GOLDEN)));
    let second = mix(first.wrapping_add(GOLDEN));
    DrawNoise::new([first as u32, (first >> 32) as u32, second as u32])
}

/// Draws a token. The largest logit of the row must be finite.
pub(super) fn draw(
    row: ScannedRow<'_>,
    params: &SamplingParams,
    noise: DrawNoise,
    memory: &mut DrawMemory,
) -> TokenId {
    let scale = LogitScale::new(row.max, params.temperature);
    let scores = DrawScores { scale, noise };
    let mut end = end_of_top_k(row, params.top_k as usize, &mut memory.largest);
    let (all, mut total) = (end, None);
    let mut mass_before = |end| {
        let mass = row.mass_before(end, scale, &mut memory.masses);
        fault::pass(Place::TokensWeighed);
        mass
    };
    loop {
        let least = f32::NEG_INFINITY;
        let (_, token) = (row.kernels).best_score(row.logits, scores, end, row.peaks, least);
        fault::pass(Place::TokenScored);
        let rank = Rank {
            logit: row.logits[token as usize],
            token,
        };
        let weight = scale.weight(rank.logit);
        let is_likely = weight >= params.min_p.min(1.0);
        let is_kept = is_likely
            && (params.top_p >= 1.0 || {
                let (mass, top_p) = (mass_before(rank), f64::from(params.top_p));
                // The nucleus has at least one token. Most others need no sum of all tokens.
                mass == 0.0
                    || mass * (1.0 + ROUNDING) < top_p * (mass + f64::from(weight))
                    || mass < top_p * *total.get_or_insert_with(|| mass_before(all))
            });
        if is_kept {
            return token;
        }
        end = rank; // The most likely token is always kept, so there are tokens before this one.
    }
}

/// Returns the place after the last token that top-k keeps.
fn end_of_top_k(row: ScannedRow<'_>, top_k: usize, largest: &mut Vec<Rank>) -> Rank {
    if top_k == 0 || top_k >= row.logits.len() {
        return Rank::END;
    }
    row.largest(top_k, largest);
    fault::pass(Place::LargestFound);
    let last = largest.iter().max_by(|a, b| likelier_first(a, b));
    let last = last.expect("top-k keeps a token");
    Rank {
        token: last.token + 1,
        ..*last
    }
}
