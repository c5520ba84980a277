//! Predicts how long steps take: the calibrated cost model at first, then what the steps teach.
//!
//! A prediction that is kept, such as the time of a waiting request, is kept as the time at the
//! calibration. Its present time follows what the steps teach meanwhile.

use super::learner::Learner;
use super::model::{CostModel, Nanos, StepShape};
use crate::Micros;
use crate::policy::PLANNED_THROUGHPUT_LOSS;

/// The cost model as calibrated and as learned since.
#[derive(Debug)]
pub(crate) struct Predictor {
    calibrated: CostModel,
    learner: Learner,
    model: CostModel,       // The learned one, with its margin.
    throughput_step: Nanos, // As calibrated.
    /// The mean slowdown of the last steps: the time with the margin, divided by the calibrated
    /// time.
    slowness: f64,
    steps_to_trust: u32, // How many more steps must teach before a sum of predictions counts.
}

impl Predictor {
    pub(crate) fn new(calibrated: CostModel) -> Predictor {
        Predictor {
            calibrated,
            learner: Learner::new(&calibrated),
            model: calibrated,
            throughput_step: throughput_step(&calibrated),
            slowness: 1.0,
            steps_to_trust: 0,
        }
    }

    /// As [`new`](Predictor::new). Other work disturbed the calibration, so the first steps have to
    /// teach how long steps take.
    pub(crate) fn unsure(calibrated: CostModel) -> Predictor {
        Predictor {
            steps_to_trust: STEPS_TO_TRUST,
            ..Predictor::new(calibrated)
        }
    }

    /// Returns whether nothing is known of how long steps take, except by a disturbed calibration.
    pub(crate) fn is_unsure(&self) -> bool {
        self.steps_to_trust > 0
    }

    /// Returns the model as calibrated.
    pub(crate) fn calibrated(&self) -> &CostModel {
        &self.calibrated
    }

    /// Returns the present time of what took `time` at the calibration.
    pub(crate) fn at_present(&self, time: Nanos) -> Nanos {
        (time as f64 * self.slowness) as Nanos
    }

    /// Returns the learned model, with its margin.
    pub(crate) fn model(&self) -> CostModel {
        self.model
    }

    /// Returns how long a step takes.
    pub(crate) fn predict(&self, step: StepShape) -> Nanos {
        self.model.predict(step)
    }

    /// Returns how long a step took when the machine was calibrated.
    pub(crate) fn predict_calibrated(&self, step: StepShape) -> Nanos {
        self.calibrated.predict(step)
    }

    /// Returns how long the last `uncached` of `len` prompt tokens take in a step of their own.
    pub(crate) fn prefill_time(&self, len: usize, uncached: usize) -> Nanos {
        self.model.prefill_time(len, uncached)
    }

    /// Returns the inter-token target that steps are planned for: `wanted`, or a longer one if the
    /// machine is too slow for it and the target is not strict.
    pub(crate) fn target(&self, wanted: Micros, is_strict: bool) -> Micros {
        if is_strict {
            wanted
        } else {
            wanted.max(self.throughput_step() / 1000)
        }
    }

    /// Returns how long a step must be allowed to take so that an inter-token target costs at most
    /// [`PLANNED_THROUGHPUT_LOSS`] of the tokens per second that the largest steps give. There is
    /// also time for two sequences.
    ///
    /// This is the calibrated value times the current slowdown. The learned model is not asked,
    /// because steps of about the same size tell little of the time of smaller or larger steps.
    pub(crate) fn throughput_step(&self) -> Nanos {
        (self.throughput_step as f64 * self.slowness) as Nanos
    }

    /// Returns the part of a budget that a step may be predicted to take: all of it, or less after
    /// a step that took much longer than predicted.
    pub(crate) fn cautious(&self, budget: Nanos) -> Nanos {
        (budget as f64 / self.learner.caution()) as Nanos
    }

    /// Returns the length of the longest chunk after `history` tokens, up to `limit`, with which
    /// `base` stays within `budget`. Returns 0 if one token does not fit. If the chunk needs
    /// logits, they are in `base`.
    pub(crate) fn largest_chunk(
        &self,
        budget: Nanos,
        base: StepShape,
        history: usize,
        limit: usize,
    ) -> usize {
        largest(limit, |tokens| {
            let chunk = StepShape::chunk(history, tokens, 0);
            self.model.predict(base.plus(chunk)) <= budget
        })
    }

    /// Divides the time of a step among its tokens and its rows of logits. Returns the cost of a
    /// row as a function of its shape: its tokens, its logits and its own attention. Its sampling
    /// beyond plain draws is not included.
    pub(crate) fn row_cost(&self, step: StepShape) -> impl Fn(StepShape) -> Nanos + '_ {
        let tokens_only = StepShape {
            rows: step.rows,
            ..StepShape::default()
        };
        let per_token = self.predict(tokens_only) / step.rows;
        let per_logits = (self.model.head + self.model.logit * step.logits) / step.logits.max(1);
        move |row| per_token * row.rows + per_logits * row.logits + self.model.keys(row)
    }

    /// Returns how much longer than a plain draw a draw takes now. At the measurement it took
    /// `draw_time` longer.
    pub(crate) fn draw_time(&self, draw_time: Nanos) -> Nanos {
        self.model.draw_time(draw_time)
    }

    /// Learns from a computed step and the pass that drafted before it, which took `actual`
    /// together.
    pub(crate) fn observe(&mut self, step: StepShape, drafting: StepShape, actual: Nanos) {
        self.learner.observe(step, drafting, actual);
        self.model = self.learner.model();
        let slowness =
            self.model.predict(step) as f64 / self.calibrated.predict(step).max(1) as f64;
        self.slowness += (slowness - self.slowness) / SLOWNESS_STEPS;
        self.steps_to_trust = self.steps_to_trust.saturating_sub(1);
    }
}

/// The number of steps over which the slowness is the mean. It outlasts a short disturbance.
const SLOWNESS_STEPS: f64 = 16.0;

/// The number of steps after which the slowness has nearly forgotten a disturbed calibration.
const STEPS_TO_TRUST: u32 = 48;

fn throughput_step(cost: &CostModel) -> Nanos {
    let two = cost.predict(StepShape::decode(1)) * 2;
    two.max(cost.efficient_step(100 - PLANNED_THROUGHPUT_LOSS))
}

/// Returns the largest number of `1..=limit` that fits, or 0 if 1 does not fit. No number may fit
/// if a smaller one does not.
fn largest(limit: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut fitting, mut left) = (0, limit);
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

#[cfg(test)]
mod tests {
    use sterna_random::Random;

    use super::*;
    use crate::cost::model::tests::random_model;

    #[test]
    fn the_largest_chunk_is_that_of_trying_all_sizes() {
        let mut random = Random::new(1);
        for _ in 0..2000 {
            let model = random_model(&mut random);
            let base = match random.below(3) {
                0 => StepShape::default(),
                decodes => (0..decodes * 5).fold(StepShape::default(), |shape, _| {
                    shape.plus(StepShape::decode(1 + random.below(4000) as usize))
                }),
            };
            let (history, limit) = (random.below(4000) as usize, random.below(300) as usize);
            let end = StepShape {
                logits: random.below(2),
                ..StepShape::default()
            }
            .with_draws(random.below(5_000_000));
            let base = base.plus(end);
            let cost = |tokens| model.predict(base.plus(StepShape::chunk(history, tokens, 0)));
            let budget = random.below(cost(400) + 1);
            let expected = (1..=limit).rev().find(|&tokens| cost(tokens) <= budget);
            assert_eq!(
                Predictor::new(model).largest_chunk(budget, base, history, limit),
                expected.unwrap_or(0),
                "{random:?} {model:?} {budget}"
            );
        }
    }
}
