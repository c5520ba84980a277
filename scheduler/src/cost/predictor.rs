//! Predicts how long steps take: the calibrated cost model, corrected by the steps so far.

use super::correction::Correction;
use super::model::{CostModel, Nanos, StepShape};
use crate::Micros;

/// A cost model and its correction.
#[derive(Debug)]
pub(crate) struct Predictor {
    model: CostModel,
    correction: Correction,
}

/// What each token and each row of logits of one step costs, attention excluded.
pub(crate) struct RowPrices {
    token: Nanos,
    logits: Nanos,
}

impl Predictor {
    pub(crate) fn new(model: CostModel) -> Predictor {
        Predictor {
            model,
            correction: Correction::default(),
        }
    }

    /// Returns how long a step takes.
    pub(crate) fn predict(&self, step: StepShape) -> Nanos {
        self.correction.apply(self.model.predict(step))
    }

    /// Returns how long a step took when the machine was calibrated.
    pub(crate) fn predict_uncorrected(&self, step: StepShape) -> Nanos {
        self.model.predict(step)
    }

    /// Returns how long the last `uncached` of `len` prompt tokens take in a step of their own.
    pub(crate) fn prefill_time(&self, len: usize, uncached: usize) -> Nanos {
        self.predict(StepShape::chunk(len - uncached, uncached, 1))
    }

    /// Returns the inter-token target that this machine can keep: `wanted`, or the time of two
    /// single decodes if that is longer. A shorter target would forbid any batch.
    pub(crate) fn achievable_target(&self, wanted: Micros) -> Micros {
        wanted.max(self.predict(StepShape::decode(1)) * 2 / 1000)
    }

    /// Returns the length of the longest chunk after `history` tokens, up to `limit`, with which
    /// `base` stays within `budget`.
    pub(crate) fn largest_chunk(
        &self,
        budget: Nanos,
        base: StepShape,
        history: usize,
        limit: usize,
        logits: usize,
    ) -> usize {
        let budget = self.correction.unapply(budget);
        self.model
            .largest_chunk(budget, base, history, limit, logits)
    }

    /// Divides the time of a step among its tokens and its rows of logits.
    pub(crate) fn row_prices(&self, step: StepShape) -> RowPrices {
        let tokens_only = StepShape {
            rows: step.rows,
            ..StepShape::default()
        };
        let logits_only = self.model.head + self.model.logit * step.logits;
        RowPrices {
            token: self.predict(tokens_only) / step.rows,
            logits: self.correction.apply(logits_only) / step.logits.max(1),
        }
    }

    /// Returns what one row of a step costs: its tokens, its logits and its own attention.
    pub(crate) fn row_cost(&self, prices: &RowPrices, row: StepShape) -> Nanos {
        let attention = self.correction.apply(self.model.keys(row));
        prices.token * row.rows + prices.logits * row.logits + attention
    }

    /// Learns from a computed step.
    pub(crate) fn observe(&mut self, step: StepShape, actual: Nanos) {
        let predicted = self.model.predict(step);
        self.correction.observe(predicted, actual);
    }
}
