//! Measures the cost of a step: times a few hand-built steps before the engine takes requests, and
//! again in an idle moment if other work disturbed that.
//!
//! The steps write into pages that are all free, so no request reads what they wrote. The steps
//! with a long history do not compute that history: they read unwritten memory. Caches serve such
//! memory faster than a real history, and real steps teach the scheduler the difference.

use std::time::{Duration, Instant};

use sterna_scheduler::{
    Batch, CostModel, Limits, Nanos, OutputRules, PAGE_TOKENS, Page, RowStates, SequenceId,
    StateSlab, StepShape, TokenId,
};

use super::batch_runner::BatchRunner;
use super::batch_sampler::Continuation;
use super::forward::Forward;
use super::interference::{Interference, InterferenceCounters};
use super::sampling_params::SamplingParams;

/// The time for the whole calibration at the start: a 2B model is ready in less than three seconds.
/// On a machine that is too slow or too busy for one round of the small steps, some of them run
/// later, when the engine is idle.
const TIME_LIMIT: Duration = Duration::from_millis(1_000);

/// Repetitions of a step. The fastest counts, because other load makes a step longer, never
/// shorter.
const REPETITIONS: usize = 8;

/// The steps that always run, of one and of sixteen tokens. With fewer, the cost model would not
/// tell tokens from keys.
const FIRST_STEPS: usize = 2;

/// A shorter step runs once more, and the second time counts. While a server decodes, the step
/// before was like it, so a small model finds its weights in the caches; here another step was
/// before. Steps of large models find none, and take longer.
const SHORT_STEP: Duration = Duration::from_millis(2);

/// The context length of the steps that measure attention.
const LONG_CONTEXT: usize = 1024;

/// The number of sequences in a step that measures attention.
const LONG_SEQUENCES: usize = 4;

/// The ratio of a step's median time to its fastest, in the mean of all steps, beyond which the
/// measurement was disturbed.
const MAX_SPREAD: f64 = 1.2;

/// How long the engine is idle before it measures again. After each disturbed measurement it is
/// twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// The measured cost of a step, and what other work did meanwhile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Calibration {
    pub(super) cost: CostModel,
    spread: f64, // The mean ratio of a step's median time to its fastest.
    interference: Interference,
    is_complete: bool, // All of the small steps have run.
}

/// The memory that steps outside of the schedule may write to.
#[derive(Clone, Copy)]
pub(super) struct FreeMemory<'a> {
    /// At least one page.
    pub(super) pages: &'a [Page],
    /// The slabs of states, if the model has recurrent layers. At least one, then.
    pub(super) slabs: Option<&'a [StateSlab]>,
}

impl<'a> FreeMemory<'a> {
    /// Returns free pages, for a model without recurrent layers.
    #[cfg(test)]
    pub(super) fn of_pages(pages: &'a [Page]) -> FreeMemory<'a> {
        FreeMemory { pages, slabs: None }
    }

    /// Returns the states of a row that takes the place of one at any position: those of no token.
    pub(super) fn row_states(&self, row: usize) -> Option<RowStates> {
        let slabs = self.slabs?;
        Some(RowStates {
            from: None,
            to: slabs[row],
            keep: [None; 2],
        })
    }

    /// Returns the largest number of sequences that fit.
    fn sequences(&self) -> usize {
        let slabs = self.slabs.map_or(usize::MAX, <[StateSlab]>::len);
        self.pages.len().min(slabs)
    }
}

/// A measurement that waits for an idle moment.
pub(super) struct Recalibration {
    limits: Limits,
    pause: Duration,
}

/// Times steps in `free` memory and fits a cost model to them. The sampler
/// takes part, so that its memory is warm for the first request.
pub(super) fn calibrate<F: Forward>(
    runner: &mut BatchRunner<F>,
    limits: &Limits,
    free: FreeMemory<'_>,
) -> Calibration {
    let steps = calibration_steps(limits, free, runner.model().vocabulary());
    tracing::info!(
        steps = steps.len(),
        limit_milliseconds = TIME_LIMIT.as_millis() as u64,
        "calibrating: timing steps of several sizes, so that the scheduler can predict how long \
         a step takes"
    );
    let calibration = measure(runner, steps, [TIME_LIMIT; 2], || false);
    calibration.expect("nothing interrupts the measurement")
}

/// Times steps until `is_interrupted`, which returns `None`. After `small_limit`, a small step that
/// did not run yet is left out, except the [`FIRST_STEPS`]. All else ends after `limit`.
fn measure<F: Forward>(
    runner: &mut BatchRunner<F>,
    mut steps: Vec<CalibrationStep>,
    [small_limit, limit]: [Duration; 2],
    is_interrupted: impl Fn() -> bool,
) -> Option<Calibration> {
    let (started, before) = (Instant::now(), InterferenceCounters::read());
    // The first step finds cold caches, sleeping threads and unmapped pages. So the largest of the
    // small steps runs once, untimed.
    let small = steps.iter().filter(|step| !step.is_large);
    if let Some(largest) = small.max_by_key(|step| step.pages()) {
        time(runner, &largest.batch);
    }
    let mut longest = Duration::ZERO;
    for (index, step) in steps.iter_mut().enumerate() {
        let is_late = match step.is_large {
            true => started.elapsed() + 3 * longest > limit,
            false => index >= FIRST_STEPS && started.elapsed() + longest > small_limit,
        };
        if is_late {
            continue;
        }
        if is_interrupted() {
            return None;
        }
        step.run(runner);
        longest = longest.max(step.fastest());
    }
    let is_complete = steps.iter().all(|step| step.is_large || step.has_run());
    steps.retain(CalibrationStep::has_run);
    for _ in 1..REPETITIONS {
        for step in &mut steps {
            if started.elapsed() + step.fastest() > limit {
                continue;
            }
            if is_interrupted() {
                return None;
            }
            step.run(runner);
        }
    }
    let calibration = Calibration {
        is_complete,
        ..evaluate(&mut steps, InterferenceCounters::read().since(&before))
    };
    calibration.report(started.elapsed(), steps.len());
    Some(calibration)
}

/// Fits a cost model to the fastest times.
fn evaluate(steps: &mut [CalibrationStep], interference: Interference) -> Calibration {
    let samples: Vec<(StepShape, Nanos)> = steps
        .iter()
        .map(|step| (step.shape, step.fastest().as_nanos() as Nanos))
        .collect();
    let repeated = steps.iter_mut().filter(|step| step.times.len() > 2);
    let spreads: Vec<f64> = repeated.map(CalibrationStep::spread).collect();
    let sum = spreads.iter().fold(0.0, |sum, spread| sum + spread);
    Calibration {
        cost: CostModel::fit(&samples),
        spread: sum / spreads.len().max(1) as f64,
        interference,
        is_complete: true,
    }
}

impl Calibration {
    /// Returns whether small steps are missing, or other work made steps longer. A machine so slow
    /// that no step was repeated may have been disturbed too, but measuring again would not tell.
    pub(super) fn is_disturbed(&self) -> bool {
        !self.is_complete || self.spread > MAX_SPREAD || self.interference.is_large()
    }

    fn report(&self, took: Duration, samples: usize) {
        let milliseconds = took.as_millis() as u64;
        let Calibration {
            cost,
            spread,
            interference,
            is_complete,
        } = self;
        tracing::debug!(?cost, "the cost of a step, in nanoseconds");
        if self.is_disturbed() {
            let Interference {
                stolen,
                throttled,
                waited,
            } = interference;
            tracing::info!(
                milliseconds,
                samples,
                is_complete,
                spread = hundredths(*spread),
                stolen = hundredths(*stolen),
                throttled = hundredths(*throttled),
                waited = hundredths(*waited),
                "other work or a slow machine disturbed the measurement of the cost of a step; the \
                 server measures again when it is idle"
            );
        } else {
            let spread = hundredths(*spread);
            tracing::info!(milliseconds, samples, spread, "measured the cost of a step");
        }
    }
}

/// Returns a figure for the log.
fn hundredths(figure: f64) -> f64 {
    (figure * 100.0).round() / 100.0
}

impl Recalibration {
    /// Returns the measurement to repeat, if `calibration` was disturbed.
    pub(super) fn after(calibration: &Calibration, limits: &Limits) -> Option<Recalibration> {
        calibration.is_disturbed().then(|| Recalibration {
            limits: limits.clone(),
            pause: FIRST_PAUSE,
        })
    }

    /// Returns how long the engine is idle before the measurement.
    pub(super) fn pause(&self) -> Duration {
        self.pause
    }

    /// Measures the small steps in `free` memory. Returns `None` if it `is_interrupted` or
    /// disturbed again. It takes at most [`TIME_LIMIT`], or as long as one round of the steps
    /// takes. An interruption waits for at most one step.
    pub(super) fn measure<F: Forward>(
        &mut self,
        runner: &mut BatchRunner<F>,
        free: FreeMemory<'_>,
        is_interrupted: impl Fn() -> bool,
    ) -> Option<CostModel> {
        let mut steps = calibration_steps(&self.limits, free, runner.model().vocabulary());
        steps.retain(|step| !step.is_large);
        let calibration = measure(runner, steps, [Duration::MAX, TIME_LIMIT], is_interrupted)?;
        if calibration.is_disturbed() {
            self.pause = (2 * self.pause).min(LONGEST_PAUSE);
            return None;
        }
        Some(calibration.cost)
    }
}

/// A step whose time is measured.
struct CalibrationStep {
    batch: Batch,
    shape: StepShape,
    is_large: bool, // Runs only if there is time for it.
    times: Vec<Duration>,
}

impl CalibrationStep {
    /// Returns a step of `count` sequences. Each has `tokens` tokens after a history of `history`
    /// tokens, in its own part of `free`. Of `vocabulary` token ids, the tokens differ.
    fn new(
        free: FreeMemory<'_>,
        vocabulary: usize,
        count: usize,
        (history, tokens): (usize, usize),
        logits: usize,
    ) -> CalibrationStep {
        let mut batch = Batch::new();
        let mut shape = StepShape::default();
        // Equal tokens would choose the same experts, which real ones do not.
        let ids: Vec<TokenId> = (0..count * tokens)
            .map(|id| (id % vocabulary) as TokenId)
            .collect();
        let pages = (history + tokens).div_ceil(PAGE_TOKENS);
        for index in 0..count {
            let table = &free.pages[index * pages..][..pages];
            let id = SequenceId::new(index as u32, 0);
            let ids = &ids[index * tokens..][..tokens];
            batch.push_row(id, history, ids, table, logits);
            if let Some(states) = free.row_states(index) {
                batch.set_states(states);
            }
            shape = shape.plus(match tokens {
                1 => StepShape {
                    logits: logits as u64,
                    ..StepShape::decode(history + 1)
                },
                _ => StepShape::chunk(history, tokens, logits),
            });
        }
        CalibrationStep {
            batch,
            shape,
            is_large: false,
            times: Vec::with_capacity(REPETITIONS),
        }
    }

    /// Adds a time.
    fn run<F: Forward>(&mut self, runner: &mut BatchRunner<F>) {
        let mut took = time(runner, &self.batch);
        if took < SHORT_STEP {
            took = time(runner, &self.batch);
        }
        self.times.push(took);
    }

    /// Returns the shortest time, or 0 if the step did not run.
    fn fastest(&self) -> Duration {
        self.times.iter().min().copied().unwrap_or_default()
    }

    fn has_run(&self) -> bool {
        !self.times.is_empty()
    }

    /// Returns the ratio of the median time to the shortest. The step has run.
    fn spread(&mut self) -> f64 {
        self.times.sort_unstable();
        let median = self.times[self.times.len() / 2];
        median.as_secs_f64() / self.fastest().as_secs_f64().max(1e-9)
    }

    /// Returns the number of pages that the step uses.
    fn pages(&self) -> usize {
        let rows = self.batch.rows().iter();
        rows.map(|row| self.batch.pages(row).len()).sum()
    }

    fn large(self) -> CalibrationStep {
        CalibrationStep {
            is_large: true,
            ..self
        }
    }
}

/// Returns the steps to time, as far as `limits` and the `free` pages allow. They measure tokens,
/// keys of decodes, keys of a chunk and logits; then come the large steps. If there is no time for
/// all of them, the first ones tell most.
fn calibration_steps(
    limits: &Limits,
    free: FreeMemory<'_>,
    vocabulary: usize,
) -> Vec<CalibrationStep> {
    let step =
        |count, tokens, logits| CalibrationStep::new(free, vocabulary, count, tokens, logits);
    let pages = free.pages.len();
    let running = limits.max_running as usize;
    let sequences = running.min(free.sequences()).min(limits.max_batch_tokens());
    let longest = usize::try_from(limits.longest_sequence()).unwrap_or(usize::MAX);
    let long = LONG_CONTEXT.min(longest) / PAGE_TOKENS * PAGE_TOKENS;
    // Each token has its own sequence, or all are in one if the limits allow fewer sequences.
    let tokens = |count| {
        if count <= sequences {
            Some(step(count, (0, 1), 0))
        } else {
            let longest = longest
                .min(limits.max_batch_tokens())
                .min(pages * PAGE_TOKENS);
            (count <= longest).then(|| step(1, (0, count), 0))
        }
    };
    let mut steps: Vec<CalibrationStep> = [1, 16].into_iter().filter_map(tokens).collect();
    let add_logits = |steps: &mut Vec<CalibrationStep>, count| {
        if count <= sequences {
            steps.push(step(count, (0, 1), 1));
        }
    };
    add_logits(&mut steps, 1);
    add_logits(&mut steps, 4);
    if long > PAGE_TOKENS && long <= pages * PAGE_TOKENS {
        let count = LONG_SEQUENCES
            .min(sequences)
            .min(pages / (long / PAGE_TOKENS));
        let chunk = (long - PAGE_TOKENS, PAGE_TOKENS);
        steps.push(step(count, (long - 1, 1), 0));
        steps.push(step(1, chunk, 0));
    }
    steps.extend([4, 8, 2].into_iter().filter_map(tokens));
    let large = [32, 64, 128, 256, 512].into_iter().filter_map(tokens);
    steps.extend(large.map(CalibrationStep::large));
    if sequences >= 16 {
        steps.push(step(16, (0, 1), 1).large());
    }
    steps
}

/// Runs one step with greedy draws, and returns its duration. NaN logits, which unwritten memory
/// may lead to, take as long as others.
fn time<F: Forward>(runner: &mut BatchRunner<F>, batch: &Batch) -> Duration {
    let params = SamplingParams::greedy();
    let rules = OutputRules {
        max_new_tokens: 1,
        ..OutputRules::default()
    };
    let started = Instant::now();
    // A step costs most if a draw needs all logits.
    runner.run_with_all_logits(batch, |_| Continuation {
        params: &params,
        rules: &rules,
        known: &[0],
        ahead: &[],
        prompt_tokens: 1,
        masks: None,
    });
    let duration = started.elapsed();
    runner.sampler().take_draws().for_each(drop);
    duration
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::model::toy;

    /// The model only runs steps that it could also run in service.
    #[test]
    fn calibration_steps_respect_the_limits() {
        for (pages, max_running, max_sequence_tokens) in [
            (1, 1, 16),
            (2, 3, 20),
            (40, 8, 300),
            (300, 64, 4096),
            (5000, 128, 4096),
        ] {
            let limits = Limits {
                pages,
                max_running,
                max_queued: 1,
                max_queued_time: u64::MAX,
                step_tokens: 48,
                prefill_chunk: 16,
                max_sequence_tokens,
                states: None,
                diffusion: None,
            };
            // Fewer and other pages may be free than at the start.
            let free = (0..pages)
                .rev()
                .step_by(2)
                .map(Page::new)
                .collect::<Vec<_>>();
            for CalibrationStep { batch, shape, .. } in
                calibration_steps(&limits, FreeMemory::of_pages(&free), 7)
            {
                assert!(
                    batch.token_count() <= limits.max_batch_tokens(),
                    "{limits:?}"
                );
                assert!(batch.logits_count() <= max_running as usize, "{limits:?}");
                let tokens = batch.rows().iter().flat_map(|row| batch.tokens(row));
                assert!(tokens.clone().all(|&token| token < 7), "{limits:?}");
                let distinct: std::collections::BTreeSet<_> = tokens.collect();
                assert_eq!(distinct.len(), batch.token_count().min(7), "{limits:?}");
                assert_eq!(shape.rows, batch.token_count() as u64);
                assert_eq!(shape.logits, batch.logits_count() as u64);
                let mut used: Vec<usize> = batch
                    .rows()
                    .iter()
                    .flat_map(|row| batch.pages(row))
                    .map(|page| page.index())
                    .collect();
                let count = used.len();
                used.sort_unstable();
                used.dedup();
                assert_eq!(used.len(), count, "pages are distinct");
                let is_free = |&page: &usize| free.iter().any(|free| free.index() == page);
                assert!(used.iter().all(is_free), "{limits:?}");
                let end = batch.rows().iter().map(|row| row.end()).max();
                assert!(end <= Some(max_sequence_tokens as usize), "{limits:?}");
            }
        }
    }

    fn steps(times: &[[u64; 4]]) -> Vec<CalibrationStep> {
        let free: Vec<Page> = (0..4).map(Page::new).collect();
        let step = |times: &[u64; 4]| CalibrationStep {
            times: times.map(Duration::from_millis).to_vec(),
            ..CalibrationStep::new(FreeMemory::of_pages(&free), 7, 1, (0, 1), 0)
        };
        times.iter().map(step).collect()
    }

    #[test]
    fn repetitions_that_differ_show_a_disturbance() {
        let spread_of = |times: &[[u64; 4]]| {
            let calibration = evaluate(&mut steps(times), Interference::default());
            (calibration.is_disturbed(), calibration.cost)
        };
        let calm = [[20, 21, 20, 22], [21, 20, 20, 20]];
        let (is_disturbed, cost) = spread_of(&calm);
        let predicted = cost.predict(steps(&calm)[0].shape);
        assert!(
            !is_disturbed && predicted.abs_diff(20_000_000) < 200_000,
            "{cost:?}"
        );
        // One long repetition is no disturbance.
        assert!(!spread_of(&[[20, 90, 20, 21]; 3]).0);
        assert!(spread_of(&[[20, 31, 44, 27]; 3]).0);
        let waited = Interference {
            waited: 0.4,
            ..Interference::default()
        };
        assert!(evaluate(&mut steps(&calm), waited).is_disturbed());
    }

    fn limits_of_toy() -> Limits {
        Limits {
            pages: 8,
            max_running: 4,
            max_queued: 1,
            max_queued_time: u64::MAX,
            step_tokens: 48,
            prefill_chunk: 16,
            max_sequence_tokens: 64,
            states: None,
            diffusion: None,
        }
    }

    fn runner_of_toy(limits: &Limits) -> BatchRunner<crate::model::Model> {
        let model = toy::model(1);
        let kv_store = Forward::new_kv_store(&model, limits).unwrap();
        BatchRunner::new(model, kv_store)
    }

    #[test]
    fn without_time_the_first_steps_alone_are_measured_and_the_rest_later() {
        let limits = limits_of_toy();
        let mut runner = runner_of_toy(&limits);
        let free: Vec<Page> = (2..8).map(Page::new).collect();
        let mut steps_run = |small_limit, limit| {
            let steps = calibration_steps(&limits, FreeMemory::of_pages(&free), 7);
            let small = steps.iter().filter(|step| !step.is_large).count();
            let asked = Cell::new(0);
            let calibration = measure(&mut runner, steps, [small_limit, limit], || {
                asked.set(asked.get() + 1);
                false
            });
            let calibration = calibration.unwrap();
            let [decode, chunk] = [StepShape::decode(1), StepShape::chunk(0, 16, 0)];
            let predicted = [decode, chunk].map(|shape| calibration.cost.predict(shape));
            assert!(
                0 < predicted[0] && predicted[0] <= predicted[1],
                "{predicted:?}"
            );
            (asked.get(), small, calibration.is_complete)
        };
        let (run, small, is_complete) = steps_run(Duration::ZERO, Duration::ZERO);
        assert!(
            (run, is_complete) == (2, false) && small > 4,
            "{run} of {small}"
        );
        let (run, small, is_complete) = steps_run(Duration::MAX, Duration::ZERO);
        assert_eq!((run, is_complete), (small, true));
        let missing = Calibration {
            is_complete: false,
            ..evaluate(&mut steps(&[[20, 21, 20, 22]]), Interference::default())
        };
        assert!(missing.is_disturbed());
    }

    #[test]
    fn a_command_interrupts_the_measurement_after_at_most_one_step() {
        let limits = limits_of_toy();
        let mut runner = runner_of_toy(&limits);
        let mut recalibration = Recalibration {
            limits,
            pause: FIRST_PAUSE,
        };
        let free: Vec<Page> = (2..8).map(Page::new).collect();
        for steps in [0, 1, 5] {
            let asked = Cell::new(0);
            let cost = recalibration.measure(&mut runner, FreeMemory::of_pages(&free), || {
                asked.set(asked.get() + 1);
                asked.get() > steps
            });
            assert_eq!((cost, asked.get()), (None, steps + 1));
        }
        assert_eq!(
            recalibration.pause(),
            FIRST_PAUSE,
            "an interruption is no disturbance"
        );
    }
}
