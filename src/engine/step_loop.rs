//! Runs one step: plan, forward, sample, commit.
//!
//! Invariant: a panic of the model or of the sampler ends the requests that cause it and nothing
//! else. The rows of a step that panicked are computed one by one, and only rows that panic again
//! fail. The answers of other rows do not change by a bit.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use sterna_scheduler::{OwnDrafts, Plan, Sampled, Scheduler, SequenceId, Step, TokenId};

use super::batch_runner::{BatchRunner, panic_message};
use super::batch_sampler::{Continuation, Draw};
use super::clock::Clock;
use super::forward::Forward;
use super::sampling_params::SamplingParams;
use crate::constraint::TokenMasks;

/// The scheduler and the model that computes its steps.
pub(super) struct StepLoop<F: Forward> {
    pub(super) scheduler: Scheduler,
    pub(super) runner: BatchRunner<F>,
    sampled: Vec<Sampled>, // Reused by every commit.
    clock: Clock,
}

/// How the tokens of a sequence are drawn.
pub(super) struct DrawRules<'a> {
    pub(super) params: &'a SamplingParams,
    /// Which tokens may be drawn, if the output follows a grammar.
    pub(super) masks: Option<&'a TokenMasks>,
}

/// A computed step.
#[derive(Clone, Copy, Debug)]
pub struct StepOutcome {
    /// What the step computed.
    pub size: StepSize,
    /// How long its phases took.
    pub times: PhaseTimes,
    /// The predicted time of forward pass and draws.
    pub predicted: Duration,
    /// The same prediction by the calibration alone.
    pub calibrated: Duration,
    /// When the tokens were drawn.
    pub drawn_at: Instant,
    /// The model or the sampler panicked, and the rows were computed one by one.
    pub panicked: bool,
}

/// The amount of work in a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepSize {
    /// Computed tokens.
    pub tokens: usize,
    /// Rows of logits.
    pub logits: usize,
    /// Keys in the page tables of all rows.
    pub keys: usize,
    /// Rows.
    pub rows: usize,
    /// Experts with rows, added over the layers.
    pub expert_hits: usize,
}

/// The durations of a step's phases.
#[derive(Clone, Copy, Debug, Default)]
pub struct PhaseTimes {
    /// The scheduler decides what to compute.
    pub plan: Duration,
    /// The model computes logits.
    pub forward: Duration,
    /// The sampler draws tokens.
    pub sample: Duration,
    /// The scheduler takes in the tokens.
    pub commit: Duration,
}

impl PhaseTimes {
    /// Returns the duration of the step.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.plan + self.forward + self.sample + self.commit
    }
}

impl<F: Forward> StepLoop<F> {
    pub(super) fn new(scheduler: Scheduler, runner: BatchRunner<F>, clock: Clock) -> StepLoop<F> {
        StepLoop {
            scheduler,
            runner,
            sampled: Vec::new(),
            clock,
        }
    }

    /// Runs the step that the scheduler plans at `now`. Returns `None` if nothing runs or waits.
    /// `rules` returns how the tokens of a sequence are drawn. Calls `begin` with the step before
    /// each forward pass.
    pub(super) fn step<'a>(
        &mut self,
        now: Instant,
        rules: impl Fn(SequenceId) -> DrawRules<'a> + Sync,
        begin: impl Fn(&Step<'_>),
    ) -> Option<StepOutcome> {
        let began = Instant::now();
        let own_drafts = self.scheduler.own_drafts();
        let Plan::Step(mut step) = self.scheduler.plan(self.clock.micros(now)) else {
            return None;
        };
        let planned = Instant::now();
        let (mut size, shape) = (size_of(&step), step.shape());
        let drafting = step.drafting().rows;
        let hits_before = self.runner.expert_use().hits;
        let [predicted, calibrated] = predictions(&step);
        begin(&step);
        if let Some(OwnDrafts { mask_token, .. }) = own_drafts
            && drafting > 0
        {
            draft(&mut self.runner, &mut step, mask_token);
        }
        let continuation = |id| continue_sequence(&step, id, rules(id));
        let computed = catch_unwind(AssertUnwindSafe(|| {
            self.runner.run(step.batch(), continuation)
        }));
        let failed = computed.as_ref().err().map(|panic| {
            let (tokens, message) = (size.tokens, panic_message(&**panic));
            tracing::error!("a step of {tokens} tokens panicked; now row by row: {message}");
            let begin = || begin(&step);
            self.runner.rerun(step.batch(), continuation, begin)
        });
        let drawn_at = Instant::now();
        size.expert_hits = (self.runner.expert_use().hits - hits_before) as usize;
        let forwarded = *computed.as_ref().unwrap_or(&drawn_at);
        let draws = self.runner.sampler().draws();
        self.sampled.clear();
        self.sampled.extend(draws.iter().map(Draw::sampled));
        let committed_at = self.clock.micros(drawn_at);
        match &failed {
            None => step.commit(committed_at, &self.sampled),
            Some(failed) => step.commit_rerun(committed_at, &self.sampled, failed),
        }
        let times = PhaseTimes {
            plan: planned - began,
            forward: forwarded - planned,
            sample: drawn_at - forwarded,
            commit: drawn_at.elapsed(),
        };
        tracing::trace!(
            ?shape,
            drafting,
            ?predicted,
            ?calibrated,
            ?times,
            "computed a step"
        );
        Some(StepOutcome {
            size,
            times,
            predicted,
            calibrated,
            drawn_at,
            panicked: failed.is_some(),
        })
    }
}

/// Lets the model draft for the rows that want drafts. If that panics, the step has wrong drafts.
fn draft<F: Forward>(runner: &mut BatchRunner<F>, step: &mut Step<'_>, mask_token: TokenId) {
    let drafted = catch_unwind(AssertUnwindSafe(|| {
        let drafts = runner.draft(step.batch(), mask_token);
        step.set_drafts(drafts);
    }));
    if let Err(panic) = drafted {
        tracing::error!("the pass that drafts panicked: {}", panic_message(&*panic));
    }
}

fn size_of(step: &Step<'_>) -> StepSize {
    let batch = step.batch();
    StepSize {
        tokens: batch.token_count(),
        logits: batch.logits_count(),
        keys: batch.rows().iter().map(|row| row.end()).sum(),
        rows: batch.rows().len(),
        expert_hits: 0, // The forward pass tells.
    }
}

fn predictions(step: &Step<'_>) -> [Duration; 2] {
    [step.predicted(), step.calibrated()].map(Duration::from_micros)
}

fn continue_sequence<'a>(
    step: &'a Step<'_>,
    id: SequenceId,
    rules: DrawRules<'a>,
) -> Continuation<'a> {
    Continuation {
        params: rules.params,
        masks: rules.masks,
        rules: step.output_rules(id),
        known: step.history(id),
        ahead: step.ahead(id),
        prompt_tokens: step.prompt_len(id),
    }
}
