//! Measures the cost of a step: times a few hand-built steps before the engine takes requests.
//!
//! The steps write into pages that are all free, so no request reads what they wrote. The steps
//! with a long history do not compute that history: they read unwritten memory. Caches serve such
//! memory faster than a real history, and the scheduler corrects its predictions by the times of
//! real steps.

use std::time::{Duration, Instant};

use sterna_scheduler::{
    Batch, CostModel, Limits, Nanos, OutputRules, PAGE_TOKENS, Page, SequenceId, StepShape, TokenId,
};

use super::batch_runner::BatchRunner;
use super::batch_sampler::Continuation;
use super::forward::Forward;
use super::sampling_params::SamplingParams;

/// The time for the whole calibration. A machine that is too slow for one round of the small steps
/// takes longer.
const TIME_LIMIT: Duration = Duration::from_millis(1_800);

/// Repetitions of a step. The fastest counts, because other load makes a step longer, never
/// shorter.
const REPETITIONS: usize = 8;

/// The context length of the steps that measure attention.
const LONG_CONTEXT: usize = 1024;

/// The number of sequences in a step that measures attention.
const LONG_SEQUENCES: usize = 4;

/// Times steps and fits a cost model to them. All pages that `limits` allow are free. The sampler
/// takes part, so that its memory is warm for the first request.
pub(super) fn calibrate<F: Forward>(runner: &mut BatchRunner<F>, limits: &Limits) -> CostModel {
    let started = Instant::now();
    let mut steps = calibration_steps(limits);
    // The first step finds cold caches, sleeping threads and unmapped pages. So the largest of the
    // small steps runs once, untimed.
    let small = steps.iter().filter(|step| !step.is_large);
    if let Some(largest) = small.max_by_key(|step| step.pages()) {
        time(runner, &largest.batch);
    }
    let mut longest = Duration::ZERO;
    for step in &mut steps {
        if step.is_large && started.elapsed() + 3 * longest > TIME_LIMIT {
            continue;
        }
        step.fastest = time(runner, &step.batch);
        longest = longest.max(step.fastest);
    }
    steps.retain(|step| step.fastest > Duration::ZERO);
    for _ in 1..REPETITIONS {
        for step in &mut steps {
            if started.elapsed() + step.fastest <= TIME_LIMIT {
                step.fastest = step.fastest.min(time(runner, &step.batch));
            }
        }
    }
    let samples: Vec<(StepShape, Nanos)> = steps
        .iter()
        .map(|step| (step.shape, step.fastest.as_nanos() as Nanos))
        .collect();
    let cost = CostModel::fit(&samples);
    tracing::info!(
        milliseconds = started.elapsed().as_millis() as u64,
        samples = samples.len(),
        ?cost,
        "measured the cost of a step"
    );
    cost
}

/// A step whose time is measured.
struct CalibrationStep {
    batch: Batch,
    shape: StepShape,
    is_large: bool, // Runs only if there is time for it.
    fastest: Duration,
}

impl CalibrationStep {
    /// Returns a step of `count` sequences. Each has `tokens` tokens after a history of `history`
    /// tokens, in its own pages.
    fn new(count: usize, history: usize, tokens: usize, logits: usize) -> CalibrationStep {
        let mut batch = Batch::new();
        let mut shape = StepShape::default();
        let ids = vec![TokenId::default(); tokens];
        let pages = (history + tokens).div_ceil(PAGE_TOKENS);
        for index in 0..count {
            let first = index * pages;
            let table: Vec<Page> = (first..first + pages)
                .map(|page| Page::new(page as u32))
                .collect();
            let id = SequenceId::new(index as u32, 0);
            batch.push_row(id, history, &ids, &table, logits);
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
            fastest: Duration::ZERO,
        }
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

/// Returns the steps to time, as far as `limits` allow. They measure tokens, keys of decodes, keys
/// of a chunk and logits; then come the large steps.
fn calibration_steps(limits: &Limits) -> Vec<CalibrationStep> {
    let pages = limits.pages as usize;
    let running = limits.max_running as usize;
    let sequences = running.min(pages).min(limits.max_batch_tokens());
    let longest = usize::try_from(limits.longest_sequence()).unwrap_or(usize::MAX);
    let long = LONG_CONTEXT.min(longest) / PAGE_TOKENS * PAGE_TOKENS;
    // Each token has its own sequence, or all are in one if the limits allow fewer sequences.
    let tokens = |count| {
        if count <= sequences {
            Some(CalibrationStep::new(count, 0, 1, 0))
        } else {
            (count <= longest.min(limits.max_batch_tokens()))
                .then(|| CalibrationStep::new(1, 0, count, 0))
        }
    };
    let small = [1, 2, 4, 8, 16].into_iter().filter_map(tokens);
    let mut steps: Vec<CalibrationStep> = small.collect();
    if long > PAGE_TOKENS {
        let count = LONG_SEQUENCES
            .min(sequences)
            .min(pages / (long / PAGE_TOKENS));
        steps.push(CalibrationStep::new(count, long - 1, 1, 0));
        steps.push(CalibrationStep::new(1, long - PAGE_TOKENS, PAGE_TOKENS, 0));
    }
    for count in [1, 4] {
        if count <= sequences {
            steps.push(CalibrationStep::new(count, 0, 1, 1));
        }
    }
    let large = [32, 64, 128].into_iter().filter_map(tokens);
    steps.extend(large.map(CalibrationStep::large));
    if sequences >= 16 {
        steps.push(CalibrationStep::new(16, 0, 1, 1).large());
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
    runner.run(batch, |_| Continuation {
        params: &params,
        rules: &rules,
        known: &[0],
        prompt_tokens: 1,
    });
    let duration = started.elapsed();
    runner.sampler().take_draws().for_each(drop);
    duration
}

#[cfg(test)]
mod tests {
    use super::*;

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
            };
            for CalibrationStep { batch, shape, .. } in calibration_steps(&limits) {
                assert!(
                    batch.token_count() <= limits.max_batch_tokens(),
                    "{limits:?}"
                );
                assert!(batch.logits_count() <= max_running as usize, "{limits:?}");
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
                assert!(used.iter().all(|&page| page < pages as usize), "{limits:?}");
                let end = batch.rows().iter().map(|row| row.end()).max();
                assert!(end <= Some(max_sequence_tokens as usize), "{limits:?}");
            }
        }
    }
}
