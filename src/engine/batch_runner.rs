//! Computes a batch: the forward pass of the model, then the draws.

use std::time::Instant;

use sterna_scheduler::{Batch, SequenceId};

use super::batch_sampler::{BatchSampler, Continuation};
use super::forward::Forward;

/// A model, its keys and values, and the sampler.
pub(super) struct BatchRunner<F: Forward> {
    model: F,
    kv_store: F::KvStore,
    sampler: BatchSampler,
}

impl<F: Forward> BatchRunner<F> {
    pub(super) fn new(model: F, kv_store: F::KvStore) -> BatchRunner<F> {
        BatchRunner {
            sampler: BatchSampler::new(model.vocabulary()),
            model,
            kv_store,
        }
    }

    pub(super) fn model(&mut self) -> &mut F {
        &mut self.model
    }

    pub(super) fn sampler(&mut self) -> &mut BatchSampler {
        &mut self.sampler
    }

    /// Runs the forward pass of a batch whose logits are not wanted.
    pub(super) fn forward(&mut self, batch: &Batch) {
        drop(self.model.forward(batch, &mut self.kv_store));
    }

    /// Runs the forward pass and leaves the draws in the sampler. Returns when the forward pass
    /// ended.
    pub(super) fn run<'a>(
        &mut self,
        batch: &Batch,
        continuation: impl Fn(SequenceId) -> Continuation<'a> + Sync,
    ) -> Instant {
        let mut logits = self.model.forward(batch, &mut self.kv_store);
        let forwarded = Instant::now();
        self.sampler.sample(batch, &mut logits, continuation);
        forwarded
    }
}
