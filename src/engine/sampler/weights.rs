//! The weights of a whole row: e^((logit - largest) / temperature), what part of them may be drawn, and the draw.
//!
//! A vocabulary is long and a draw needs little of it, so nothing here sorts or moves it: passes in sixteen lanes over blocks of
//! 256 tokens, and each block's heaviest weight tells the next pass whether to look into it.
//!
//! Invariant: every sum has one fixed order, so a result depends on the row alone.

use super::TokenId;

/// Tokens of a block.
pub(super) const BLOCK: usize = 256;

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
pub(super) fn scan(logits: &[f32], peaks: &mut Vec<f32>) -> Scan {
    peaks.clear();
    let mut nothing = [0.0; LANES]; // Stays so until an infinity or NaN is multiplied with it.
    for block in logits.chunks(BLOCK) {
        let mut largest = [f32::NEG_INFINITY; LANES];
        let (chunks, rest) = block.as_chunks::<LANES>();
        for chunk in chunks {
            for lane in 0..LANES {
                largest[lane] = larger(chunk[lane], largest[lane]);
                nothing[lane] += chunk[lane] * 0.0;
            }
        }
        for (lane, &logit) in rest.iter().enumerate() {
            largest[lane] = larger(logit, largest[lane]);
            nothing[lane] += logit * 0.0;
        }
        peaks.push(
            largest
                .into_iter()
                .fold(f32::NEG_INFINITY, |a, b| larger(b, a)),
        );
    }
    let most = peaks.iter().fold(f32::NEG_INFINITY, |a, &b| larger(b, a));
    let block = peaks.iter().position(|&peak| peak == most).unwrap_or(0);
    let first = block * BLOCK;
    let inside = logits[first..].iter().position(|&logit| logit == most);
    Scan {
        is_finite: nothing.iter().all(|&lane| lane == 0.0),
        best: (first + inside.unwrap_or(0)) as TokenId,
        most,
    }
}

/// One row's weights and, by block, how heavy they are. Memory that is used again for the next row.
pub(super) struct Weights {
    values: Vec<f32>,   // 1 for the most likely token; 0 for one that cannot be drawn.
    heaviest: Vec<f32>, // Of each block, before anything was dropped.
    masses: Vec<f64>,   // Of each block.
    contenders: Vec<(f32, usize)>, // For the end of a nucleus.
}

impl Weights {
    pub(super) fn with_capacity(vocabulary: usize) -> Weights {
        let blocks = vocabulary.div_ceil(BLOCK);
        Weights {
            values: Vec::with_capacity(vocabulary),
            heaviest: Vec::with_capacity(blocks),
            masses: Vec::with_capacity(blocks),
            contenders: Vec::with_capacity(vocabulary),
        }
    }

    /// Takes in a row whose largest logit is `most`.
    pub(super) fn weigh(&mut self, logits: &[f32], most: f32, temperature: f32) {
        let inverse = (1.0 / temperature).min(f32::MAX);
        self.values.resize(logits.len(), 0.0);
        self.heaviest.clear();
        self.masses.clear();
        for (logits, values) in logits.chunks(BLOCK).zip(self.values.chunks_mut(BLOCK)) {
            let (chunks, rest) = logits.as_chunks::<LANES>();
            let (outs, out_rest) = values.as_chunks_mut::<LANES>();
            for (chunk, out) in chunks.iter().zip(outs) {
                for lane in 0..LANES {
                    out[lane] = exp((chunk[lane] - most) * inverse);
                }
            }
            for (logit, out) in rest.iter().zip(out_rest) {
                *out = exp((logit - most) * inverse);
            }
            let (mass, heaviest) = sum_and_largest(values);
            self.masses.push(mass);
            self.heaviest.push(heaviest);
        }
    }

    /// The sum of all weights that are left.
    pub(super) fn total(&self) -> f64 {
        self.masses.iter().sum()
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
            let (heavier, count) = self.at_least(f32::from_bits(middle));
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
        let blocks = self.values.chunks(BLOCK).zip(&self.heaviest);
        for (first, (values, &heaviest)) in (0..).step_by(BLOCK).zip(blocks) {
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

    /// The sum of the weights from `bar` up, and how many there are.
    fn at_least(&self, bar: f32) -> (f64, usize) {
        let (mut mass, mut count) = (0.0, 0);
        for (values, &heaviest) in self.values.chunks(BLOCK).zip(&self.heaviest) {
            if heaviest < bar {
                continue;
            }
            let (mut sums, mut counts) = ([0.0_f32; LANES], [0_u32; LANES]);
            let (chunks, rest) = values.as_chunks::<LANES>();
            for chunk in chunks {
                sums = each(|lane| sums[lane] + if chunk[lane] >= bar { chunk[lane] } else { 0.0 });
                counts = each(|lane| counts[lane] + u32::from(chunk[lane] >= bar));
            }
            for (lane, &weight) in rest.iter().enumerate() {
                sums[lane] += if weight >= bar { weight } else { 0.0 };
                counts[lane] += u32::from(weight >= bar);
            }
            mass += f64::from(sum_lanes(sums));
            count += counts.iter().sum::<u32>() as usize;
        }
        (mass, count)
    }

    /// Sets to zero what weighs less than `bar`, and what weighs as much but stands behind token `last`.
    fn drop_below(&mut self, bar: f32, last: usize) {
        let blocks = self.values.chunks_mut(BLOCK);
        let blocks = blocks.zip(&self.heaviest).zip(&mut self.masses);
        for (first, ((values, &heaviest), mass)) in (0..).step_by(BLOCK).zip(blocks) {
            if heaviest < bar {
                *mass = 0.0; // `pick` does not look into it.
                continue;
            }
            // As many of the block's tokens stand up to `last`.
            let before = last
                .saturating_add(1)
                .saturating_sub(first)
                .min(values.len());
            let (before, behind) = values.split_at_mut(before);
            for weight in before {
                *weight = if *weight >= bar { *weight } else { 0.0 };
            }
            for weight in behind {
                *weight = if *weight > bar { *weight } else { 0.0 };
            }
            *mass = sum_and_largest(values).0;
        }
    }

    /// The token at `point` (0 to 1) of the line on which each takes its weight, in the order of ids.
    pub(super) fn pick(&self, point: f64) -> TokenId {
        let target = point * self.total();
        let mut passed = 0.0;
        let mut chosen = None;
        for (block, &mass) in self
            .masses
            .iter()
            .enumerate()
            .filter(|(_, mass)| **mass > 0.0)
        {
            chosen = Some((block, passed));
            passed += mass;
            if passed > target {
                break;
            }
        }
        let (block, mut passed) =
            chosen.expect("the most likely token weighs 1 and is always kept");
        let first = block * BLOCK;
        let mut last = None;
        let values = self.values[first..].iter().take(BLOCK);
        for (token, &weight) in (first..).zip(values).filter(|(_, weight)| **weight > 0.0) {
            last = Some(token as TokenId);
            passed += f64::from(weight);
            if passed > target {
                break;
            }
        }
        last.expect("a block that weighs something has a token that does")
    }
}

/// One value a lane.
fn each<T>(value: impl FnMut(usize) -> T) -> [T; LANES] {
    std::array::from_fn(value)
}

/// One instruction, unlike `f32::max`: what is no number is not larger.
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

fn sum_and_largest(values: &[f32]) -> (f64, f32) {
    let (mut sums, mut largest) = ([0.0; LANES], [0.0; LANES]);
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] += chunk[lane];
            largest[lane] = larger(chunk[lane], largest[lane]);
        }
    }
    for (lane, &value) in rest.iter().enumerate() {
        sums[lane] += value;
        largest[lane] = larger(value, largest[lane]);
    }
    let largest = largest.into_iter().fold(0.0, larger);
    (f64::from(sum_lanes(sums)), largest)
}

/// Halves onto each other.
fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
    }
    lanes[0]
}

/// `e^x` of a number that is not positive, within 3e-7 of its value; 0 below -87. As the kernels' exponential, but without fused
/// operations: this is compiled for every x86-64, and so gives the same bits on each.
pub(super) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2²³
    const LN_2_HIGH: f32 = 355.0 / 512.0; // Few bits, so that n · LN_2_HIGH is exact.
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    let p = 1.987_569_1e-4 * r + 1.398_199_9e-3;
    let p = (p * r + 8.333_452e-3) * r + 4.166_579_6e-2;
    let p = (p * r + 1.666_666_5e-1) * r + 0.5;
    let e_r = (p * (r * r) + r) + 1.0;
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
