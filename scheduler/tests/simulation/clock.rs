//! The true duration of steps, the factor that the scheduler should learn, and the time budget of
//! a step.

use std::collections::BTreeMap;

use sterna_random::Random;
use sterna_scheduler::{
    Batch, Budget, CostModel, Micros, Nanos, Policy, Row, SequenceId, StepShape,
};

use crate::model::Client;
use crate::rules::{PREFILL_FLOOR, drafts_of};

/// How the true duration of steps relates to the prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    Instant, // Steps take no time.
    AsPredicted,
    Noisy, // From half to one and a half times the prediction.
    Slow,  // Two to six times the prediction.
    Fast,  // A tenth of the prediction.
}

/// A world's machine: its true pace, its cost model, and the learned factor.
pub(crate) struct Clock {
    pub(crate) pace: Pace,
    pub(crate) cost: CostModel,
    pub(crate) factor: LearnedFactor,
    pub(crate) planned_at: Micros,
}

/// The expected correction of the scheduler: it rises by 9/256 after a step that took longer than
/// predicted, falls by 1/256 after any other step, and stays between 1/4 and 4.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LearnedFactor(u64);

impl LearnedFactor {
    const ONE: u64 = 1 << 16;

    pub(crate) fn one() -> LearnedFactor {
        LearnedFactor(LearnedFactor::ONE)
    }

    fn apply(self, raw: Nanos) -> Nanos {
        raw * self.0 / LearnedFactor::ONE
    }

    /// Learns from a step that the cost model predicts to take `raw`.
    pub(crate) fn learn(&mut self, raw: Nanos, actual: Nanos) {
        let was_late = u128::from(actual) * u128::from(LearnedFactor::ONE)
            > u128::from(raw) * u128::from(self.0);
        let part = self.0 / 256;
        let moved = if was_late {
            self.0 + 9 * part
        } else {
            self.0 - part
        };
        self.0 = moved.clamp(LearnedFactor::ONE / 4, LearnedFactor::ONE * 4);
    }

    /// Returns whether the factor is below 3/4 or above 5/4.
    pub(crate) fn is_far_from_one(self) -> bool {
        self.0 < LearnedFactor::ONE * 3 / 4 || self.0 > LearnedFactor::ONE * 5 / 4
    }
}

impl Clock {
    pub(crate) fn random(random: &mut Random, cost: CostModel) -> Clock {
        let pace = random.pick(&[
            Pace::Instant,
            Pace::Instant,
            Pace::AsPredicted,
            Pace::Noisy,
            Pace::Slow,
            Pace::Fast,
        ]);
        Clock {
            pace,
            cost,
            factor: LearnedFactor::one(),
            planned_at: 0,
        }
    }

    /// Returns the true duration of a step that was predicted to take `predicted`.
    pub(crate) fn duration(&self, random: &mut Random, predicted: Micros) -> Micros {
        match self.pace {
            Pace::Instant => 0,
            Pace::AsPredicted => predicted,
            Pace::Noisy => predicted * random.between(50, 150) / 100,
            Pace::Slow => predicted * random.between(200, 600) / 100,
            Pace::Fast => predicted / 10,
        }
    }

    /// Returns the prediction that the scheduler should make.
    pub(crate) fn predict(&self, shape: StepShape) -> Nanos {
        self.factor.apply(self.cost.predict(shape))
    }

    /// S1: A step's predicted time is the cost model's times the learned factor. It is within the
    /// time budget, or the step has at most one prompt chunk, which has at most `PREFILL_FLOOR`
    /// tokens, and no draft tokens.
    pub(crate) fn check_time(
        &self,
        policy: &Policy,
        batch: &Batch,
        (shape, predicted): (StepShape, Micros),
        clients: &BTreeMap<SequenceId, Client>,
    ) {
        let expected = self.predict(shape);
        assert_eq!(
            predicted,
            expected.div_ceil(1000),
            "S1: the prediction uses the learned factor"
        );
        let rows = || batch.rows().iter();
        let is_decode = |row: &&Row| clients[&row.sequence].known() == row.start as usize + 1;
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
            let chunks: Vec<usize> = rows()
                .filter(|row| !is_decode(row))
                .map(|row| row.len())
                .collect();
            assert!(
                chunks.len() <= 1 && chunks.iter().all(|&tokens| tokens <= PREFILL_FLOOR),
                "S1: {expected} ns exceed the budget of {budget} ns with chunks of {chunks:?}"
            );
            let drafts: usize = rows().map(drafts_of).sum();
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
        } = policy.budget
        else {
            return None;
        };
        let two_steps = self.predict(StepShape::decode(1)) * 2 / 1000;
        let excess = two_steps.saturating_sub(inter_token_target);
        let due = last_token_at.map_or(Micros::MAX, |at| at + inter_token_target + excess);
        let left = due.saturating_sub(self.planned_at);
        Some(left.clamp(min_step, max_step.max(min_step + excess)) * 1000)
    }
}
