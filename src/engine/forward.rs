//! What the engine asks of a model: one step's batch in, rows of logits out. Tests wrap a model to make it fail.

use sterna_scheduler::Batch;

use crate::model::{KvStore, Logits, Model};

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

/// The logits of one step.
pub trait LogitRows {
    /// Copies row `row` into `logits`, one for each token of the vocabulary.
    fn copy_row(&self, row: usize, logits: &mut [f32]);
}

impl Forward for Model {
    type KvStore = KvStore;

    fn vocabulary(&self) -> usize {
        self.config().vocab
    }

    fn new_kv_store(&self, pages: usize) -> KvStore {
        Model::new_kv_store(self, pages)
    }

    fn forward(&mut self, batch: &Batch, kv_store: &mut KvStore) -> impl LogitRows {
        Model::forward(self, batch, kv_store)
    }
}

impl LogitRows for &Logits {
    fn copy_row(&self, row: usize, logits: &mut [f32]) {
        Logits::copy_row(self, row, logits);
    }
}
