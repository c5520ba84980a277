//! The engine's view of a model: a step's batch in, rows of logits out.
//!
//! Tests wrap a model to make it fail.

use std::io;

use sterna_kernels::Kernels;
use sterna_scheduler::{Batch, Limits};

use crate::model::{ExpertUse, KvStore, Model, StepLogits, WantedLogits};

/// A model that can run a step.
pub trait Forward: Send {
    /// The memory of keys and values, indexed by page.
    type KvStore: Send + 'static;

    /// Returns the number of logits in a row.
    fn vocabulary(&self) -> usize;

    /// Returns whether the model keeps a state for each sequence, beside keys and values.
    fn has_states(&self) -> bool {
        false
    }

    /// Returns how the model has used its experts. Without experts, all is 0.
    fn expert_use(&self) -> ExpertUse {
        ExpertUse::default()
    }

    /// Reserves memory for the pages and the slabs of `limits`, and takes some of it. The engine
    /// calls this once, before it takes requests.
    ///
    /// # Errors
    /// If the system does not have enough memory.
    fn new_kv_store(&self, limits: &Limits) -> io::Result<Self::KvStore>;

    /// Takes the next part of the reserved memory, in some milliseconds, whatever requests have
    /// written. Returns whether there is more to take. The engine calls this while it is idle.
    ///
    /// # Errors
    /// If the system does not have the memory. Then the engine takes no more in advance.
    fn take_memory(&self, _kv_store: &mut Self::KvStore) -> io::Result<bool> {
        Ok(false)
    }

    /// Does the next part of the work that makes later steps faster, in some milliseconds.
    /// Returns whether there is more to do. The engine calls this while it is idle.
    fn prepare(&mut self) -> bool {
        false
    }

    /// Returns the most rows of logits of a step that may compute only wanted logits. The engine
    /// calls [`want_logits`](Self::want_logits) before such a step.
    fn max_wanted_rows(&self) -> usize {
        0
    }

    /// Says which logits of each row the next step wants. The other logits may be lower then.
    fn want_logits(&mut self, _wanted: &WantedLogits) {}

    /// Makes the batch's page copies, then computes its rows. The result has one row of logits for
    /// each token whose logits are wanted, in the order of the batch's rows and of their tokens.
    fn forward(&mut self, batch: &Batch, kv_store: &mut Self::KvStore) -> impl LogitRows;
}

/// The logits of one step.
pub trait LogitRows {
    /// Copies row `row` into `logits`, which has one place for each token of the vocabulary.
    fn copy_row(&self, row: usize, logits: &mut [f32]);

    /// Returns the width of a hidden state; 0 if the model gives none.
    fn state_width(&self) -> usize {
        0
    }

    /// Copies the hidden state that row `row` comes from into `state`, which has its width.
    fn copy_state(&self, _row: usize, state: &mut [f32]) {
        assert!(state.is_empty(), "a model with states copies them");
    }

    /// Returns the kernels to process the rows with.
    fn kernels(&self) -> Kernels {
        Kernels::best()
    }

    /// Returns how many threads can process rows at the same time.
    fn workers(&self) -> usize {
        1
    }

    /// Calls `work` once for each of `parts`, with [`copy_row`](Self::copy_row) as its second
    /// argument. With several `workers`, each call runs on its own thread.
    fn share<T: Send>(
        &mut self,
        parts: impl Iterator<Item = T>,
        work: impl Fn(T, &CopyRow<'_>) + Sync,
    ) {
        for part in parts {
            work(part, &|row, logits: &mut [f32]| self.copy_row(row, logits));
        }
    }
}

/// [`LogitRows::copy_row`] of one step.
pub type CopyRow<'a> = dyn Fn(usize, &mut [f32]) + 'a;

impl<F: Forward> Forward for &mut F {
    type KvStore = F::KvStore;

    fn vocabulary(&self) -> usize {
        F::vocabulary(self)
    }

    fn has_states(&self) -> bool {
        F::has_states(self)
    }

    fn expert_use(&self) -> ExpertUse {
        F::expert_use(self)
    }

    fn new_kv_store(&self, limits: &Limits) -> io::Result<F::KvStore> {
        F::new_kv_store(self, limits)
    }

    fn take_memory(&self, kv_store: &mut F::KvStore) -> io::Result<bool> {
        F::take_memory(self, kv_store)
    }

    fn prepare(&mut self) -> bool {
        F::prepare(self)
    }

    fn max_wanted_rows(&self) -> usize {
        F::max_wanted_rows(self)
    }

    fn want_logits(&mut self, wanted: &WantedLogits) {
        F::want_logits(self, wanted);
    }

    fn forward(&mut self, batch: &Batch, kv_store: &mut F::KvStore) -> impl LogitRows {
        F::forward(self, batch, kv_store)
    }
}

impl Forward for Model {
    type KvStore = KvStore;

    fn vocabulary(&self) -> usize {
        self.config().vocab
    }

    fn has_states(&self) -> bool {
        self.config().recurrent.is_some()
    }

    fn expert_use(&self) -> ExpertUse {
        Model::expert_use(self)
    }

    fn new_kv_store(&self, limits: &Limits) -> io::Result<KvStore> {
        let pages = limits.pages as usize;
        match limits.states {
            None => Model::new_kv_store(self, pages),
            Some(states) => self.new_kv_store_with_states(pages, states),
        }
    }

    fn take_memory(&self, kv_store: &mut KvStore) -> io::Result<bool> {
        kv_store.take_memory()
    }

    fn prepare(&mut self) -> bool {
        Model::prepare(self)
    }

    fn max_wanted_rows(&self) -> usize {
        Model::max_wanted_tokens(self)
    }

    fn want_logits(&mut self, wanted: &WantedLogits) {
        Model::want_logits(self, wanted);
    }

    fn forward(&mut self, batch: &Batch, kv_store: &mut KvStore) -> impl LogitRows {
        Model::forward(self, batch, kv_store);
        self.step_logits()
    }
}

impl LogitRows for StepLogits<'_> {
    fn copy_row(&self, row: usize, logits: &mut [f32]) {
        self.logits().copy_row(row, logits);
    }

    fn state_width(&self) -> usize {
        StepLogits::state_width(self)
    }

    fn copy_state(&self, row: usize, state: &mut [f32]) {
        StepLogits::copy_state(self, row, state);
    }

    fn kernels(&self) -> Kernels {
        StepLogits::kernels(self)
    }

    fn workers(&self) -> usize {
        StepLogits::workers(self)
    }

    fn share<T: Send>(
        &mut self,
        parts: impl Iterator<Item = T>,
        work: impl Fn(T, &CopyRow<'_>) + Sync,
    ) {
        self.run_parts(parts, |part, logits| {
            work(part, &|row, out: &mut [f32]| logits.copy_row(row, out));
        });
    }
}
