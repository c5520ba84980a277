//! Computes a batch: the forward pass of the model, then the draws. A batch that panicked is
//! computed again, row by row.
//!
//! Invariant: a row alone gives the same tokens as in its batch, because it reads only pages that
//! were computed before and what it writes itself.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use sterna_scheduler::{Batch, PAGE_TOKENS, Row, SequenceId, TokenId};

use super::batch_sampler::{BatchSampler, Continuation, DecidingLogits, Draw, DrawOutcome};
use super::forward::Forward;
use crate::fault::{self, Place};
use crate::model::{ExpertUse, WantedLogits};

/// A model, its keys and values, and the sampler.
pub(super) struct BatchRunner<F: Forward> {
    model: F,
    kv_store: F::KvStore,
    sampler: BatchSampler,
    deciding: DecidingLogits,
    cannot_prepare: bool, // A preparation panicked.
    drafting: Batch,      // The blocks of the pass that drafts.
    drafts: Vec<TokenId>, // Its result.
}

impl<F: Forward> BatchRunner<F> {
    pub(super) fn new(model: F, kv_store: F::KvStore) -> BatchRunner<F> {
        BatchRunner {
            sampler: BatchSampler::new(model.vocabulary()),
            deciding: DecidingLogits::new(model.vocabulary()),
            cannot_prepare: false,
            drafting: Batch::new(),
            drafts: Vec::new(),
            model,
            kv_store,
        }
    }

    pub(super) fn model(&mut self) -> &mut F {
        &mut self.model
    }

    pub(super) fn expert_use(&self) -> ExpertUse {
        self.model.expert_use()
    }

    pub(super) fn sampler(&mut self) -> &mut BatchSampler {
        &mut self.sampler
    }

    /// Takes the next part of the reserved memory. Returns whether there is more to take. If the
    /// system does not have it, the steps take it when they need it.
    pub(super) fn take_memory(&mut self) -> bool {
        let taken = self.model.take_memory(&mut self.kv_store);
        taken.unwrap_or_else(|error| {
            tracing::warn!(
                %error,
                "the system does not have all of the memory for keys and values now; give a \
                 smaller --kv-memory"
            );
            false
        })
    }

    /// Does the next part of the work that makes later steps faster. Returns whether there is more
    /// to do. After a panic, as of a system without the memory, the steps stay as they are.
    pub(super) fn prepare(&mut self) -> bool {
        if self.cannot_prepare {
            return false;
        }
        let prepared = catch_unwind(AssertUnwindSafe(|| self.model.prepare()));
        prepared.unwrap_or_else(|panic| {
            tracing::warn!(
                "preparing faster steps failed: {}; the engine goes on without them",
                panic_message(&*panic)
            );
            self.cannot_prepare = true;
            false
        })
    }

    /// Runs the forward pass of a batch whose logits are not wanted.
    pub(super) fn forward(&mut self, batch: &Batch) {
        self.model.want_logits(&WantedLogits::default());
        drop(self.model.forward(batch, &mut self.kv_store));
    }

    /// Runs the forward pass and leaves the draws in the sampler. Returns when the forward pass
    /// ended.
    pub(super) fn run<'a>(
        &mut self,
        batch: &Batch,
        continuation: impl Fn(SequenceId) -> Continuation<'a> + Sync,
    ) -> Instant {
        if !(1..=self.model.max_wanted_rows()).contains(&batch.logits_count()) {
            return self.run_with_all_logits(batch, continuation);
        }
        let wanted = self.deciding.of(batch, &continuation);
        self.model.want_logits(wanted);
        self.run_wanting(batch, continuation)
    }

    /// Runs a batch as [`run`](Self::run) does, and computes all logits whatever the draws need.
    pub(super) fn run_with_all_logits<'a>(
        &mut self,
        batch: &Batch,
        continuation: impl Fn(SequenceId) -> Continuation<'a> + Sync,
    ) -> Instant {
        self.model.want_logits(&WantedLogits::default());
        self.run_wanting(batch, continuation)
    }

    fn run_wanting<'a>(
        &mut self,
        batch: &Batch,
        continuation: impl Fn(SequenceId) -> Continuation<'a> + Sync,
    ) -> Instant {
        let mut logits = self.model.forward(batch, &mut self.kv_store);
        let forwarded = Instant::now();
        fault::pass(Place::BatchForwarded);
        self.sampler.sample(batch, &mut logits, continuation);
        fault::pass(Place::BatchSampled);
        forwarded
    }

    /// Computes the drafts that the rows of `batch` want of the model, in the order of the rows.
    ///
    /// The last known token of such a row and the mask tokens behind it are a block, whose tokens
    /// attend to all of the block. As the model was trained for, each token of the block predicts
    /// the next one. The step that follows writes all keys and values of the block again.
    pub(super) fn draft(&mut self, batch: &Batch, mask_token: TokenId) -> &[TokenId] {
        self.drafting.clear();
        self.drafts.clear();
        for row in batch.rows().iter().filter(|row| row.own_drafts > 0) {
            let (count, pages) = (row.own_drafts as usize, batch.pages(row));
            let known = row.len() - count;
            let end = row.start as usize + known - 1 + count;
            let tokens = &batch.tokens(row)[..known - 1 + count];
            let copies = batch.copies().iter();
            for copy in copies.filter(|copy| pages.contains(&copy.to)) {
                self.drafting.push_copy(*copy);
            }
            let pages = &pages[..end.div_ceil(PAGE_TOKENS)];
            (self.drafting).push_row(row.sequence, row.start as usize, tokens, pages, count);
            self.drafting.set_block(u32::MAX); // One block for all of the row.
        }
        if !self.drafting.rows().is_empty() {
            self.model.want_logits(&WantedLogits::default());
            let mut logits = self.model.forward(&self.drafting, &mut self.kv_store);
            let count = self.drafting.logits_count();
            self.drafts.resize(count, mask_token);
            self.sampler
                .draft(&mut logits, mask_token, &mut self.drafts);
        }
        &self.drafts
    }

    /// Returns the model, its keys and values, and the sampler.
    pub(super) fn parts(&mut self) -> (&mut F, &mut F::KvStore, &mut BatchSampler) {
        (&mut self.model, &mut self.kv_store, &mut self.sampler)
    }

    /// Computes each row of a batch that panicked in a batch of its own, and leaves the draws of
    /// all rows in the sampler. Calls `begin` before each. Returns the sequences whose rows
    /// panicked again; their draws are void.
    pub(super) fn rerun<'a>(
        &mut self,
        batch: &Batch,
        continuation: impl Fn(SequenceId) -> Continuation<'a> + Sync,
        begin: impl Fn(),
    ) -> Vec<SequenceId> {
        let (mut draws, mut failed) = (Vec::new(), Vec::new());
        for row in batch.rows() {
            begin();
            let alone = alone(batch, row);
            let run = AssertUnwindSafe(|| self.run(&alone, &continuation));
            match catch_unwind(run) {
                Ok(_) => draws.extend(self.sampler.take_draws()),
                Err(panic) => {
                    let (sequence, message) = (row.sequence, panic_message(&*panic));
                    tracing::error!("{sequence:?} panicked again, alone: {message}");
                    failed.push(sequence);
                    let outcome = DrawOutcome::Void;
                    draws.resize(
                        draws.len() + row.logits as usize,
                        Draw { sequence, outcome },
                    );
                }
            }
        }
        self.sampler.set_draws(draws);
        failed
    }
}

/// Returns a batch of one row of `batch`, and of the copies into its pages.
fn alone(batch: &Batch, row: &Row) -> Batch {
    let pages = batch.pages(row);
    let mut alone = Batch::new();
    let copies = batch.copies().iter();
    for copy in copies.filter(|copy| pages.contains(&copy.to)) {
        alone.push_copy(*copy);
    }
    alone.push_row_of(batch, row);
    alone
}

/// Returns the text of a panic.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
