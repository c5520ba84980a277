//! How long steps truly take, what the scheduler should learn from it, and what it may plan in a given time.

use std::collections::BTreeMap;

use sterna_scheduler::{
    Batch, Budget, CostModel, Micros, Nanos, Policy, Row, SequenceId, StepShape,
};

use crate::model::{Client, Rng};
use crate::rules::{PREFILL_FLOOR, drafts_of};

/// What steps take, beside what they were predicted to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    AtOnce,
    AsPredicted,
    Around, // From half to one and a half times as long.
    Late,   // Two to six times as long.
    Early,  // A tenth.
}

/// A world's machine: its true pace, its cost model, and the factor that has been learnt.
pub(crate) struct Clock {
    pub(crate) pace: Pace,
    pub(crate) cost: CostModel,
    pub(crate) learnt: Learnt,
    pub(crate) planned_at: Micros,
}

/// As the scheduler's correction should be: it rises by nine parts in 256 for a step that took longer than predicted, falls
/// by one for any other, and stays between a quarter and four.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Learnt(u64);

impl Learnt {
    const UNIT: u64 = 1 << 16;

    pub(crate) fn nothing() -> Learnt {
        Learnt(Learnt::UNIT)
    }

    fn corrected(self, raw: Nanos) -> Nanos {
        raw * self.0 / Learnt::UNIT
    }

    pub(crate) fn learn(&mut self, raw: Nanos, took: Nanos) {
        let was_late =
            u128::from(took) * u128::from(Learnt::UNIT) > u128::from(raw) * u128::from(self.0);
        let part = self.0 / 256;
        let moved = if was_late {
            self.0 + 9 * part
        } else {
            self.0 - part
        };
        self.0 = moved.clamp(Learnt::UNIT / 4, Learnt::UNIT * 4);
    }

    /// Whether it says something else than the cost model.
    pub(crate) fn is_much(self) -> bool {
        self.0 < Learnt::UNIT * 3 / 4 || self.0 > Learnt::UNIT * 5 / 4
    }
}

impl Clock {
    pub(crate) fn random(rng: &mut Rng, cost: CostModel) -> Clock {
        let pace = *rng.pick(&[
            Pace::AtOnce,
            Pace::AtOnce,
            Pace::AsPredicted,
            Pace::Around,
            Pace::Late,
            Pace::Early,
        ]);
        Clock {
            pace,
            cost,
            learnt: Learnt::nothing(),
            planned_at: 0,
        }
    }

    /// What the step takes that was predicted to take so long.
    pub(crate) fn took(&self, rng: &mut Rng, predicted: Micros) -> Micros {
        match self.pace {
            Pace::AtOnce => 0,
            Pace::AsPredicted => predicted,
            Pace::Around => predicted * rng.between(50, 150) / 100,
            Pace::Late => predicted * rng.between(200, 600) / 100,
            Pace::Early => predicted / 10,
        }
    }

    pub(crate) fn predict(&self, shape: StepShape) -> Nanos {
        self.learnt.corrected(self.cost.predict(shape))
    }

    /// S1: a step is predicted to take what the cost model says times what was learnt, and no longer than its time budget;
    /// but every decode has its place in it, and if already that takes too long, at most one prompt has, of at most
    /// `PREFILL_FLOOR` tokens, and nothing is drafted.
    pub(crate) fn check_time(
        &self,
        policy: &Policy,
        batch: &Batch,
        (shape, predicted): (StepShape, Micros),
        clients: &BTreeMap<SequenceId, Client>,
    ) {
        let expected = self.predict(shape);
        assert_eq!(predicted, expected.div_ceil(1000), "S1: as was learnt");
        let rows = || batch.rows().iter();
        let is_decode = |row: &&Row| clients[&row.sequence].known() == row.start as usize + 1;
        let decodes = rows().filter(is_decode);
        // Of some it is not known when they were admitted again: now, at the latest.
        let had_last = |row: &Row| {
            clients[&row.sequence]
                .last_token_at
                .unwrap_or(self.planned_at)
        };
        let due = decodes.map(had_last);
        let Some(budget) = self.budget(policy, due.min()) else {
            return;
        };
        if expected > budget {
            let prompts: Vec<usize> = rows()
                .filter(|row| !is_decode(row))
                .map(|row| row.len())
                .collect();
            assert!(
                prompts.len() <= 1 && prompts.iter().all(|&tokens| tokens <= PREFILL_FLOOR),
                "S1: {expected} ns of {budget}, with prompts of {prompts:?} tokens"
            );
            let drafts: usize = rows().map(drafts_of).sum();
            assert_eq!(drafts, 0, "S1: {expected} ns of {budget}, with drafts");
        }
    }

    /// The time for a step, none of whose decodes had its last token before then.
    fn budget(&self, policy: &Policy, last_token_at: Option<Micros>) -> Option<Nanos> {
        let Budget::Time {
            inter_token_target,
            least,
            most,
        } = policy.budget
        else {
            return None;
        };
        let two_steps = self.predict(StepShape::decode(1)) * 2 / 1000;
        let slower = two_steps.saturating_sub(inter_token_target);
        let due = last_token_at.map_or(Micros::MAX, |at| at + inter_token_target + slower);
        let left = due.saturating_sub(self.planned_at);
        Some(left.clamp(least, most.max(least + slower)) * 1000)
    }
}
