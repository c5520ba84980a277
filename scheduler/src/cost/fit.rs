//! The fit of a cost model to measured steps.
//!
//! It runs when no request does.

use super::model::ROW_KNOTS;
use super::terms::{TERMS, Terms};
use crate::{CostModel, Nanos, PAGE_TOKENS, SAMPLING_UNIT, StepShape};

impl CostModel {
    /// Returns the model that is nearest to the measured steps: the least squares of the relative
    /// errors (Lawson and Hanson, *Solving Least Squares Problems*, ch. 23).
    ///
    /// - No coefficient is negative, and `rows` never falls.
    /// - A few rounds of reweighting reduce the weight of samples that are far off.
    /// - A quantity that occurs in no sample costs nothing. But beyond the samples without a
    ///   history, `rows` keeps its slope, and `sampling` takes what the caller has measured.
    pub fn fit(samples: &[(StepShape, Nanos)]) -> CostModel {
        let reached = last_knot(samples);
        let equations: Vec<Terms> = samples
            .iter()
            .map(|sample| relative_terms(sample, reached))
            .collect();
        let mut weights = vec![1.0; samples.len()];
        let mut solution = [0.0; TERMS];
        for _ in 0..REWEIGHTINGS {
            solution = least_squares(&equations, &weights);
            for (weight, terms) in weights.iter_mut().zip(&equations) {
                let error = (dot(terms, &solution) - 1.0).abs();
                *weight = 1.0 / error.max(ORDINARY_ERROR);
            }
        }
        for knot in reached + 1..ROW_KNOTS {
            solution[knot] = 2.0 * solution[knot - 1];
        }
        let mut model = CostModel::with_coefficients(&solution);
        // Twice the tokens never take more than two steps. A sample that shows more was disturbed.
        for knot in 1..ROW_KNOTS {
            model.rows[knot] = model.rows[knot].min(2 * model.rows[knot - 1]);
        }
        if samples.iter().all(|(shape, _)| shape.sampling == 0) {
            model.sampling = SAMPLING_UNIT;
        }
        model
    }
}

/// The number of rounds of reweighting.
const REWEIGHTINGS: usize = 6;

/// The relative error below which all samples have the same weight.
const ORDINARY_ERROR: f64 = 0.02;

/// Returns the last knot that samples determine, at least the second. Beyond this knot `rows` keeps
/// its slope. A step with a history does not count, because its time may come from its keys.
fn last_knot(samples: &[(StepShape, Nanos)]) -> usize {
    let shapes = samples.iter().map(|(shape, _)| shape);
    let without_history = shapes.filter(|shape| {
        2 * shape.chunk_keys <= shape.rows * (shape.rows + 1)
            && shape.decode_keys <= shape.rows * PAGE_TOKENS as u64
    });
    let longest = without_history.map(|shape| shape.rows).max().unwrap_or(1);
    let knot = longest.max(2).next_power_of_two().ilog2() as usize;
    knot.min(ROW_KNOTS - 1)
}

/// Returns the factor of each unknown in the prediction of a sample, divided by the measured time.
/// The rises beyond the knot `reached` are not unknowns but multiples of the rise up to it.
fn relative_terms(&(shape, measured): &(StepShape, Nanos), reached: usize) -> Terms {
    let mut terms = shape.factors();
    for knot in reached + 1..ROW_KNOTS {
        let beyond = std::mem::take(&mut terms[knot]);
        terms[reached] += beyond * (1_u64 << (knot - reached)) as f64;
    }
    terms.map(|term| term / measured.max(1) as f64)
}

fn dot(a: &Terms, b: &Terms) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Returns the non-negative `x` that minimizes the weighted squares of `equation · x - 1`. Unknowns
/// that occur in no equation are 0.
fn least_squares(equations: &[Terms], weights: &[f64]) -> Terms {
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
    // Scale the unknowns so that the diagonal is 1.
    let scale: Terms = std::array::from_fn(|i| match normal[i][i] {
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

/// Solves with the active set method of Lawson and Hanson: unknowns enter one by one while that
/// brings a gain, and leave when they would become negative.
fn non_negative(normal: &[Terms; TERMS], right: &Terms) -> Terms {
    let mut found = [0.0; TERMS];
    let mut is_free = [false; TERMS];
    for _ in 0..3 * TERMS {
        let gain = |i: usize| right[i] - dot(&normal[i], &found);
        // Of equal ones the first: samples that do not tell tokens from keys are explained by
        // tokens.
        let best = (0..TERMS)
            .rev()
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

/// Solves for the free unknowns with Gaussian elimination. The other unknowns, and free unknowns
/// that depend on others, are 0.
fn solve(normal: &[Terms; TERMS], right: &Terms, is_free: &[bool; TERMS]) -> Terms {
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

#[cfg(test)]
mod tests {
    use sterna_random::Random;

    use super::*;
    use crate::cost::model::tests::random_model;

    /// Returns the steps that a calibration measures.
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
        for draw_time in [1_000_000, 20_000_000] {
            shapes.push(StepShape::decode(16).with_draws(draw_time));
        }
        shapes
    }

    #[test]
    fn a_fit_reproduces_exact_samples() {
        let mut random = Random::new(5);
        for _ in 0..200 {
            let model = random_model(&mut random);
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
    fn a_disturbed_sample_hardly_changes_the_fit() {
        let model = CostModel::UNMEASURED;
        let mut samples: Vec<_> = shapes().iter().map(|&s| (s, model.predict(s))).collect();
        let disturbed = samples.iter_mut().find(|(shape, _)| shape.rows == 64);
        disturbed.expect("64 tokens are measured").1 *= 3;
        let found = CostModel::fit(&samples);
        let longest = StepShape::chunk(0, 128, 0);
        let (found, expected) = (found.predict(longest), model.predict(longest));
        assert!(found <= expected * 21 / 10, "{found} instead of {expected}");
    }

    #[test]
    fn a_fit_tolerates_noise() {
        let mut random = Random::new(6);
        for _ in 0..200 {
            let model = random_model(&mut random);
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
    fn a_fit_continues_beyond_the_samples() {
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

    /// The samples have no step of many tokens except one of 16 tokens with a long history. The fit
    /// must not attribute all of its time to the history.
    #[test]
    fn a_fit_without_long_steps_predicts_that_they_take_longer() {
        let model = CostModel {
            rows: CostModel::roofline(12_000_000, 5_500_000),
            kilo_decode_keys: 2_200_000,
            kilo_chunk_keys: 2_000_000,
            head: 9_000_000,
            logit: 500_000,
            sampling: SAMPLING_UNIT,
        };
        let decodes = |count, len, logits| {
            let all = (0..count).fold(StepShape::default(), |all, _| {
                all.plus(StepShape::decode(len))
            });
            StepShape { logits, ..all }
        };
        let measured = [
            decodes(1, 1, 0),
            decodes(2, 1, 0),
            decodes(4, 1, 0),
            decodes(8, 1, 0),
            decodes(4, 1024, 0),
            StepShape::chunk(1008, 16, 0),
            decodes(1, 1, 1),
            decodes(4, 1, 4),
        ];
        let measured = measured.into_iter();
        let samples: Vec<_> = measured
            .map(|shape| (shape, model.predict(shape)))
            .collect();
        let found = CostModel::fit(&samples);
        for rows in [16, 64, 128, 300] {
            let shape = StepShape::chunk(0, rows, 0);
            let (found, expected) = (found.predict(shape), model.predict(shape));
            assert!(
                found.abs_diff(expected) < expected / 20,
                "{rows}: {found} instead of {expected}"
            );
        }
    }

    /// A single step has the same keys and logits as tokens, whatever the cost comes from.
    #[test]
    fn a_fit_to_one_step_explains_it_by_its_tokens() {
        let found = CostModel::fit(&[(StepShape::decode(1), 400_000_000)]);
        let [chunk, deep] = [StepShape::chunk(0, 512, 0), StepShape::decode(1000)];
        let [chunk, deep] = [chunk, deep].map(|shape| found.predict(shape));
        assert!(chunk >= 400_000_000 && deep < 800_000_000, "{found:?}");
    }

    #[test]
    fn a_fit_to_no_samples_is_zero_except_for_sampling() {
        let found = CostModel::fit(&[]);
        assert_eq!(found.rows, [0; ROW_KNOTS]);
        assert_eq!(
            found.sampling, SAMPLING_UNIT,
            "draws take what was measured"
        );
    }
}
