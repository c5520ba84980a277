//! Runs one step: plan, forward, sample, commit.
//!
//! Invariant: a panic of the model or of the sampler ends the requests of that step and nothing
//! else.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use sterna_scheduler::{Plan, Sampled, Scheduler, SequenceId, Step};

use super::batch_runner::BatchRunner;
use super::batch_sampler::{Continuation, Draw};
use super::clock::Clock;
use super::forward::Forward;
use super::sampling_params::SamplingParams;

/// The scheduler and the model that computes its steps.
pub(super) struct StepLoop<F: Forward> {
    pub(super) scheduler: Scheduler,
    pub(super) runner: BatchRunner<F>,
    sampled: Vec<Sampled>, // Reused by every commit.
    clock: Clock,
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
    /// The same prediction without the scheduler's correction since the calibration.
    pub calibrated: Duration,
    /// When the tokens were drawn.
    pub drawn_at: Instant,
    /// The model or the sampler panicked, and the requests of the step have failed.
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
    /// `params` returns the sampling parameters of a sequence.
    pub(super) fn step<'a>(
        &mut self,
        now: Instant,
        params: impl Fn(SequenceId) -> &'a SamplingParams + Sync,
    ) -> Option<StepOutcome> {
        let began = Instant::now();
        let Plan::Step(step) = self.scheduler.plan(self.clock.micros(now)) else {
            return None;
        };
        let planned = Instant::now();
        let (size, shape) = (size_of(&step), step.shape());
        let [predicted, calibrated] = predictions(&step);
        let computed = catch_unwind(AssertUnwindSafe(|| {
            let continuation = |id| continue_sequence(&step, id, params(id));
            self.runner.run(step.batch(), continuation)
        }));
        let drawn_at = Instant::now();
        let forwarded = *computed.as_ref().unwrap_or(&drawn_at);
        let panicked = computed.is_err();
        match computed {
            Ok(_) => {
                let draws = self.runner.sampler().draws();
                self.sampled.clear();
                self.sampled.extend(draws.iter().map(Draw::sampled));
                step.commit(self.clock.micros(drawn_at), &self.sampled);
            }
            Err(panic) => {
                self.runner.sampler().take_draws().for_each(drop);
                fail(step, &*panic);
            }
        }
        let times = PhaseTimes {
            plan: planned - began,
            forward: forwarded - planned,
            sample: drawn_at - forwarded,
            commit: drawn_at.elapsed(),
        };
        tracing::trace!(?shape, ?predicted, ?calibrated, ?times, "computed a step");
        Some(StepOutcome {
            size,
            times,
            predicted,
            calibrated,
            drawn_at,
            panicked,
        })
    }
}

fn size_of(step: &Step<'_>) -> StepSize {
    let batch = step.batch();
    StepSize {
        tokens: batch.token_count(),
        logits: batch.logits_count(),
        keys: batch.rows().iter().map(|row| row.end()).sum(),
    }
}

fn predictions(step: &Step<'_>) -> [Duration; 2] {
    [step.predicted(), step.calibrated()].map(Duration::from_micros)
}

fn continue_sequence<'a>(
    step: &'a Step<'_>,
    id: SequenceId,
    params: &'a SamplingParams,
) -> Continuation<'a> {
    Continuation {
        params,
        rules: step.output_rules(id),
        known: step.history(id),
        prompt_tokens: step.prompt_len(id),
    }
}

/// Ends all requests of a step that panicked.
fn fail(step: Step<'_>, panic: &(dyn Any + Send)) {
    let tokens = step.batch().token_count();
    tracing::error!("a step of {tokens} tokens panicked: {}", message(panic));
    let rows = step.batch().rows().iter();
    let ids: Vec<SequenceId> = rows.map(|row| row.sequence).collect();
    step.fail(&ids);
}

/// Returns the text of a panic.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
