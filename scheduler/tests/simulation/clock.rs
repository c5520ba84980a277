//! The true duration of steps, what the scheduler should learn from it, and the time budget of a
//! step.

use std::collections::{BTreeMap, VecDeque};

use sterna_random::Random;
use sterna_scheduler::{
    Budget, CostModel, Micros, Nanos, Policy, Row, SequenceId, Step, StepShape,
};

use crate::model::Client;
use crate::rules::{PREFILL_FLOOR, drafts_of};

/// How the true duration of steps relates to the calibration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    Instant, // Steps take no time.
    AsCalibrated,
    Noisy, // From half to one and a half times the calibrated time.
    Slow,  // Three to four times the calibrated time.
    Fast,  // A tenth of the calibrated time.
}

/// A world's machine: its true pace, its calibrated cost model, and the predictions of late.
pub(crate) struct Clock {
    pub(crate) pace: Pace,
    pub(crate) cost: CostModel,
    pub(crate) planned_at: Micros,
    recent: VecDeque<(Micros, Micros)>, // The predicted and the true duration of steps.
    steps: u64,                         // Since the calibration.
    steps_off: usize,                   // The last ones after which predictions were not true.
    learned_from: Option<StepShape>,    // The last step, until the next plan.
    slowness: f64, // The learned times of steps, as multiples of the calibrated ones.
}

/// The number of steps after which predictions must be about true, and over which they are summed.
const LEARNING_STEPS: usize = 60;

impl Clock {
    pub(crate) fn random(random: &mut Random, cost: CostModel) -> Clock {
        let pace = random.pick(&[
            Pace::Instant,
            Pace::Instant,
            Pace::AsCalibrated,
            Pace::Noisy,
            Pace::Slow,
            Pace::Fast,
        ]);
        Clock {
            pace,
            cost,
            planned_at: 0,
            recent: VecDeque::new(),
            steps: 0,
            steps_off: 0,
            learned_from: None,
            slowness: 1.0,
        }
    }

    /// Begins again with another calibration.
    pub(crate) fn calibrate(&mut self, cost: CostModel) {
        self.cost = cost;
        self.recent.clear();
        self.steps = 0;
        self.steps_off = 0;
        self.learned_from = None;
        self.slowness = 1.0;
    }

    /// Returns the true duration of a step, and of the pass that drafts before it.
    pub(crate) fn duration(
        &self,
        random: &mut Random,
        shape: StepShape,
        drafting: StepShape,
    ) -> Micros {
        let calibrated = self.cost.predict(shape) + self.cost.predict(drafting);
        let calibrated = calibrated.div_ceil(1000);
        match self.pace {
            Pace::Instant => 0,
            Pace::AsCalibrated => calibrated,
            Pace::Noisy => calibrated * random.between(50, 150) / 100,
            Pace::Slow => calibrated * random.between(300, 400) / 100,
            Pace::Fast => calibrated / 10,
        }
    }

    /// S1: After some steps, predictions are about true. Steps of one size tell little of how their
    /// time divides into terms, so steps of another size can be predicted wrong. The learner must
    /// correct that soon. Returns whether the step's prediction is far from its calibrated time.
    pub(crate) fn learn(&mut self, shape: StepShape, predicted: Micros, actual: Micros) -> bool {
        self.steps += 1;
        self.learned_from = Some(shape);
        self.recent.push_back((predicted, actual));
        if self.recent.len() > LEARNING_STEPS {
            self.recent.pop_front();
        }
        if self.steps >= 2 * LEARNING_STEPS as u64 && self.pace != Pace::Instant {
            let sum = |part: fn(&(Micros, Micros)) -> Micros| -> Micros {
                self.recent.iter().map(part).sum()
            };
            let (predicted, actual) = (sum(|step| step.0), sum(|step| step.1));
            let rounding = self.recent.len() as Micros;
            // On a noisy machine, predictions have the learner's margin, at most 1.6.
            let tenths = if self.pace == Pace::Noisy { 32 } else { 20 };
            let are_true = 10 * predicted <= tenths * (actual + rounding)
                && actual <= 2 * predicted + rounding;
            self.steps_off = if are_true { 0 } else { self.steps_off + 1 };
            assert!(
                self.steps_off <= 2 * LEARNING_STEPS,
                "S1: {predicted} µs were predicted for steps of {actual} µs: {:?}",
                self.recent
            );
        }
        let calibrated = self.cost.predict(shape) / 1000;
        predicted > calibrated * 5 / 4 || predicted < calibrated * 3 / 4
    }

    /// S1: A step's predicted time comes from the cost model that the scheduler has learned. It is
    /// within the time budget, or the step has at most one prompt chunk, which has at most
    /// `PREFILL_FLOOR` tokens or is a block, and no draft tokens.
    pub(crate) fn check_time(
        &mut self,
        policy: &Policy,
        step: &Step<'_>,
        clients: &BTreeMap<SequenceId, Client>,
    ) {
        let (batch, cost) = (step.batch(), step.cost());
        if let Some(shape) = self.learned_from.take() {
            let [learned, calibrated] = [&cost, &self.cost].map(|cost| cost.predict(shape) as f64);
            self.slowness += (learned / calibrated.max(1.0) - self.slowness) / 16.0;
        }
        let expected = cost.predict(step.shape()) + cost.predict(step.drafting());
        assert_eq!(
            step.predicted(),
            expected.div_ceil(1000),
            "S1: the prediction uses the learned costs"
        );
        let rows = || batch.rows().iter();
        let is_decode = |row: &&Row| {
            let client = &clients[&row.sequence];
            client.rules.is_none() && client.known() == row.start as usize + 1
        };
        let floor = |row: &Row| PREFILL_FLOOR.max(clients[&row.sequence].block());
        let decodes = rows().filter(is_decode);
        // The time of a second admission is unknown; it is now at the latest.
        let last_token_at = |row: &Row| {
            clients[&row.sequence]
                .last_token_at
                .unwrap_or(self.planned_at)
        };
        let earliest = decodes.map(last_token_at).min();
        let Some(budget) = self.budget(policy, earliest) else {
            return;
        };
        if expected > budget {
            let chunks: Vec<&Row> = rows().filter(|row| !is_decode(row)).collect();
            assert!(
                chunks.len() <= 1 && chunks.iter().all(|row| row.len() <= floor(row)),
                "S1: {expected} ns exceed the budget of {budget} ns with chunks of {chunks:?}"
            );
            let drafts: usize = rows().map(|row| drafts_of(row, clients)).sum();
            assert_eq!(
                drafts, 0,
                "S1: {expected} ns exceed the budget of {budget} ns with drafts"
            );
        }
    }

    /// Returns the time budget of a step, or `None` if the policy has none. Every decode of the
    /// step got its last token at `last_token_at` or later.
    fn budget(&self, policy: &Policy, last_token_at: Option<Micros>) -> Option<Nanos> {
        let Budget::Time {
            inter_token_target,
            min_step,
            max_step,
            is_strict,
        } = policy.budget
        else {
            return None;
        };
        let least = if is_strict {
            0
        } else {
            (least_target(&self.cost) as f64 * self.slowness) as Nanos / 1000
        };
        let target = inter_token_target.max(least);
        let due = last_token_at.map_or(Micros::MAX, |at| at + target);
        let left = due.saturating_sub(self.planned_at);
        let longest = max_step + target - inter_token_target;
        Some(left.clamp(min_step, longest) * 1000)
    }
}

/// Returns the shortest target that is not strict on a machine as calibrated: the time of two
/// single decodes, or of the smallest step that computes, as all larger ones do, 85 % as many
/// tokens per second as a step of 128 tokens.
fn least_target(cost: &CostModel) -> Nanos {
    let time = |rows| {
        let shape = StepShape {
            rows,
            logits: 1,
            ..StepShape::default()
        };
        u128::from(cost.predict(shape))
    };
    let is_slow = |&rows: &u64| 100 * u128::from(rows) * time(128) < 85 * 128 * time(rows);
    let smallest = (1..128).rev().find(is_slow).map_or(1, |rows| rows + 1);
    let two = cost.predict(StepShape::decode(1)) * 2;
    two.max(time(smallest) as Nanos)
}
