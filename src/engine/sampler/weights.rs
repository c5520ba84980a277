//! The weights of all tokens of a row, e^((logit - max) / temperature): which of them may be drawn,
//! and the draw.
//!
//! A draw needs little of a large vocabulary, so nothing here sorts or moves it. Kernels process
//! blocks of tokens, and the largest weight of each block shows whether the next pass needs it.
//!
//! Invariant: every sum has a fixed order, so a result depends on the row alone.

use sterna_kernels::{Kernels, LOGITS_BLOCK, LogitScale};
use sterna_scheduler::TokenId;

/// The number of weights that the search for the end of a nucleus compares at once.
const LANES: usize = 16;

/// The largest number of contenders that are sorted to find the end of a nucleus. While there are
/// more, one pass over the row halves the range of weights.
const MAX_SORTED: usize = 1024;

/// The result of one pass over a row of logits.
pub(super) struct LogitScan {
    /// No logit is NaN or infinite.
    pub(super) is_finite: bool,
    /// The token with the largest logit, the lowest id on a tie.
    pub(super) best: TokenId,
    /// The largest logit.
    pub(super) max: f32,
}

/// Scans a row once, and stores the largest logit of each block in `peaks`.
pub(super) fn scan(kernels: Kernels, logits: &[f32], peaks: &mut Vec<f32>) -> LogitScan {
    peaks.resize(logits.len().div_ceil(LOGITS_BLOCK), 0.0);
    let is_finite = kernels.scan_logits(logits, peaks);
    let larger = |a, b| if b > a { b } else { a };
    let max = peaks.iter().copied().fold(f32::NEG_INFINITY, larger);
    let block = peaks.iter().position(|&peak| peak == max).unwrap_or(0);
    let first = block * LOGITS_BLOCK;
    let inside = logits[first..].iter().position(|&logit| logit == max);
    LogitScan {
        is_finite,
        best: (first + inside.unwrap_or(0)) as TokenId,
        max,
    }
}

/// Returns the scale at which the logit `max` weighs 1.
pub(super) fn scale(max: f32, temperature: f32) -> LogitScale {
    LogitScale {
        largest: max,
        inverse_temperature: (1.0 / temperature).min(f32::MAX),
    }
}

/// The weights of one row and the sums of its blocks, in memory that the next row reuses.
pub(super) struct TokenWeights {
    kernels: Kernels,
    values: Vec<f32>, // 1 for the most likely token; 0 for a token that must not be drawn.
    heaviest: Vec<f32>, // The largest weight of each block, before anything was dropped.
    masses: Vec<f32>, // The sum of each block.
    contenders: Vec<(f32, usize)>, // Tokens that may end the nucleus.
}

impl TokenWeights {
    pub(super) fn with_capacity(kernels: Kernels, vocabulary: usize) -> TokenWeights {
        let blocks = vocabulary.div_ceil(LOGITS_BLOCK);
        TokenWeights {
            kernels,
            values: Vec::with_capacity(vocabulary),
            heaviest: Vec::with_capacity(blocks),
            masses: Vec::with_capacity(blocks),
            contenders: Vec::with_capacity(vocabulary),
        }
    }

    /// Returns the weights that `weigh` computed.
    pub(super) fn values(&self) -> &[f32] {
        &self.values
    }

    /// Returns the number of tokens that weigh at least `min_weight`.
    pub(super) fn count_from(&self, min_weight: f32) -> usize {
        let (values, heaviest) = (&self.values, &self.heaviest);
        self.kernels.weights_from(min_weight, values, heaviest).1
    }

    /// Computes and keeps the weights of a row.
    pub(super) fn weigh(&mut self, logits: &[f32], scale: LogitScale) {
        let blocks = logits.len().div_ceil(LOGITS_BLOCK);
        self.values.resize(logits.len(), 0.0);
        self.heaviest.resize(blocks, 0.0);
        self.masses.resize(blocks, 0.0);
        let (values, masses) = (&mut self.values, &mut self.masses);
        self.kernels
            .weigh_logits(logits, scale, values, masses, &mut self.heaviest);
    }

    /// Returns the sum of a row's weights without keeping the weights.
    pub(super) fn sum(&mut self, logits: &[f32], scale: LogitScale) -> f64 {
        self.masses.resize(logits.len().div_ceil(LOGITS_BLOCK), 0.0);
        self.kernels.sum_weights(logits, scale, &mut self.masses);
        self.total()
    }

    /// Draws from a row of which every token may be drawn. Draws the same token as
    /// [`weigh`](Self::weigh) then [`pick`](Self::pick), but stores only the blocks' sums.
    pub(super) fn draw(&mut self, logits: &[f32], scale: LogitScale, point: f64) -> TokenId {
        let target = point * self.sum(logits, scale);
        let (first, before) = self.block_at(target);
        let block = logits[first..].iter().take(LOGITS_BLOCK);
        let weights = block.map(|&logit| scale.weight(logit));
        token_at(target, before, first, weights)
    }

    /// Returns the sum of all kept weights.
    fn total(&self) -> f64 {
        self.masses.iter().copied().map(f64::from).sum()
    }

    /// Drops all weights below `min_weight`, and all outside the nucleus: the heaviest tokens that
    /// together have the share `top_p` of the total. The nucleus has at least one token. Among
    /// equal weights it has the tokens with the lowest ids.
    pub(super) fn keep(&mut self, top_p: f32, min_weight: f32) {
        let (bound, last) = if top_p < 1.0 {
            let total = self.total();
            self.nucleus_end(f64::from(top_p) * total, (1.0 - f64::from(top_p)) * total)
        } else {
            (0.0, usize::MAX)
        };
        if min_weight > bound {
            self.drop_below(min_weight, usize::MAX);
        } else {
            self.drop_below(bound, last);
        }
    }

    /// Returns the weight and id of the last token of the nucleus: the fewest tokens, heaviest
    /// first, that together weigh `mass`. The tokens outside together weigh at most `rest`.
    fn nucleus_end(&mut self, mass: f64, rest: f64) -> (f32, usize) {
        let mass = mass.max(f64::MIN_POSITIVE); // So that the nucleus has a token.
        // A binary search for the last weight, over its bits: the bits of positive floats have
        // the same order as the floats. All tokens lighter than the first `low` together weigh less
        // than `rest`.
        let mut low = ((rest / self.values.len() as f64) as f32).to_bits();
        let mut high = 1_f32.to_bits() + 1;
        let (mut sum, mut above) = (0.0, 0); // The sum and number of weights of at least `high`.
        let mut below = self.values.len();
        while high - low > 1 && below - above > MAX_SORTED {
            let middle = low + (high - low) / 2;
            let (heavier, count) =
                (self.kernels).weights_from(f32::from_bits(middle), &self.values, &self.heaviest);
            if heavier < mass {
                (high, sum, above) = (middle, heavier, count);
            } else {
                (low, below) = (middle, count);
            }
        }
        let (low, high) = (f32::from_bits(low), f32::from_bits(high));
        self.end_between(low, high, mass - sum)
    }

    /// Adds up the weights in `low..high`, heaviest first, and returns the weight and id of the
    /// token at which the sum reaches `mass`. Returns `low` and the largest id if it never does.
    fn end_between(&mut self, low: f32, high: f32, mass: f64) -> (f32, usize) {
        self.contenders.clear();
        let blocks = self.values.chunks(LOGITS_BLOCK).zip(&self.heaviest);
        for (first, (values, &heaviest)) in (0..).step_by(LOGITS_BLOCK).zip(blocks) {
            if heaviest < low {
                continue;
            }
            for (first, values) in (first..).step_by(LANES).zip(values.chunks(LANES)) {
                // Usually none of the weights is in the range, and one vector comparison shows it.
                let is_between = |weight: f32| (weight >= low) & (weight < high);
                if values
                    .iter()
                    .fold(false, |any, &weight| any | is_between(weight))
                {
                    let tokens = values.iter().copied().zip(first..);
                    self.contenders
                        .extend(tokens.filter(|(weight, _)| is_between(*weight)));
                }
            }
        }
        // More than `MAX_SORTED` contenders all have the same weight, so they are sorted already.
        let heavier_first =
            |a: &(f32, usize), b: &(f32, usize)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        self.contenders.sort_unstable_by(heavier_first);
        let mut sum = 0.0;
        let end = self.contenders.iter().find(|contender| {
            sum += f64::from(contender.0);
            sum >= mass
        });
        end.copied().unwrap_or((low, usize::MAX))
    }

    /// Drops all weights below `bound`, and the weights equal to it of tokens after `last`.
    fn drop_below(&mut self, bound: f32, last: usize) {
        // Up to `last`, weights equal to the bound stay. This loop drops equal weights after
        // `last` in its block; the second call drops equal weights in later blocks.
        let blocks = (last / LOGITS_BLOCK + 1).min(self.masses.len());
        let tokens = (blocks * LOGITS_BLOCK).min(self.values.len());
        for weight in self.values[..tokens]
            .iter_mut()
            .skip(last.saturating_add(1))
        {
            *weight = if *weight > bound { *weight } else { 0.0 };
        }
        let (values, later_values) = self.values.split_at_mut(tokens);
        let (heaviest, later_heaviest) = self.heaviest.split_at(blocks);
        let (masses, later_masses) = self.masses.split_at_mut(blocks);
        self.kernels.drop_weights(bound, values, heaviest, masses);
        let (values, masses) = (later_values, later_masses);
        self.kernels
            .drop_weights(bound.next_up(), values, later_heaviest, masses);
    }

    /// Returns the token at `point`, 0 to 1. The weights lie end to end on a line of length 1, in
    /// the order of the token ids.
    pub(super) fn pick(&self, point: f64) -> TokenId {
        let target = point * self.total();
        let (first, before) = self.block_at(target);
        let block = self.values[first..].iter().take(LOGITS_BLOCK);
        token_at(target, before, first, block.copied())
    }

    /// Returns the first token of the block in which the sum of weights exceeds `target`, and the
    /// sum before that block.
    fn block_at(&self, target: f64) -> (usize, f64) {
        let mut sum = 0.0;
        let mut chosen = None;
        let blocks = self.masses.iter().enumerate();
        for (block, &mass) in blocks.filter(|(_, mass)| **mass > 0.0) {
            chosen = Some((block * LOGITS_BLOCK, sum));
            sum += f64::from(mass);
            if sum > target {
                break;
            }
        }
        chosen.expect("the most likely token weighs 1 and is always kept")
    }
}

/// Returns the token at which the sum of weights exceeds `target`. `weights` begin with the token
/// `first`, and `sum` is the sum before this token.
fn token_at(
    target: f64,
    mut sum: f64,
    first: usize,
    weights: impl Iterator<Item = f32>,
) -> TokenId {
    let mut last = None;
    for (token, weight) in (first..).zip(weights).filter(|(_, weight)| *weight > 0.0) {
        last = Some(token as TokenId);
        sum += f64::from(weight);
        if sum > target {
            break;
        }
    }
    last.expect("a block with a positive sum has a token with a positive weight")
}
