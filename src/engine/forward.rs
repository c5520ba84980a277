//! What the engine asks of a model: one step's batch in, rows of logits out. Tests wrap a model to make it fail.

use sterna_kernels::Kernels;
use sterna_scheduler::Batch;

use crate::model::{KvStore, Model, StepLogits};

/// A model that can run a step.
pub trait Forward: Send + 'static {
    /// The memory of keys and values, indexed by page.
    type KvStore: Send;

    /// How many logits a row has.
    fn vocabulary(&self) -> usize;

    /// Memory for `pages` pages; asked for once, before the engine takes requests.
    fn new_kv_store(&self, pages: usize) -> Self::KvStore;

    /// Computes `batch`, after making its copies: one row of logits for each token whose logits are wanted, in the order of
    /// the rows and of their tokens.
    fn forward(&mut self, batch: &Batch, kv_store: &mut Self::KvStore) -> impl LogitRows;
}

/// The logits of one step, and who may work on them.
pub trait LogitRows {
    /// Copies row `row` into `logits`, one for each token of the vocabulary.
    fn copy_row(&self, row: usize, logits: &mut [f32]);

    /// What the rows are worked on with.
    fn kernels(&self) -> Kernels {
        Kernels::best()
    }

    /// How many parts of the rows can be worked on at the same time.
    fn workers(&self) -> usize {
        1
    }

    /// Does `work` on every part, with [`copy_row`](Self::copy_row) as its second argument: on a thread each where there are
    /// several `workers`, one after the other otherwise.
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

impl Forward for Model {
    type KvStore = KvStore;

    fn vocabulary(&self) -> usize {
        self.config().vocab
    }

    fn new_kv_store(&self, pages: usize) -> KvStore {
        Model::new_kv_store(self, pages)
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
