//! How long a step will take.
//!
//! On a CPU a step streams all weights once, whatever the batch; from the knee on each row adds its own arithmetic:
//!
//! ```text
//! t(step) = step + max(weights, row · rows) + key · keys + [logits > 0] · head + logit · logits
//! ```
//!
//! `keys` counts the keys that each token looks at, over all tokens. Integers, in nanoseconds, so that equal inputs give
//! equal plans.

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

/// The coefficients, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostModel {
    /// Of any step.
    pub step: Nanos,
    /// Of streaming the weights.
    pub weights: Nanos,
    /// Of a token's products, once they outweigh the streaming.
    pub row: Nanos,
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
        step: 50_000,
        weights: 1_000_000,
        row: 100_000,
        kilo_decode_keys: 50_000,
        kilo_chunk_keys: 50_000,
        head: 500_000,
        logit: 50_000,
    };

    /// How long a step takes; nothing if it has no rows.
    pub fn predict(&self, shape: StepShape) -> Nanos {
        if shape.rows == 0 {
            return 0;
        }
        let head = if shape.logits > 0 { self.head } else { 0 };
        self.step
            + self.weights.max(self.row * shape.rows)
            + (self.kilo_decode_keys * shape.decode_keys + self.kilo_chunk_keys * shape.chunk_keys)
                / 1024
            + head
            + self.logit * shape.logits
    }

    /// The part of a step's time that grows with the keys its tokens look at.
    pub(crate) fn keys(&self, shape: StepShape) -> Nanos {
        (self.kilo_decode_keys * shape.decode_keys + self.kilo_chunk_keys * shape.chunk_keys) / 1024
    }

    /// TEMP
    pub(crate) fn largest_chunk(
        &self,
        budget: Nanos,
        base: StepShape,
        history: usize,
        most: usize,
        logits: usize,
    ) -> usize {
        let fits = |tokens: usize| {
            self.predict(base.plus(StepShape::chunk(history, tokens, logits))) <= budget
        };
        let (mut low, mut high) = (0, most);
        while low < high {
            let middle = (low + high).div_ceil(2);
            if fits(middle) {
                low = middle
            } else {
                high = middle - 1
            }
        }
        low
    }

    /// Tokens that a step may compute before each further one makes it longer.
    pub fn knee(&self) -> u64 {
        (self.weights / self.row.max(1)).max(1)
    }

    /// In microseconds, rounded up.
    pub fn predict_micros(&self, shape: StepShape) -> Micros {
        self.predict(shape).div_ceil(1000)
    }
}

/// TEMP
pub(crate) struct Correction(u64);
impl Default for Correction {
    fn default() -> Correction {
        Correction(1024)
    }
}
impl Correction {
    pub(crate) fn apply(&self, nanos: Nanos) -> Nanos {
        nanos * self.0 / 1024
    }
    pub(crate) fn unapply(&self, nanos: Nanos) -> Nanos {
        (u128::from(nanos) * 1024 / u128::from(self.0)).min(u128::from(u64::MAX)) as u64
    }
    pub(crate) fn observe(&mut self, _predicted: Nanos, _actual: Nanos) {}
}
