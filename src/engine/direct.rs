//! The engine without its lanes: plan, forward, sample and commit on the caller's thread, each timed. For whoever measures the engine
//! or checks its answers; a server takes [`Engine`](super::Engine), whose thread does the same between its lanes (`step.rs`).
//!
//! Invariant: what serves also runs here, in the same order: the scheduler, the model, the sampler.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use sterna_scheduler::{
    Batch, Event, Limits, Micros, PAGE_TOKENS, Page, PageCopy, Plan, Policy, Refusal, Request,
    Scheduler, SequenceId, TokenId,
};

use super::batch_sampler::{BatchSampler, Continued, Terms};
use super::{Forward, SamplingParams, TokenOutput};

/// A scheduler and the memory of keys and values, over somebody's model. Nothing can stop an answer but its length.
pub struct Direct<'a, F: Forward> {
    model: &'a mut F,
    kv_store: F::KvStore,
    pages: u32,
    scheduler: Scheduler,
    sampler: BatchSampler,
    terms: HashMap<SequenceId, Terms>,
    started: Instant,
}

/// What one step computed, and how long each of its parts took.
#[derive(Clone, Copy, Debug, Default)]
pub struct DirectStep {
    /// Tokens computed.
    pub tokens: usize,
    /// Those of them whose logits were wanted.
    pub logits: usize,
    /// Keys that the step looked at, each once.
    pub keys: usize,
    /// Deciding what to compute.
    pub plan: Duration,
    /// The forward pass.
    pub forward: Duration,
    /// From logits to tokens.
    pub sample: Duration,
    /// Making it count.
    pub commit: Duration,
}

impl DirectStep {
    fn of(batch: &Batch) -> DirectStep {
        DirectStep {
            tokens: batch.token_count(),
            logits: batch.logits_count(),
            keys: batch.rows().iter().map(|row| row.end()).sum(),
            ..DirectStep::default()
        }
    }

    /// How long the step took.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.plan + self.forward + self.sample + self.commit
    }
}

impl<'a, F: Forward> Direct<'a, F> {
    /// Nothing runs, and all of `limits.pages` pages are free.
    ///
    /// # Panics
    /// If the limits allow nothing.
    pub fn new(model: &'a mut F, limits: Limits, policy: Policy) -> Direct<'a, F> {
        Direct {
            kv_store: model.new_kv_store(limits.pages as usize),
            pages: limits.pages,
            sampler: BatchSampler::new(model.vocabulary()),
            model,
            scheduler: Scheduler::new(limits, policy),
            terms: HashMap::new(),
            started: Instant::now(),
        }
    }

    /// The model.
    pub fn model(&mut self) -> &mut F {
        self.model
    }

    /// Writes keys and values into every page, those of the first tokens of `text`: memory that was never written is read faster than
    /// any other, and a first write to it is slow.
    ///
    /// # Panics
    /// If a request was submitted, or `text` is empty.
    pub fn fill_pages(&mut self, text: &[TokenId]) {
        assert!(self.terms.is_empty(), "every page is free");
        let first = Page::new(0);
        let text = &text[..text.len().min(PAGE_TOKENS)];
        let mut batch = Batch::new();
        batch.push_row(SequenceId::new(0, 0), 0, text, &[first], 0);
        drop(self.model.forward(&batch, &mut self.kv_store));
        batch.clear();
        for to in (1..self.pages).map(Page::new) {
            batch.push_copy(PageCopy { from: first, to });
        }
        drop(self.model.forward(&batch, &mut self.kv_store));
    }

    /// Asks for `max_new_tokens` tokens after `prompt`.
    ///
    /// # Errors
    /// The scheduler's refusal.
    pub fn submit(
        &mut self,
        prompt: Vec<TokenId>,
        max_new_tokens: u32,
        sampling: SamplingParams,
    ) -> Result<SequenceId, Refusal> {
        let request = Request {
            prompt,
            max_new_tokens,
            ..Request::default()
        };
        let now = self.now(Instant::now());
        let id = self.scheduler.submit(now, request)?;
        let terms = Terms {
            sampling,
            min_new_tokens: 0,
            max_new_tokens: max_new_tokens as usize,
            stop_tokens: Vec::new(),
        };
        self.terms.insert(id, terms);
        Ok(id)
    }

    /// One step, or nothing if nothing runs or waits.
    pub fn step(&mut self) -> Option<DirectStep> {
        let began = Instant::now();
        let now = self.now(began);
        let Plan::Step(step) = self.scheduler.plan(now) else {
            return None;
        };
        let mut done = DirectStep::of(step.batch());
        let planned = Instant::now();
        let mut logits = self.model.forward(step.batch(), &mut self.kv_store);
        let computed = Instant::now();
        self.sampler
            .sample(step.batch(), &mut logits, |id| Continued {
                terms: &self.terms[&id],
                known: step.history(id),
                prompt_tokens: step.prompt_len(id),
            });
        drop(logits);
        let sampled = Instant::now();
        step.commit(micros(sampled - self.started), &self.sampler.sampled);
        for event in self.scheduler.events() {
            if let Event::Finished { id, .. } = event {
                self.terms.remove(&id);
            }
        }
        done.plan = planned - began;
        done.forward = computed - planned;
        done.sample = sampled - computed;
        done.commit = sampled.elapsed();
        Some(done)
    }

    /// What the last step drew, in the order of its rows; `None` where the logits allowed no token.
    pub fn outputs(&self) -> impl Iterator<Item = (SequenceId, Option<&TokenOutput>)> {
        let outputs = self.sampler.outputs.iter();
        outputs.map(|(id, outcome)| (*id, outcome.as_ref().ok()))
    }

    /// Ends every request and forgets every cached page.
    pub fn clear(&mut self) {
        for (id, _) in self.terms.drain() {
            self.scheduler
                .cancel(id, sterna_scheduler::FinishReason::Cancelled);
        }
        self.scheduler.events().for_each(drop);
        self.scheduler.reset_prefix_cache();
    }

    fn now(&self, at: Instant) -> Micros {
        micros(at - self.started)
    }
}

fn micros(duration: Duration) -> Micros {
    duration.as_micros() as Micros
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::toy;

    const LIMITS: Limits = Limits {
        pages: 32,
        max_running: 4,
        max_queued: 4,
        max_queued_time: u64::MAX,
        step_tokens: 64,
        prefill_chunk: 64,
        max_sequence_tokens: 128,
    };

    #[test]
    fn a_request_runs_to_its_end_and_leaves_nothing() {
        let mut model = toy::model(1);
        let mut direct = Direct::new(&mut model, LIMITS, Policy::default());
        direct.fill_pages(&[1, 2, 3]);
        for _ in 0..2 {
            let id = direct
                .submit(vec![5, 6, 7], 2, SamplingParams::default())
                .unwrap();
            let first = direct.step().unwrap();
            assert_eq!((first.tokens, first.logits, first.keys), (3, 1, 3));
            let drawn: Vec<_> = direct
                .outputs()
                .map(|(id, out)| (id, out.is_some()))
                .collect();
            assert_eq!(drawn, [(id, true)]);
            let second = direct.step().unwrap();
            assert_eq!((second.tokens, second.logits, second.keys), (1, 1, 4));
            assert!(direct.step().is_none() && direct.terms.is_empty());
            direct.clear(); // Else the second round would find the first's page.
        }
    }

    #[test]
    fn clearing_ends_what_runs() {
        let mut model = toy::model(1);
        let mut direct = Direct::new(&mut model, LIMITS, Policy::default());
        direct
            .submit(vec![5; 40], 50, SamplingParams::default())
            .unwrap();
        assert!(direct.step().is_some());
        direct.clear();
        assert!(direct.step().is_none());
    }
}
