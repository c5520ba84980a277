//! The step loop without the engine thread and its queues, for benchmarks and checks.
//!
//! Invariant: it runs the same steps as [`Engine`](super::Engine), through the same `StepLoop`.

use std::collections::HashMap;
use std::time::Instant;

use sterna_scheduler::{
    Batch, Event, FinishReason, Limits, PAGE_TOKENS, Page, PageCopy, Policy, Refusal, Request,
    RowStates, Scheduler, SequenceId, TokenId,
};

use super::batch_runner::BatchRunner;
use super::batch_sampler::{Draw, DrawOutcome};
use super::clock::Clock;
use super::forward::Forward;
use super::sampling_params::SamplingParams;
use super::step_loop::{DrawRules, StepLoop, StepOutcome};
use crate::constraint::ConstrainedOutput;

/// A scheduler and a KV store around a borrowed model. Its requests have no stop tokens and no
/// deadlines.
pub struct Direct<'a, F: Forward> {
    steps: StepLoop<&'a mut F>,
    pages: u32,
    requests: HashMap<SequenceId, DirectRequest>,
    clock: Clock,
}

/// How the tokens of a request are drawn.
struct DirectRequest {
    params: SamplingParams,
    constrained: Option<ConstrainedOutput>,
    untold: Vec<TokenId>, // Drawn tokens that the grammar's thread does not know yet.
}

impl DirectRequest {
    fn rules(&self) -> DrawRules<'_> {
        DrawRules {
            params: &self.params,
            masks: self.constrained.as_ref().map(ConstrainedOutput::masks),
        }
    }
}

impl<'a, F: Forward> Direct<'a, F> {
    /// Returns an engine with no requests and `limits.pages` free pages.
    ///
    /// # Panics
    /// If the limits allow nothing, or the system does not have the memory for the pages.
    pub fn new(model: &'a mut F, limits: Limits, policy: Policy) -> Direct<'a, F> {
        let pages = limits.pages;
        let kv_store = Forward::new_kv_store(model, &limits).expect("memory for the pages");
        let clock = Clock::start();
        let runner = BatchRunner::new(model, kv_store);
        Direct {
            steps: StepLoop::new(Scheduler::new(limits, policy), runner, clock),
            pages,
            requests: HashMap::new(),
            clock,
        }
    }

    /// Returns the model.
    pub fn model(&mut self) -> &mut F {
        self.steps.runner.model()
    }

    /// Writes the keys and values of the first tokens of `text` into every page. Memory that was
    /// never written would be read too fast, and its first write would be slow.
    ///
    /// # Panics
    /// If a request runs, or `text` is empty.
    pub fn fill_pages(&mut self, text: &[TokenId]) {
        assert!(self.requests.is_empty(), "every page is free");
        let first = Page::new(0);
        let text = &text[..text.len().min(PAGE_TOKENS)];
        let mut batch = Batch::new();
        batch.push_row(SequenceId::new(0, 0), 0, text, &[first], 0);
        if let Some(slabs) = self.steps.scheduler.free_slabs() {
            batch.set_states(RowStates {
                from: None,
                to: slabs[0],
                keep: [None; 2],
            });
        }
        self.steps.runner.forward(&batch);
        batch.clear();
        for to in (1..self.pages).map(Page::new) {
            batch.push_copy(PageCopy { from: first, to });
        }
        self.steps.runner.forward(&batch);
    }

    /// Submits a request for `max_new_tokens` tokens after `prompt`.
    ///
    /// # Errors
    /// The scheduler's refusal.
    pub fn submit(
        &mut self,
        prompt: Vec<TokenId>,
        max_new_tokens: u32,
        params: SamplingParams,
    ) -> Result<SequenceId, Refusal> {
        let request = Request {
            prompt,
            max_new_tokens,
            is_diffused: params.unmasking.is_some(),
            ..Request::default()
        };
        let now = self.clock.micros(Instant::now());
        let id = self.steps.scheduler.submit(now, request)?;
        let grammar = params.grammar.as_ref();
        let constrained = grammar.map(|grammar| grammar.begin(&[]));
        let request = DirectRequest {
            params,
            constrained,
            untold: Vec::with_capacity(1),
        };
        self.requests.insert(id, request);
        Ok(id)
    }

    /// Tells the threads of grammars which tokens were drawn, and waits for the next masks.
    pub fn wait_for_masks(&mut self) {
        for (&id, request) in &mut self.requests {
            if let Some(constrained) = &request.constrained {
                let drawn = request.untold.drain(..);
                drawn.for_each(|token| constrained.drawn(token));
                while !constrained.is_ready() {
                    std::thread::yield_now();
                }
                self.steps.scheduler.force(id, constrained.forced());
            }
        }
    }

    /// Runs one step. Returns `None` if nothing runs or waits.
    ///
    /// # Panics
    /// If the model or the sampler panics, because no figure of such a step is true.
    pub fn step(&mut self) -> Option<StepOutcome> {
        self.wait_for_masks();
        let requests = &self.requests;
        let rules = |id: SequenceId| requests[&id].rules();
        let outcome = (self.steps).step(Instant::now(), rules, |_| {})?;
        assert!(!outcome.panicked, "a step panicked; the log says why");
        for draw in self.steps.runner.sampler().draws() {
            if let DrawOutcome::Token(output) = &draw.outcome
                && let Some(request) = self.requests.get_mut(&draw.sequence)
                && request.constrained.is_some()
            {
                request.untold.push(output.token);
            }
        }
        for event in self.steps.scheduler.events() {
            if let Event::Finished { id, .. } | Event::Displaced { id, .. } = event {
                self.requests.remove(&id);
            }
        }
        Some(outcome)
    }

    /// Returns the draws of the last step, one for each row of logits, in the order of its rows.
    /// Includes [`DrawOutcome::Void`](super::DrawOutcome::Void) draws.
    pub fn draws(&mut self) -> &[Draw] {
        self.steps.runner.sampler().draws()
    }

    /// Ends every request and drops every cached page.
    pub fn clear(&mut self) {
        for (id, _) in self.requests.drain() {
            self.steps.scheduler.cancel(id, FinishReason::Cancelled);
        }
        self.steps.scheduler.events().for_each(drop);
        self.steps.scheduler.reset_prefix_cache();
    }
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
        states: None,
        diffusion: None,
    };

    fn sizes(outcome: &StepOutcome) -> (usize, usize, usize) {
        (outcome.size.tokens, outcome.size.logits, outcome.size.keys)
    }

    #[test]
    fn a_request_runs_to_its_end_and_leaves_no_state() {
        let mut model = toy::model(1);
        let mut direct = Direct::new(&mut model, LIMITS, Policy::default());
        direct.fill_pages(&[1, 2, 3]);
        for _ in 0..2 {
            let id = direct
                .submit(vec![5, 6, 7], 2, SamplingParams::default())
                .unwrap();
            let first = direct.step().unwrap();
            assert_eq!(sizes(&first), (3, 1, 3));
            let [draw] = direct.draws() else {
                panic!("one row of logits, one draw");
            };
            assert_eq!(draw.sequence, id);
            assert!(matches!(draw.outcome, DrawOutcome::Token(_)));
            let second = direct.step().unwrap();
            assert_eq!(sizes(&second), (1, 1, 4));
            assert!(direct.step().is_none() && direct.requests.is_empty());
            direct.clear(); // The second round must not find the first round's page.
        }
    }

    #[test]
    fn clear_ends_every_request() {
        let mut model = toy::model(1);
        let mut direct = Direct::new(&mut model, LIMITS, Policy::default());
        direct
            .submit(vec![5; 40], 50, SamplingParams::default())
            .unwrap();
        assert!(direct.step().is_some());
        direct.clear();
        assert!(direct.step().is_none());
    }

    #[test]
    #[should_panic(expected = "a step panicked")]
    fn a_panic_of_the_model_reaches_the_caller() {
        let mut model = toy::model(1);
        let mut direct = Direct::new(&mut model, LIMITS, Policy::default());
        let no_such_token = vec![TokenId::MAX];
        direct
            .submit(no_such_token, 2, SamplingParams::default())
            .unwrap();
        direct.step();
    }
}
