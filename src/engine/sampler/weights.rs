//! The weights of a whole row: e^((logit - largest) / temperature), what part of them may be drawn, and the draw.
//!
//! A vocabulary is long and a draw needs little of it, so nothing here sorts or moves it: kernels pass over blocks of tokens, and each
//! block's heaviest weight tells the next pass whether to look into it.
//!
//! Invariant: every sum has one fixed order, so a result depends on the row alone.

use sterna_kernels::{Kernels, LOGITS_BLOCK, LogitScale};

use super::TokenId;

/// Weights that are looked at together for the end of a nucleus.
const LANES: usize = 16;

/// Contenders that are sorted to find the end of a nucleus; a pass over the row halves more.
const SORTED: usize = 1024;

/// What one pass tells of a row of logits.
pub(super) struct Scan {
    /// Every logit is a number, and none infinite.
    pub(super) is_finite: bool,
    /// The token with the largest logit, the lowest id on a tie.
    pub(super) best: TokenId,
    /// The largest logit.
    pub(super) most: f32,
}

/// Looks at a row once. `peaks` becomes the largest logit of each block.
pub(super) fn scan(kernels: Kernels, logits: &[f32], peaks: &mut Vec<f32>) -> Scan {
    peaks.resize(logits.len().div_ceil(LOGITS_BLOCK), 0.0);
    let is_finite = kernels.scan_logits(logits, peaks);
    let larger = |a, b| if b > a { b } else { a };
    let most = peaks.iter().copied().fold(f32::NEG_INFINITY, larger);
    let block = peaks.iter().position(|&peak| peak == most).unwrap_or(0);
    let first = block * LOGITS_BLOCK;
    let inside = logits[first..].iter().position(|&logit| logit == most);
    Scan {
        is_finite,
        best: (first + inside.unwrap_or(0)) as TokenId,
        most,
    }
}

/// What weights relative to that of the logit `most` are made with.
pub(super) fn scale(most: f32, temperature: f32) -> LogitScale {
    LogitScale {
        largest: most,
        inverse_temperature: (1.0 / temperature).min(f32::MAX),
    }
}

/// One row's weights and, by block, how heavy they are. Memory that is used again for the next row.
pub(super) struct Weights {
    kernels: Kernels,
    values: Vec<f32>, // 1 for the most likely token; 0 for one that cannot be drawn.
    heaviest: Vec<f32>, // Of each block, before anything was dropped.
    masses: Vec<f32>, // Of each block.
    contenders: Vec<(f32, usize)>, // For the end of a nucleus.
}

impl Weights {
    pub(super) fn with_capacity(kernels: Kernels, vocabulary: usize) -> Weights {
        let blocks = vocabulary.div_ceil(LOGITS_BLOCK);
        Weights {
            kernels,
            values: Vec::with_capacity(vocabulary),
            heaviest: Vec::with_capacity(blocks),
            masses: Vec::with_capacity(blocks),
            contenders: Vec::with_capacity(vocabulary),
        }
    }

    /// Takes in a row.
    pub(super) fn weigh(&mut self, logits: &[f32], scale: LogitScale) {
        let blocks = logits.len().div_ceil(LOGITS_BLOCK);
        self.values.resize(logits.len(), 0.0);
        self.heaviest.resize(blocks, 0.0);
        self.masses.resize(blocks, 0.0);
        let (values, masses) = (&mut self.values, &mut self.masses);
        self.kernels
            .weigh_logits(logits, scale, values, masses, &mut self.heaviest);
    }

    /// The sum of a row's weights, none of which is kept.
    pub(super) fn sum(&mut self, logits: &[f32], scale: LogitScale) -> f64 {
        self.masses.resize(logits.len().div_ceil(LOGITS_BLOCK), 0.0);
        self.kernels.sum_weights(logits, scale, &mut self.masses);
        self.total()
    }

    /// [`weigh`](Self::weigh) and [`pick`](Self::pick), where nothing is dropped between: then the weights of one block are enough.
    pub(super) fn draw(&mut self, logits: &[f32], scale: LogitScale, point: f64) -> TokenId {
        let target = point * self.sum(logits, scale);
        let (first, passed) = self.block_at(target);
        let block = logits[first..].iter().take(LOGITS_BLOCK);
        token_at(
            target,
            passed,
            first,
            block.map(|&logit| scale.weight(logit)),
        )
    }

    /// The sum of all weights that are left.
    fn total(&self) -> f64 {
        self.masses.iter().copied().map(f64::from).sum()
    }

    /// Drops what weighs less than `least`, and all but the heaviest tokens that together have the share `top_p` of what there is:
    /// at least one, and of equally heavy ones those with the lowest ids.
    pub(super) fn keep(&mut self, top_p: f32, least: f32) {
        let (bar, last) = if top_p < 1.0 {
            let total = self.total();
            self.nucleus_end(f64::from(top_p) * total, (1.0 - f64::from(top_p)) * total)
        } else {
            (0.0, usize::MAX)
        };
        if least > bar {
            self.drop_below(least, usize::MAX);
        } else {
            self.drop_below(bar, last);
        }
    }

    /// The last token, by weight and then id, of the fewest that together weigh `enough`; what is beyond weighs `spare` at most.
    fn nucleus_end(&mut self, enough: f64, spare: f64) -> (f32, usize) {
        let enough = enough.max(f64::MIN_POSITIVE); // One is always kept.
        // Weights are positive, so their bits ascend as they do. Tokens lighter than this weigh less than `spare` together.
        let mut low = ((spare / self.values.len() as f64) as f32).to_bits();
        let mut high = 1_f32.to_bits() + 1;
        let (mut mass, mut above) = (0.0, 0); // Of what weighs `high` or more.
        let mut below = self.values.len();
        while high - low > 1 && below - above > SORTED {
            let middle = low + (high - low) / 2;
            let (heavier, count) =
                (self.kernels).weights_from(f32::from_bits(middle), &self.values, &self.heaviest);
            if heavier < enough {
                (high, mass, above) = (middle, heavier, count);
            } else {
                (low, below) = (middle, count);
            }
        }
        let (low, high) = (f32::from_bits(low), f32::from_bits(high));
        self.end_between(low, high, enough - mass)
    }

    /// The token with which those from `low` to below `high`, heaviest first, weigh `enough`; the last if they don't.
    fn end_between(&mut self, low: f32, high: f32, enough: f64) -> (f32, usize) {
        self.contenders.clear();
        let blocks = self.values.chunks(LOGITS_BLOCK).zip(&self.heaviest);
        for (first, (values, &heaviest)) in (0..).step_by(LOGITS_BLOCK).zip(blocks) {
            if heaviest < low {
                continue;
            }
            for (first, values) in (first..).step_by(LANES).zip(values.chunks(LANES)) {
                // Most often none of sixteen is between: then one look is all they get.
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
        // More than a few are all as heavy as each other, and in order already.
        let heavier_first =
            |a: &(f32, usize), b: &(f32, usize)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        self.contenders.sort_unstable_by(heavier_first);
        let mut weight = 0.0;
        let end = self.contenders.iter().find(|contender| {
            weight += f64::from(contender.0);
            weight >= enough
        });
        end.copied().unwrap_or((low, usize::MAX))
    }

    /// Drops what weighs less than `bar`, and what weighs as much but stands behind token `last`.
    fn drop_below(&mut self, bar: f32, last: usize) {
        // Up to and with the block of `last`; of its other tokens the light ones go first.
        let whole = (last / LOGITS_BLOCK + 1).min(self.masses.len());
        let here = (whole * LOGITS_BLOCK).min(self.values.len());
        for weight in self.values[..here].iter_mut().skip(last.saturating_add(1)) {
            *weight = if *weight > bar { *weight } else { 0.0 };
        }
        let (values, later_values) = self.values.split_at_mut(here);
        let (heaviest, later_heaviest) = self.heaviest.split_at(whole);
        let (masses, later_masses) = self.masses.split_at_mut(whole);
        self.kernels.drop_weights(bar, values, heaviest, masses);
        let (values, masses) = (later_values, later_masses);
        self.kernels
            .drop_weights(bar.next_up(), values, later_heaviest, masses);
    }

    /// The token at `point` (0 to 1) of the line on which each takes its weight, in the order of ids.
    pub(super) fn pick(&self, point: f64) -> TokenId {
        let target = point * self.total();
        let (first, passed) = self.block_at(target);
        let block = self.values[first..].iter().take(LOGITS_BLOCK);
        token_at(target, passed, first, block.copied())
    }

    /// The first token of the block that reaches beyond `target`, and what the blocks before it weigh.
    fn block_at(&self, target: f64) -> (usize, f64) {
        let mut passed = 0.0;
        let mut chosen = None;
        let blocks = self.masses.iter().enumerate();
        for (block, &mass) in blocks.filter(|(_, mass)| **mass > 0.0) {
            chosen = Some((block * LOGITS_BLOCK, passed));
            passed += f64::from(mass);
            if passed > target {
                break;
            }
        }
        chosen.expect("the most likely token weighs 1 and is always kept")
    }
}

/// The token that reaches beyond `target`, of those from `first` on with the given weights; `passed` is what stands before them.
fn token_at(
    target: f64,
    mut passed: f64,
    first: usize,
    weights: impl Iterator<Item = f32>,
) -> TokenId {
    let mut last = None;
    for (token, weight) in (first..).zip(weights).filter(|(_, weight)| *weight > 0.0) {
        last = Some(token as TokenId);
        passed += f64::from(weight);
        if passed > target {
            break;
        }
    }
    last.expect("a block that weighs something has a token that does")
}
