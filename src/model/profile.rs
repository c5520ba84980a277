//! The time that forward passes spend in each stage.
//!
//! It is always measured: the end of a stage costs one reading of the clock, about 25 ns.

use std::time::{Duration, Instant};

/// A kind of work in a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The work on single rows: embedding, norms, additions, quantization and placement.
    Rows,
    /// The products with the weights of the layers.
    Products,
    /// Rotation, the writes of keys and values, and attention.
    Attention,
    /// The output head, with the norm before it.
    Head,
}

impl Stage {
    /// All stages.
    pub const ALL: [Stage; 4] = [Stage::Rows, Stage::Products, Stage::Attention, Stage::Head];

    /// Returns the name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Rows => "rows",
            Stage::Products => "products",
            Stage::Attention => "attention",
            Stage::Head => "head",
        }
    }
}

/// The time spent in each stage since the model was loaded.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    spent: [Duration; Stage::ALL.len()], // By stage.
    stage_start: Instant,
}

impl Profile {
    pub(super) fn new() -> Profile {
        Profile {
            spent: Default::default(),
            stage_start: Instant::now(),
        }
    }

    /// Starts the first stage of a forward pass.
    pub(super) fn begin(&mut self) {
        self.stage_start = Instant::now();
    }

    /// Ends `stage`, and starts the next one.
    pub(super) fn end(&mut self, stage: Stage) {
        let now = Instant::now();
        self.spent[stage as usize] += now - self.stage_start;
        self.stage_start = now;
    }

    /// Returns the time spent in `stage`.
    pub fn spent(&self, stage: Stage) -> Duration {
        self.spent[stage as usize]
    }
}
