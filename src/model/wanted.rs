//! Which logits a step wants.

use std::ops::Range;

use sterna_kernels::{DrawNoise, DrawScores, LogitScale};

/// The logits that a step wants. The step computes these logits, and may write lower numbers in
/// place of the others.
///
/// There is an entry for each token of the step that gets logits. No entry at all means that all
/// logits are wanted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WantedLogits {
    tokens: Vec<(Deciding, Range<usize>)>,
    changes: Vec<LogitChange>, // A token has those in its range.
}

/// The logits that decide what is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Deciding {
    /// As many of the largest, the first if logits are equal.
    Largest(u32),
    /// Those that decide a draw.
    Draw(WantedDraw),
}

/// A draw at a temperature above 0: of the tokens that all filters keep, the one with the largest
/// score. Each filter keeps the first tokens in the order of falling logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WantedDraw {
    /// The random numbers of the draw.
    pub noise: DrawNoise,
    /// The temperature.
    pub temperature: f32,
    /// Keeps this many tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps a token if those before it have less than this share of the weight of all. 1 keeps
    /// all; below 1, `top_k` must be 0.
    pub top_p: f32,
    /// Keeps tokens of at least this weight, at most 1; the first one has the weight 1.
    pub min_p: f32,
}

impl WantedDraw {
    /// Returns how the tokens are scored, given the largest logit.
    pub(super) fn scores(&self, largest: f32) -> DrawScores {
        DrawScores {
            scale: LogitScale::new(largest, self.temperature),
            noise: self.noise,
        }
    }
}

/// How a token's logit is changed before the draw. A greater logit never becomes the lower one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitChange {
    /// The token.
    pub token: u32,
    /// Is added first. −∞ forbids the token.
    pub bias: f32,
    /// Then divides a positive logit, or multiplies a negative one. Above 0.
    pub penalty: f32,
    /// Is subtracted at last.
    pub minus: f32,
}

impl LogitChange {
    /// Returns the changed logit.
    #[must_use]
    pub fn apply(self, logit: f32) -> f32 {
        let biased = logit + self.bias;
        let penalized = if biased > 0.0 {
            biased / self.penalty
        } else {
            biased * self.penalty
        };
        penalized - self.minus
    }
}

impl WantedLogits {
    /// Wants all logits. The result has memory for `changes` changes.
    #[must_use]
    pub fn with_capacity(changes: usize) -> WantedLogits {
        WantedLogits {
            tokens: Vec::new(),
            changes: Vec::with_capacity(changes),
        }
    }

    /// Wants all logits.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.changes.clear();
    }

    /// Wants what `other` wants, in the memory that is there.
    pub(super) fn copy(&mut self, other: &WantedLogits) {
        self.tokens.clone_from(&other.tokens);
        self.changes.clone_from(&other.changes);
    }

    /// Adds a token: which of its logits decide, after these changes. Each change is of another
    /// token of the vocabulary.
    pub fn push(&mut self, deciding: Deciding, changes: &[LogitChange]) {
        let begin = self.changes.len();
        self.changes.extend_from_slice(changes);
        let changes = begin..self.changes.len();
        self.tokens.push((deciding, changes));
    }

    /// Returns whether all logits are wanted.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns the number of all changes.
    pub(super) fn changes(&self) -> usize {
        self.changes.len()
    }

    /// Returns what is wanted of each token, and how its logits are changed before.
    #[must_use = "iterators are lazy"]
    pub fn tokens(&self) -> impl ExactSizeIterator<Item = (&Deciding, &[LogitChange])> {
        let tokens = self.tokens.iter();
        tokens.map(|(deciding, changes)| (deciding, &self.changes[changes.clone()]))
    }
}
