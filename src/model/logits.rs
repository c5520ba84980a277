//! What a step ends in: a row of logits for each token of the batch whose logits are wanted.

use sterna_kernels::{HugeSlice, Kernels, PANEL_ROWS};

use super::pool::Pool;

/// The logits of one step. Its memory is reused by the next.
pub struct Logits {
    vocab: usize,
    rows: usize,
    values: HugeSlice<f32>, // Panel-major: [panel of 32 tokens][row][32].
}

impl Logits {
    /// Room for `max_values` values, padded to whole panels; holds no row yet.
    pub(super) fn new(vocab: usize, max_values: usize) -> Logits {
        Logits {
            vocab,
            rows: 0,
            values: HugeSlice::new(max_values),
        }
    }

    /// Sets how many rows there are, and lends the memory to write them.
    pub(super) fn reset(&mut self, rows: usize) -> &mut [f32] {
        self.rows = rows;
        &mut self.values
    }

    /// How many rows there are.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Copies the logits of a row, one for each token id.
    ///
    /// # Panics
    /// If there is no such row, or `out` is not as long as the vocabulary.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "no row {row} of {}", self.rows);
        assert_eq!(out.len(), self.vocab, "one logit a token id");
        let panels = self.values.chunks_exact(self.rows * PANEL_ROWS);
        for (out, panel) in out.chunks_mut(PANEL_ROWS).zip(panels) {
            out.copy_from_slice(&panel[row * PANEL_ROWS..][..out.len()]);
        }
    }
}

/// The logits of a model's last step, and the model's threads to work on them.
pub struct StepLogits<'a> {
    pub(super) logits: &'a Logits,
    pub(super) kernels: Kernels,
    pub(super) pool: &'a mut Pool,
}

impl StepLogits<'_> {
    /// The logits.
    #[must_use]
    pub fn logits(&self) -> &Logits {
        self.logits
    }

    /// What the model computes with.
    #[must_use]
    pub fn kernels(&self) -> Kernels {
        self.kernels
    }

    /// How many threads there are, the caller included.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.pool.workers()
    }

    /// Hands each part, with the logits, to a thread of its own, and waits for all.
    ///
    /// # Panics
    /// If there are more parts than workers, or with the panic of a worker.
    pub fn run_parts<T: Send>(
        &mut self,
        parts: impl Iterator<Item = T>,
        work: impl Fn(T, &Logits) + Sync,
    ) {
        let logits = self.logits;
        self.pool.run_parts(parts, |_, part| work(part, logits));
    }
}
