//! Where the time of a step goes.
//!
//! Always true: every moment of a step counts to one stage, the one that ends next.

use std::time::{Duration, Instant};

/// A kind of work in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Embeddings, norms, sums and quantization: all that is done to one token's row.
    Rows,
    /// Products with the weights of the layers.
    Products,
    /// Rotation, storing keys and values, attention.
    Attention,
    /// Products with the output head.
    Head,
}

impl Stage {
    /// All of them.
    pub const ALL: [Stage; 4] = [Stage::Rows, Stage::Products, Stage::Attention, Stage::Head];

    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Stage::Rows => "rows",
            Stage::Products => "products",
            Stage::Attention => "attention",
            Stage::Head => "head",
        }
    }
}

/// What each stage of the last step took.
#[derive(Clone, Copy, Debug)]
pub struct StageTimes {
    ended: Instant, // The last stage.
    spent: [Duration; Stage::ALL.len()],
}

impl StageTimes {
    /// A step begins.
    pub(super) fn start() -> StageTimes {
        StageTimes {
            ended: Instant::now(),
            spent: [Duration::ZERO; Stage::ALL.len()],
        }
    }

    /// A stage ends: what has passed since the one before is its.
    pub(super) fn end(&mut self, stage: Stage) {
        let now = Instant::now();
        self.spent[stage as usize] += now - self.ended;
        self.ended = now;
    }

    /// The time of a stage.
    #[must_use]
    pub fn of(&self, stage: Stage) -> Duration {
        self.spent[stage as usize]
    }
}
