//! How long a step will take.
//!
//! ```text
//! t(step) = rows(n) + key · keys + [logits > 0] · head + logit · logits
//! ```
//!
//! `n` counts the tokens that the step computes, and `keys` the keys that each of them looks at, over all tokens. `rows` is
//! linear between powers of two. On a quiet machine a roofline, `max(weights, row · n)`, would do within 8 %; where the cores
//! are shared with other work its bend is far off. Decodes of 16 keys without logits, and the last line chunks, fastest
//! of a few on virtual cores that were busy with other work too:
//!
//! ```text
//! n                                     1     2     4     8    16    32    64   128
//! demo model, one thread, µs           33    47    90   161   318   635  1273
//! 2B-4T's shape, one thread, ms        26    27    38    58   124   243   518
//! the same, two contended threads, ms  48    78   120   162   238   416   779  1539
//! ```
//!
//! The head has a bend as well, which `head + logit · logits` smooths: for four to eight sequences it is up to a fifth of
//! the step too long.
//!
//! Coefficients are integers, in nanoseconds, so that equal inputs give equal plans.

use crate::Micros;

/// Nanoseconds of machine time.
pub type Nanos = u64;

/// What a step consists of, as far as its cost goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Tokens computed.
    pub rows: u64,
    /// Keys that the tokens of decodes look at, summed.
    pub decode_keys: u64,
    /// Keys that the tokens of prefill chunks look at, summed.
    pub chunk_keys: u64,
    /// Tokens whose logits are wanted.
    pub logits: u64,
}

/// Powers of two at which the time of a step's tokens is known: 1, 2, 4, up to 128.
const ROW_KNOTS: usize = 8;

/// The coefficients, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostModel {
    /// Of a step of 1, 2, 4, up to 128 tokens that look at nothing and want no logits; never falling. In between it is
    /// linear, and beyond the last it goes on as before it.
    pub rows: [Nanos; ROW_KNOTS],
    /// Of 1024 keys that decodes look at.
    pub kilo_decode_keys: Nanos,
    /// Of 1024 keys that prefill chunks look at.
    pub kilo_chunk_keys: Nanos,
    /// Of streaming the output head, if any logits are wanted.
    pub head: Nanos,
    /// Of the logits after one token, sampling included.
    pub logit: Nanos,
}

impl StepShape {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: StepShape) -> StepShape {
        StepShape {
            rows: self.rows + other.rows,
            decode_keys: self.decode_keys + other.decode_keys,
            chunk_keys: self.chunk_keys + other.chunk_keys,
            logits: self.logits + other.logits,
        }
    }

    /// This without `other`, which is a part of it.
    #[must_use]
    pub(crate) fn minus(self, other: StepShape) -> StepShape {
        StepShape {
            rows: self.rows - other.rows,
            decode_keys: self.decode_keys - other.decode_keys,
            chunk_keys: self.chunk_keys - other.chunk_keys,
            logits: self.logits - other.logits,
        }
    }

    /// A decode of a sequence of `len` known tokens.
    pub fn decode(len: usize) -> StepShape {
        StepShape {
            rows: 1,
            decode_keys: len as u64,
            chunk_keys: 0,
            logits: 1,
        }
    }

    /// A chunk of `tokens` tokens after `history` others.
    pub fn chunk(history: usize, tokens: usize, logits: usize) -> StepShape {
        let (history, tokens) = (history as u64, tokens as u64);
        StepShape {
            rows: tokens,
            decode_keys: 0,
            chunk_keys: tokens * history + tokens * (tokens + 1) / 2,
            logits: logits as u64,
        }
    }
}

impl CostModel {
    /// A guess for before the first measurement: the shape of a small model on two cores.
    pub const UNMEASURED: CostModel = CostModel {
        rows: CostModel::roofline(1_000_000, 100_000),
        kilo_decode_keys: 50_000,
        kilo_chunk_keys: 50_000,
        head: 500_000,
        logit: 50_000,
    };

    /// The times of a machine that streams the weights once a step, unless the arithmetic of its tokens takes longer.
    pub const fn roofline(weights: Nanos, row: Nanos) -> [Nanos; ROW_KNOTS] {
        let mut rows = [weights; ROW_KNOTS];
        let mut knot = 0;
        while knot < ROW_KNOTS {
            if row << knot > weights {
                rows[knot] = row << knot;
            }
            knot += 1;
        }
        rows
    }

    /// The model nearest to steps that were measured, by least squares of the relative errors under the constraint that
    /// no coefficient is negative and `rows` never falls (Lawson and Hanson, *Solving Least Squares Problems*, ch. 23).
    /// Samples far off count less, in a few rounds of reweighting. What no sample shows costs nothing, but that `rows`
    /// rises beyond the samples as it did before.
    pub fn fit(samples: &[(StepShape, Nanos)]) -> CostModel {
        let equations: Vec<[f64; TERMS]> = samples.iter().map(relative_terms).collect();
        let mut weights = vec![1.0; samples.len()];
        let mut solution = [0.0; TERMS];
        for _ in 0..REWEIGHTINGS {
            solution = least_squares(&equations, &weights);
            for (weight, terms) in weights.iter_mut().zip(&equations) {
                let error = (dot(terms, &solution) - 1.0).abs();
                *weight = 1.0 / error.max(ORDINARY_ERROR);
            }
        }
        let mut rises = [0.0; ROW_KNOTS];
        rises.copy_from_slice(&solution[..ROW_KNOTS]);
        let longest = samples.iter().map(|(shape, _)| shape.rows).max();
        let reached = longest.unwrap_or(1).max(1).next_power_of_two().ilog2() as usize;
        for knot in (reached + 1).max(2)..ROW_KNOTS {
            rises[knot] = 2.0 * rises[knot - 1];
        }
        let mut time = 0.0;
        let mut rows = rises.map(|rise| {
            time += rise;
            time.round() as Nanos
        });
        // Twice the tokens never take more than two steps: a sample that says so was disturbed.
        for knot in 1..ROW_KNOTS {
            rows[knot] = rows[knot].min(2 * rows[knot - 1]);
        }
        let [.., decode_keys, chunk_keys, head, logit] = solution.map(|ns| ns.round() as Nanos);
        CostModel {
            rows,
            kilo_decode_keys: decode_keys,
            kilo_chunk_keys: chunk_keys,
            head,
            logit,
        }
    }

    /// How long a step takes; nothing if it has no rows. A step that has more of anything never takes less.
    pub fn predict(&self, shape: StepShape) -> Nanos {
        if shape.rows == 0 {
            return 0;
        }
        let head = if shape.logits > 0 { self.head } else { 0 };
        self.rows_time(shape.rows) + self.keys(shape) + head + self.logit * shape.logits
    }

    /// The part of a step's time that grows with the keys its tokens look at.
    pub(crate) fn keys(&self, shape: StepShape) -> Nanos {
        (self.kilo_decode_keys * shape.decode_keys + self.kilo_chunk_keys * shape.chunk_keys) / 1024
    }

    /// Of `count` tokens, at least one, apart from their attention and logits.
    fn rows_time(&self, count: u64) -> Nanos {
        let knot = (count.ilog2() as usize).min(ROW_KNOTS - 2);
        let below = 1 << knot;
        let rise = self.rows[knot + 1].saturating_sub(self.rows[knot]);
        self.rows[knot] + rise * (count - below) / below
    }

    /// The most tokens of a chunk after `history` others, up to `most`, with which `base` fits the budget; 0 if not even
    /// one does. `logits` of the chunk's tokens want logits.
    pub fn largest_chunk(
        &self,
        budget: Nanos,
        base: StepShape,
        history: usize,
        most: usize,
        logits: usize,
    ) -> usize {
        let fits = |tokens: u64| {
            let chunk = StepShape::chunk(history, tokens as usize, logits);
            self.predict(base.plus(chunk)) <= budget
        };
        largest(most as u64, fits) as usize
    }

    /// In microseconds, rounded up.
    pub fn predict_micros(&self, shape: StepShape) -> Micros {
        self.predict(shape).div_ceil(1000)
    }
}

/// Unknowns of a fit: how much `rows` rises to each of its knots, and the other coefficients.
const TERMS: usize = ROW_KNOTS + 4;

/// How often a fit weighs its samples again.
const REWEIGHTINGS: usize = 6;

/// A relative error that says nothing about a sample.
const ORDINARY_ERROR: f64 = 0.02;

/// What each unknown adds to the prediction of a sample, as a part of what was measured.
fn relative_terms(&(shape, measured): &(StepShape, Nanos)) -> [f64; TERMS] {
    let mut terms = [0.0; TERMS];
    terms[0] = 1.0;
    for (knot, term) in terms.iter_mut().enumerate().take(ROW_KNOTS).skip(1) {
        let below = (1_u64 << (knot - 1)) as f64;
        let part = (shape.rows as f64 - below) / below;
        let most = if knot == ROW_KNOTS - 1 { f64::MAX } else { 1.0 };
        *term = part.clamp(0.0, most);
    }
    let others = [
        shape.decode_keys as f64 / 1024.0,
        shape.chunk_keys as f64 / 1024.0,
        f64::from(u8::from(shape.logits > 0)),
        shape.logits as f64,
    ];
    terms[ROW_KNOTS..].copy_from_slice(&others);
    terms.map(|term| term / measured.max(1) as f64)
}

fn dot(a: &[f64; TERMS], b: &[f64; TERMS]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The `x`, nowhere negative, for which the weighted squares of `equation · x - 1` are least. Unknowns that occur in no
/// equation are 0.
fn least_squares(equations: &[[f64; TERMS]], weights: &[f64]) -> [f64; TERMS] {
    let mut normal = [[0.0; TERMS]; TERMS];
    let mut right = [0.0; TERMS];
    for (terms, weight) in equations.iter().zip(weights) {
        for i in 0..TERMS {
            right[i] += weight * terms[i];
            for j in 0..TERMS {
                normal[i][j] += weight * terms[i] * terms[j];
            }
        }
    }
    // In units in which each unknown's own square is 1.
    let scale: [f64; TERMS] = std::array::from_fn(|i| match normal[i][i] {
        0.0 => 0.0,
        square => 1.0 / square.sqrt(),
    });
    for i in 0..TERMS {
        right[i] *= scale[i];
        for j in 0..TERMS {
            normal[i][j] *= scale[i] * scale[j];
        }
    }
    let solution = non_negative(&normal, &right);
    std::array::from_fn(|i| solution[i] * scale[i])
}

/// Lawson and Hanson's active set: unknowns enter one by one, as long as that brings a gain, and leave when they would
/// become negative.
fn non_negative(normal: &[[f64; TERMS]; TERMS], right: &[f64; TERMS]) -> [f64; TERMS] {
    let mut found = [0.0; TERMS];
    let mut is_free = [false; TERMS];
    for _ in 0..3 * TERMS {
        let gain = |i: usize| right[i] - dot(&normal[i], &found);
        let best = (0..TERMS)
            .filter(|&i| !is_free[i])
            .max_by(|&i, &j| gain(i).total_cmp(&gain(j)));
        let Some(entering) = best.filter(|&i| gain(i) > 1e-10 * right[i]) else {
            break;
        };
        is_free[entering] = true;
        loop {
            let solved = solve(normal, right, &is_free);
            let falls = |&i: &usize| is_free[i] && solved[i] <= 0.0;
            let part = (0..TERMS)
                .filter(falls)
                .map(|i| found[i] / (found[i] - solved[i]).max(f64::MIN_POSITIVE))
                .fold(1.0, f64::min);
            let has_fallen = (0..TERMS).any(|i| falls(&i));
            for i in 0..TERMS {
                let was_falling = falls(&i);
                found[i] += part * (solved[i] - found[i]);
                if was_falling && found[i] <= 1e-12 {
                    found[i] = 0.0;
                }
            }
            if !has_fallen {
                break;
            }
            for i in 0..TERMS {
                is_free[i] &= found[i] > 0.0;
            }
        }
    }
    found
}

/// Solves for the free unknowns alone (Gauss); the others, and those that depend on others, are 0.
fn solve(
    normal: &[[f64; TERMS]; TERMS],
    right: &[f64; TERMS],
    is_free: &[bool; TERMS],
) -> [f64; TERMS] {
    let (mut left, mut right) = (*normal, *right);
    let mut is_pivot = [false; TERMS];
    for pivot in (0..TERMS).filter(|&i| is_free[i]) {
        if left[pivot][pivot] < 1e-12 {
            continue;
        }
        is_pivot[pivot] = true;
        for row in (0..TERMS).filter(|&row| row != pivot && is_free[row]) {
            let factor = left[row][pivot] / left[pivot][pivot];
            let pivot_row = left[pivot];
            for (value, above) in left[row].iter_mut().zip(pivot_row) {
                *value -= factor * above;
            }
            right[row] -= factor * right[pivot];
        }
    }
    std::array::from_fn(|i| {
        if is_pivot[i] {
            right[i] / left[i][i]
        } else {
            0.0
        }
    })
}

/// The largest of `1..=most` that fits, if none fits after one that does not; 0 if none fits.
fn largest(most: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut fitting, mut left) = (0, most);
    while left > 0 {
        let tried = fitting + left.div_ceil(2);
        if fits(tried) {
            left -= tried - fitting;
            fitting = tried;
        } else {
            left = tried - fitting - 1;
        }
    }
    fitting
}

/// What steps take in truth, relative to the prediction: about the 90th percentile, so that a budget is rarely exceeded.
///
/// Each observation above the estimate raises it by nine parts in 256, each below lowers it by one: it rests where one in
/// ten is above. How far above does not matter, so a single very long step moves it no more than any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Correction {
    scale: u64, // Actual ÷ predicted, of UNIT.
}

impl Correction {
    const UNIT: u64 = 1 << 16;
    const LEAST: u64 = Self::UNIT / 4;
    const MOST: u64 = Self::UNIT * 4;

    /// A step that was predicted without correction took `actual`.
    pub(crate) fn observe(&mut self, predicted: Nanos, actual: Nanos) {
        let estimate = u128::from(predicted) * u128::from(self.scale);
        let step = self.scale / 256;
        let moved = if u128::from(actual) * u128::from(Self::UNIT) > estimate {
            self.scale + 9 * step
        } else {
            self.scale - step
        };
        self.scale = moved.clamp(Self::LEAST, Self::MOST);
    }

    /// A prediction, corrected.
    pub(crate) fn apply(self, predicted: Nanos) -> Nanos {
        predicted.saturating_mul(self.scale) / Self::UNIT
    }

    /// The prediction that is corrected to this.
    pub(crate) fn unapply(self, corrected: Nanos) -> Nanos {
        let predicted = u128::from(corrected) * u128::from(Self::UNIT) / u128::from(self.scale);
        Nanos::try_from(predicted).unwrap_or(Nanos::MAX)
    }
}

impl Default for Correction {
    /// The prediction as it is.
    fn default() -> Correction {
        Correction { scale: Self::UNIT }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers from a seed (SplitMix64).
    #[derive(Debug)]
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            mixed ^ (mixed >> 31)
        }

        fn below(&mut self, bound: u64) -> u64 {
            self.next() % bound
        }

        fn model(&mut self) -> CostModel {
            let mut time = 100_000;
            let rows = std::array::from_fn(|knot| {
                time += if knot == 0 { 0 } else { self.below(time) };
                time
            });
            CostModel {
                rows,
                kilo_decode_keys: self.below(100_000),
                kilo_chunk_keys: self.below(100_000),
                head: self.below(3_000_000),
                logit: self.below(500_000),
            }
        }
    }

    /// The steps that a calibration measures.
    fn shapes() -> Vec<StepShape> {
        let mut shapes = Vec::new();
        for knot in 0..ROW_KNOTS {
            shapes.push(StepShape::chunk(0, 1 << knot, 0));
        }
        for logits in [1, 4, 16] {
            let decode = StepShape {
                logits: 1,
                ..StepShape::decode(16)
            };
            shapes.push((0..logits).fold(StepShape::default(), |all, _| all.plus(decode)));
        }
        for len in [1024, 2048] {
            let decode = StepShape {
                logits: 0,
                ..StepShape::decode(len)
            };
            shapes.push((0..4).fold(StepShape::default(), |all, _| all.plus(decode)));
            shapes.push(StepShape::chunk(len, 16, 0));
        }
        shapes
    }

    #[test]
    fn a_fit_finds_the_model_of_exact_samples() {
        let mut random = Random(5);
        for _ in 0..200 {
            let model = random.model();
            let samples: Vec<_> = shapes().iter().map(|&s| (s, model.predict(s))).collect();
            let found = CostModel::fit(&samples);
            for (shape, expected) in samples {
                let error = found.predict(shape).abs_diff(expected);
                assert!(
                    error <= expected / 1000 + 10,
                    "{random:?} {model:?} {found:?}"
                );
            }
        }
    }

    #[test]
    fn a_disturbed_sample_of_many_tokens_is_not_believed() {
        let model = CostModel::UNMEASURED;
        let mut samples: Vec<_> = shapes().iter().map(|&s| (s, model.predict(s))).collect();
        let most = samples.iter_mut().find(|(shape, _)| shape.rows == 64);
        most.expect("it is measured").1 *= 3;
        let found = CostModel::fit(&samples);
        let longest = StepShape::chunk(0, 128, 0);
        let (found, expected) = (found.predict(longest), model.predict(longest));
        assert!(found <= expected * 21 / 10, "{found} instead of {expected}");
    }

    #[test]
    fn a_fit_bears_noise() {
        let mut random = Random(6);
        for _ in 0..200 {
            let model = random.model();
            let mut samples = Vec::new();
            for _ in 0..4 {
                samples.extend(shapes().iter().map(|&shape| {
                    let noisy = model.predict(shape) * (950 + random.below(101)) / 1000;
                    (shape, noisy)
                }));
            }
            let found = CostModel::fit(&samples);
            assert!(found.rows.is_sorted(), "{random:?} {found:?}");
            for shape in shapes() {
                let expected = model.predict(shape);
                let error = found.predict(shape).abs_diff(expected);
                assert!(
                    error <= expected / 10,
                    "{random:?} {shape:?} {model:?} {found:?}"
                );
            }
        }
    }

    #[test]
    fn a_fit_goes_on_beyond_the_samples_as_before() {
        let samples = [1, 2, 4, 8, 16].map(|rows| {
            let shape = StepShape {
                rows,
                ..StepShape::default()
            };
            (shape, 1_000_000 + 100_000 * rows)
        });
        let found = CostModel::fit(&samples);
        let far = found.predict(StepShape {
            rows: 200,
            ..StepShape::default()
        });
        assert!(far.abs_diff(21_000_000) < 210_000, "{found:?}");
    }

    #[test]
    fn a_fit_to_nothing_is_nothing() {
        assert_eq!(CostModel::fit(&[]).rows, [0; ROW_KNOTS]);
    }

    #[test]
    fn the_largest_chunk_is_that_of_trying_all() {
        let mut random = Random(1);
        for _ in 0..2000 {
            let model = random.model();
            let base = match random.below(3) {
                0 => StepShape::default(),
                decodes => (0..decodes * 5).fold(StepShape::default(), |shape, _| {
                    shape.plus(StepShape::decode(1 + random.below(4000) as usize))
                }),
            };
            let (history, most) = (random.below(4000) as usize, random.below(300) as usize);
            let logits = random.below(2) as usize;
            let cost = |tokens| model.predict(base.plus(StepShape::chunk(history, tokens, logits)));
            let budget = random.below(cost(400) + 1);
            let expected = (1..=most).rev().find(|&tokens| cost(tokens) <= budget);
            assert_eq!(
                model.largest_chunk(budget, base, history, most, logits),
                expected.unwrap_or(0),
                "{random:?} {model:?} {budget}"
            );
        }
    }

    #[test]
    fn more_of_anything_never_takes_less() {
        let mut random = Random(2);
        for _ in 0..2000 {
            let model = random.model();
            let shape = StepShape::chunk(
                random.below(3000) as usize,
                1 + random.below(300) as usize,
                random.below(4) as usize,
            );
            let more = shape.plus(StepShape {
                rows: random.below(3),
                decode_keys: random.below(3000),
                chunk_keys: random.below(3000),
                logits: random.below(2),
            });
            assert!(model.predict(more) >= model.predict(shape), "{random:?}");
        }
    }

    #[test]
    fn a_roofline_bends_where_the_arithmetic_outweighs_the_weights() {
        let model = CostModel {
            rows: CostModel::roofline(1_600, 100),
            ..CostModel::UNMEASURED
        };
        assert_eq!(
            model.rows,
            [1_600, 1_600, 1_600, 1_600, 1_600, 3_200, 6_400, 12_800]
        );
        assert_eq!(model.rows_time(200), 20_000);
        assert_eq!(model.predict(StepShape::default()), 0);
    }

    #[test]
    fn the_correction_finds_the_ninetieth_percentile() {
        let mut random = Random(3);
        let mut correction = Correction::default();
        for _ in 0..20_000 {
            // Evenly from 1 to 2 times the prediction: nine in ten are below 1.9 times.
            correction.observe(1_000_000, 1_000_000 + random.below(1_000_001));
        }
        let found = correction.apply(1_000);
        assert!((1_700..=2_000).contains(&found), "{found}");
    }

    #[test]
    fn one_very_long_step_moves_the_correction_no_more_than_another() {
        let after = |actual| {
            let mut correction = Correction::default();
            correction.observe(1_000, actual);
            correction
        };
        assert_eq!(after(1_001), after(1_000_000_000));
        assert_ne!(after(1_001), Correction::default());
    }

    #[test]
    fn the_correction_is_bounded() {
        let (mut high, mut low) = (Correction::default(), Correction::default());
        for _ in 0..10_000 {
            high.observe(1, Nanos::MAX);
            low.observe(Nanos::MAX, 0);
        }
        assert_eq!(high.apply(1_000), 4_000);
        assert_eq!(low.apply(1_000), 250);
    }
}
