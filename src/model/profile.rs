//! Where the time of forward passes goes, by stage.
//!
//! Always on: a border between two stages takes one reading of the clock, some 25 ns.

use std::time::{Duration, Instant};

/// A part of a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Embedding the tokens, finding their places, copying pages.
    Embedding,
    /// All layers.
    Layers,
    /// The output head, with the norm before it.
    Head,
}

impl Stage {
    /// All, in the order of a pass.
    pub const ALL: [Stage; 3] = [Stage::Embedding, Stage::Layers, Stage::Head];

    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Stage::Embedding => "embedding",
            Stage::Layers => "layers",
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
