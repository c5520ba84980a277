//! Learns from the steps so far what steps take now: the scale of each term of the cost model.
//!
//! The learner is a Kalman filter (Kalman, 1960). Its state is the scale of each term, relative to
//! the calibration. Its measurement is the relative error of a step's prediction. The scales are
//! expected to change mostly together, as when the machine becomes slower, and a little on their
//! own, as when only the machine's memory becomes slower. So a few steps of one shape also correct
//! the predictions of other shapes. What steps do not determine returns slowly to the calibrated
//! proportions.
//!
//! ```text
//! observe(shape, actual):                                # a pass that drafts adds its factors
//!     time[i]   = unit[i] · factor[i](shape)             # the time of term i at scale 1
//!     predicted = Σ time[i] · scale[i]
//!     part[i]   = time[i] · max(scale[i], LEAST_SCALE) / predicted
//!     error     = actual / predicted − 1
//!     learn the margin from actual / predicted
//!     if actual is within 1.25 times predicted, either way:
//!         forget the outliers so far: in a row, and among steps of this size
//!         update(error), and the variances too
//!     else if outliers persist on one side, in a row or among steps of this size:
//!         error = the least of these outliers
//!         widen the variances by error², so that the update takes in about all of it
//!         update(error), and the variances too
//!     else:
//!         update(error, but at most 0.1 either way), the scales only
//!     move each scale by 1/256 towards the calibrated proportions
//!     limit the rises of `rows`: twice the tokens take at most twice the time
//!     excess  = actual / (Σ time[i] · scale[i] · margin) # with the new scales and margin
//!     caution = 1 if excess is at most 1.1, else excess, but at most 4
//!
//! update(error):                                         # P: the covariance of the scales' errors
//!     gain     = P · part
//!     variance = part · gain + the variance of a step
//!     scale[i] = scale[i] + max(scale[i], LEAST_SCALE) · max(error · gain[i] / variance, −0.9)
//!     P        = P − gain · gainᵀ / variance + the drift of all together and of each
//! ```
//!
//! Outliers in a row widen mostly the variance of all scales together; outliers of one size widen
//! the variance of each scale on its own. A scale has limits, and a scale with a variance of
//! `MAX_VARIANCE` has no drift. The learned model has the coefficients unit · scale · margin.
//!
//! One factor for the whole model, which fell by 1/256 a step, was tried before and rejected. After
//! a calibration on a busy machine, the factor took minutes to fall, and 16 clients got a quarter
//! of their tokens per second meanwhile.
//!
//! Invariant: an observation takes the same memory and about the same time as any other, and
//! allocates nothing. Equal observations give equal models on every machine: only sums, products
//! and quotients of floating-point numbers occur, in a fixed order.

use super::model::ROW_KNOTS;
use super::terms::{SAMPLING_TERM, TERMS, Terms};
use crate::{CostModel, Nanos, StepShape};

/// A term's scale stays between the inverse of this number and this number.
const MAX_SCALE: f64 = 16.0;

/// The least unit of a coefficient, as a part of a step of one token: of the rises of `rows`, and
/// of the linear terms. So a term that costs nothing in the calibration can still be learned.
/// Sampling needs no least unit: its coefficient is near [`crate::SAMPLING_UNIT`], never zero.
const LEAST_UNITS: [f64; 2] = [1.0 / 128.0, 1.0 / 32.0];

/// The least scale at the calibration. A smaller scale also changes as much as this one, because
/// its part of a step is so small that it would hardly grow.
const LEAST_SCALE: f64 = 0.25;

/// The variance of a step's relative error on a machine whose speed does not change.
const STEP_VARIANCE: f64 = 0.08 * 0.08;

/// The variance by which all scales together change from step to step.
const SHARED_DRIFT: f64 = 1e-4;

/// The variance by which each scale changes on its own.
const OWN_DRIFT: f64 = 3e-5;

/// The variance of all scales together, and of each on its own, at the calibration.
const INITIAL_VARIANCE: [f64; 2] = [0.2 * 0.2, 0.15 * 0.15];

/// The variance of a scale at which it no longer grows by drift. Without this limit, a term that
/// occurs seldom would follow its next sample alone.
const MAX_VARIANCE: f64 = 0.5 * 0.5;

/// The ratio of times, or its inverse, beyond which a step is an outlier.
const OUTLIER: f64 = 1.25;

/// The relative error as which an outlier counts until outliers persist.
const OUTLIER_ERROR: f64 = 0.1;

/// Outliers persist after this many in a row on one side.
const PERSISTENT_STEPS: u32 = 4;
/// Outliers also persist after two or more in a row on one side that took this time together.
const PERSISTENT_TIME: Nanos = 800_000_000;

/// The part of a term's deviation from the proportions of the calibration that each step restores.
const RESTORED: f64 = 1.0 / 256.0;

/// The greatest margin over the learned times.
const MAX_MARGIN: f64 = 1.6;

/// One step in 200 may take more than this many times its prediction.
const RARE_EXCESS: f64 = 1.25;

/// A disturbance counts once if it lasts at most this many steps.
const DISTURBANCE_STEPS: u32 = 16;

/// A step that takes more than the first of these times its prediction calls for caution. The
/// second is the greatest caution.
const CAUTION: [f64; 2] = [1.1, 4.0];

/// The learned scales and how sure they are.
#[derive(Debug)]
pub(super) struct Learner {
    units: Terms, // The nanoseconds of each coefficient at scale 1.
    scales: Terms,
    first_scales: Terms,        // At the calibration.
    covariance: [Terms; TERMS], // Of the relative errors of the scales.
    /// By the knot of `CostModel::rows` below the step's tokens: the last outliers. So steps of
    /// another size do not hide that steps of one size persist in taking longer.
    runs: [OutlierRun; ROW_KNOTS],
    run_of_all: OutlierRun,
    usual_margin: f64, // Nine steps in ten are within this margin.
    rare_margin: f64,  // 199 steps in 200 are within this margin times `RARE_EXCESS`.
    since_rare: u32,   // Steps since the last one that raised the rare margin.
    caution: f64,
}

/// Consecutive outliers on one side of the prediction.
#[derive(Clone, Copy, Debug, Default)]
struct OutlierRun {
    steps: u32,
    time: Nanos,
    error: f64, // The least relative error of the outliers, with its sign.
}

/// What changed when outliers persist.
enum Change {
    AllTerms,
    SomeTerms,
}

impl Learner {
    pub(super) fn new(calibrated: &CostModel) -> Learner {
        let coefficients = calibrated.coefficients();
        let least = LEAST_UNITS.map(|part| (coefficients[0] * part).max(1.0));
        let units: Terms = std::array::from_fn(|term| {
            let least = match term {
                ..ROW_KNOTS => least[0],
                SAMPLING_TERM => 1.0,
                _ => least[1],
            };
            coefficients[term].max(least)
        });
        let scale = |term: usize| (coefficients[term] / units[term]).max(LEAST_SCALE);
        let scales = std::array::from_fn(scale);
        let [shared, own] = INITIAL_VARIANCE;
        let mut covariance = [[shared; TERMS]; TERMS];
        for (term, row) in covariance.iter_mut().enumerate() {
            row[term] += own;
        }
        Learner {
            scales,
            first_scales: scales,
            units,
            covariance,
            runs: [OutlierRun::default(); ROW_KNOTS],
            run_of_all: OutlierRun::default(),
            usual_margin: 1.0,
            rare_margin: 1.0,
            since_rare: 0,
            caution: 1.0,
        }
    }

    /// Learns from a step of at least one token, and the pass that drafted before it if that has
    /// tokens, which took `actual` together.
    pub(super) fn observe(&mut self, shape: StepShape, drafting: StepShape, actual: Nanos) {
        let mut parts = shape.factors();
        if drafting.rows > 0 {
            let of_drafting = drafting.factors();
            for (part, further) in parts.iter_mut().zip(&of_drafting) {
                *part += further;
            }
        }
        for (part, unit) in parts.iter_mut().zip(&self.units) {
            *part *= unit;
        }
        let (times, actual_time) = (parts, actual as f64);
        let predicted = dot(&times, &self.scales);
        for (part, scale) in parts.iter_mut().zip(&self.scales) {
            *part *= scale.max(LEAST_SCALE) / predicted;
        }
        let ratio = actual_time / predicted;
        self.learn_margin(ratio);
        let error = ratio - 1.0;
        if !is_outlier(ratio) {
            self.forget_outliers(shape);
            self.update(&parts, error, true);
        } else if let Some((error, change)) = self.persistent_error(shape, error, actual) {
            self.expect_change(error, &change);
            self.update(&parts, error, true);
        } else {
            let error = error.clamp(-OUTLIER_ERROR, OUTLIER_ERROR);
            self.update(&parts, error, false);
        }
        self.restore_proportions(&times);
        self.limit_rises();
        let [least, most] = CAUTION;
        let excess = actual_time / (dot(&times, &self.scales) * self.margin());
        self.caution = if excess > least {
            excess.min(most)
        } else {
            1.0
        };
    }

    /// Returns the learned model with its margin.
    pub(super) fn model(&self) -> CostModel {
        let margin = self.margin();
        let coefficient = |term| self.units[term] * self.scales[term] * margin;
        CostModel::with_coefficients(&std::array::from_fn(coefficient))
    }

    /// Returns how many times its prediction the next step may take, because the last one did:
    /// other work that makes a step longer seldom ends with it.
    pub(super) fn caution(&self) -> f64 {
        self.caution
    }

    fn margin(&self) -> f64 {
        self.usual_margin.max(self.rare_margin)
    }

    /// Learns the margin, so that steps rarely exceed their budget: about the 90th percentile of
    /// the ratio of a step's time to its learned time, or more if one step in 200 exceeds this
    /// percentile by far. A ratio above the margin raises the margin 9 times as much as a ratio
    /// below lowers it, so the margin settles where one ratio in ten is above. A disturbance counts
    /// once, so that a bad moment leaves no trace.
    fn learn_margin(&mut self, ratio: f64) {
        let change = if ratio > self.usual_margin { 9.0 } else { -1.0 };
        let margin = self.usual_margin * (1.0 + change / 256.0);
        self.usual_margin = margin.clamp(1.0, MAX_MARGIN);
        let is_rare = ratio > self.rare_margin * self.caution * RARE_EXCESS;
        self.since_rare = self.since_rare.saturating_add(1);
        let counts = is_rare && self.since_rare > DISTURBANCE_STEPS;
        if counts {
            self.since_rare = 0;
        }
        let change = if counts { 199.0 } else { -1.0 };
        let margin = self.rare_margin * (1.0 + change / 1024.0);
        self.rare_margin = margin.clamp(1.0, MAX_MARGIN);
    }

    /// Moves the scales a little towards the proportions of the calibration, without a change of
    /// the prediction of a step with these `times` at scale 1. Steps of about the same size tell
    /// little of how their time divides into terms. Without this method, the noise of such steps
    /// would add up in the proportions.
    fn restore_proportions(&mut self, times: &Terms) {
        let speed = dot(times, &self.scales) / dot(times, &self.first_scales);
        for (scale, first) in self.scales.iter_mut().zip(&self.first_scales) {
            let calibrated = (speed * first).clamp(1.0 / MAX_SCALE, MAX_SCALE);
            *scale += (calibrated - *scale) * RESTORED;
        }
    }

    /// Keeps `rows` from more than doubling between knots, because twice the tokens never take more
    /// than two steps. Steps of about the same size tell little of how their time divides into what
    /// they do once and what each token takes.
    fn limit_rises(&mut self) {
        let mut rows = self.units[0] * self.scales[0];
        for (scale, unit) in self
            .scales
            .iter_mut()
            .zip(&self.units)
            .take(ROW_KNOTS)
            .skip(1)
        {
            *scale = scale.min(rows / unit);
            rows += unit * *scale;
        }
    }

    fn forget_outliers(&mut self, shape: StepShape) {
        self.run_of_all = OutlierRun::default();
        self.runs[class(shape)] = OutlierRun::default();
    }

    /// Notes an outlier. If outliers persist, returns the least error of them.
    fn persistent_error(
        &mut self,
        shape: StepShape,
        error: f64,
        actual: Nanos,
    ) -> Option<(f64, Change)> {
        let of_all = self.run_of_all.note(error, actual);
        let of_class = self.runs[class(shape)].note(error, actual);
        if let Some(error) = of_all {
            self.runs = [OutlierRun::default(); ROW_KNOTS];
            return Some((error, Change::AllTerms));
        }
        let error = of_class?;
        self.run_of_all = OutlierRun::default();
        Some((error, Change::SomeTerms))
    }

    /// Widens the variances, so that the next update takes in about the whole `error`.
    fn expect_change(&mut self, error: f64, change: &Change) {
        let variance = error * error;
        let [shared, own] = match change {
            Change::AllTerms => [0.9 * variance, 0.1 * variance],
            Change::SomeTerms => [0.0, variance],
        };
        for (term, row) in self.covariance.iter_mut().enumerate() {
            for cell in row.iter_mut() {
                *cell += shared;
            }
            row[term] += own;
        }
    }

    /// Moves the scales by their parts in the error of a step. An update that is not `certain`
    /// leaves the variances as they are.
    fn update(&mut self, parts: &Terms, error: f64, certain: bool) {
        let gains = self.covariance.each_ref().map(|row| dot(row, parts));
        let variance = dot(&gains, parts) + STEP_VARIANCE;
        for (scale, gain) in self.scales.iter_mut().zip(&gains) {
            let change = (gain / variance * error).max(-0.9);
            let changed = *scale + scale.max(LEAST_SCALE) * change;
            *scale = changed.clamp(1.0 / MAX_SCALE, MAX_SCALE);
        }
        if !certain {
            return;
        }
        let grows = |term: usize| self.covariance[term][term] < MAX_VARIANCE;
        let drifts: Terms = std::array::from_fn(|term| if grows(term) { 1.0 } else { 0.0 });
        let inverse = 1.0 / variance;
        for (term, row) in self.covariance.iter_mut().enumerate() {
            let (gain, drift) = (gains[term] * inverse, drifts[term] * SHARED_DRIFT);
            for (other, cell) in row.iter_mut().enumerate() {
                *cell += drift * drifts[other] - gain * gains[other];
            }
            row[term] = (row[term] + drifts[term] * OWN_DRIFT).max(OWN_DRIFT);
        }
    }
}

impl OutlierRun {
    /// Adds an outlier. If the outliers persist, ends the run and returns the least error of them.
    fn note(&mut self, error: f64, actual: Nanos) -> Option<f64> {
        if self.error * error < 0.0 {
            *self = OutlierRun::default();
        }
        let is_first = self.steps == 0;
        self.steps += 1;
        self.time = self.time.saturating_add(actual);
        if is_first || error.abs() < self.error.abs() {
            self.error = error;
        }
        let is_long = self.steps >= 2 && self.time >= PERSISTENT_TIME;
        if self.steps >= PERSISTENT_STEPS || is_long {
            return Some(std::mem::take(self).error);
        }
        None
    }
}

fn is_outlier(ratio: f64) -> bool {
    !(1.0 / OUTLIER..=OUTLIER).contains(&ratio)
}

/// Returns the class of steps with about as many tokens as this one.
fn class(shape: StepShape) -> usize {
    (shape.rows.max(1).ilog2() as usize).min(ROW_KNOTS - 1)
}

fn dot(a: &Terms, b: &Terms) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests;
