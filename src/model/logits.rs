//! The logits of a step: one row for each token of the batch that gets logits.

use sterna_kernels::{HugeSlice, Kernels, PANEL_ROWS, prefetch};

use super::norm::Norm;
use super::pool::Pool;

/// How many panels ahead a row's logits are prefetched. With many rows, panels are far apart.
const PANELS_AHEAD: usize = 16;

/// The logits of one step. The next step reuses its memory.
pub struct Logits {
    vocab: usize,
    rows: usize,
    values: HugeSlice<f32>, // Panel-major: [panel of 32 tokens][row][32].
}

impl Logits {
    /// Allocates the memory for `max_values` values, padded to whole panels.
    pub(super) fn new(vocab: usize, max_values: usize) -> Logits {
        Logits {
            vocab,
            rows: 0,
            values: HugeSlice::new(max_values),
        }
    }

    /// Sets the number of rows, and returns the memory to write them.
    pub(super) fn reset(&mut self, rows: usize) -> &mut [f32] {
        self.rows = rows;
        &mut self.values
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Copies the logits of a row to `out`, one per token id. Without an output head they are 0.
    ///
    /// # Panics
    /// If the row does not exist, or `out` is not as long as the vocabulary.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "no row {row} of {}", self.rows);
        assert_eq!(out.len(), self.vocab, "one logit per token id");
        if self.values.is_empty() {
            return out.fill(0.0);
        }
        let panel_values = self.rows * PANEL_ROWS;
        let panels = self.values.chunks_exact(panel_values).enumerate();
        for (out, (index, panel)) in out.chunks_mut(PANEL_ROWS).zip(panels) {
            let ahead = (index + PANELS_AHEAD) * panel_values + row * PANEL_ROWS;
            if let Some(logits) = self.values.get(ahead..ahead + PANEL_ROWS) {
                prefetch(logits);
            }
            out.copy_from_slice(&panel[row * PANEL_ROWS..][..out.len()]);
        }
    }
}

/// The logits of a model's last step, and the model's threads to work on them.
pub struct StepLogits<'a> {
    pub(super) logits: &'a Logits,
    pub(super) kernels: Kernels,
    pub(super) pool: &'a mut Pool,
    pub(super) hidden: &'a [f32], // After the last layer, [token][width].
    pub(super) tokens: &'a [usize], // The tokens with logits.
    pub(super) norm: &'a Norm,
}

impl StepLogits<'_> {
    /// Returns the logits.
    pub fn logits(&self) -> &Logits {
        self.logits
    }

    /// Returns the width of a hidden state.
    pub fn state_width(&self) -> usize {
        self.norm.width()
    }

    /// Copies the hidden state after the last norm from which the logits of a row come.
    ///
    /// # Panics
    /// If the row does not exist, or `out` is not as long as a state.
    pub fn copy_state(&self, row: usize, out: &mut [f32]) {
        let width = self.norm.width();
        let state = &self.hidden[self.tokens[row] * width..][..width];
        self.norm.apply(self.kernels, state, out);
    }

    /// Returns the kernels of the model.
    pub fn kernels(&self) -> Kernels {
        self.kernels
    }

    /// Returns the number of threads, including the caller.
    pub fn workers(&self) -> usize {
        self.pool.workers()
    }

    /// Calls `work(part, logits)` for each part on a thread of its own, and waits for all.
    ///
    /// # Panics
    /// If there are more parts than threads, or with the panic of a thread.
    pub fn run_parts<T: Send>(
        &mut self,
        parts: impl Iterator<Item = T>,
        work: impl Fn(T, &Logits) + Sync,
    ) {
        let logits = self.logits;
        self.pool.run_parts(parts, |_, part| work(part, logits));
    }
}
