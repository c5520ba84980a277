//! Where the time of forward passes goes, by stage.
//!
//! Always on: a border between two stages takes one reading of the clock, some 25 ns.

use std::time::{Duration, Instant};

/// A kind of work in a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// All that is done to one token's row: embedding, norms, sums, quantization; and finding the tokens' places.
    Rows,
    /// Products with the weights of the layers.
    Products,
    /// Rotation, storing keys and values, attention.
    Attention,
    /// The output head, with the norm before it.
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

/// Time spent in each stage since the model was loaded.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    spent: [Duration; Stage::ALL.len()], // By stage.
    border: Instant,
}

impl Profile {
    pub(super) fn new() -> Profile {
        Profile {
            spent: Default::default(),
            border: Instant::now(),
        }
    }

    /// A pass begins here.
    pub(super) fn begin(&mut self) {
        self.border = Instant::now();
    }

    /// What was done since the last border was `stage`.
    pub(super) fn end(&mut self, stage: Stage) {
        let now = Instant::now();
        self.spent[stage as usize] += now - self.border;
        self.border = now;
    }

    /// Time spent in `stage`.
    #[must_use]
    pub fn spent(&self, stage: Stage) -> Duration {
        self.spent[stage as usize]
    }
}
