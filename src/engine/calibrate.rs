//! What a step costs on this machine: a few hand-built steps, timed before the engine takes requests.
//!
//! The keys and values that they write stay in pages that are all free, so nobody will read them. Histories are not
//! computed but read as they lie in fresh memory, which caches serve faster than a long conversation: the scheduler
//! corrects its predictions by what steps then take.

use std::time::{Duration, Instant};

use sterna_scheduler::{
    Batch, CostModel, Limits, Nanos, PAGE_TOKENS, Page, SequenceId, StepShape, TokenId,
};

use super::batch_sampler::{BatchSampler, Continued, Terms};
use super::{Forward, SamplingParams};

/// How long it may take; a machine too slow for one round of the small steps takes longer.
const TIME_LIMIT: Duration = Duration::from_millis(1_800);

/// Repetitions of a step. The fastest counts: what else the machine does makes a step longer, never shorter.
const REPETITIONS: usize = 8;

/// Keys of the steps that show what attention costs.
const LONG_CONTEXT: usize = 1024;

/// Sequences of such a step.
const LONG_SEQUENCES: usize = 4;

/// Measures steps of `model`, and fits a cost model to them. `kv_store` holds `limits.pages` pages, all free. What serves takes
/// part (`sampler` draws the tokens), so that the first request finds less that was never used.
pub(super) fn calibrate<F: Forward>(
    model: &mut F,
    kv_store: &mut F::KvStore,
    sampler: &mut BatchSampler,
    limits: &Limits,
) -> CostModel {
    let started = Instant::now();
    let mut bench = Bench {
        model,
        kv_store,
        sampler,
    };
    let mut probes = probes(limits);
    // The first step finds cold caches, sleeping threads, and pages that the system has not given yet: it is one that all need.
    let needed = probes.iter().filter(|probe| !probe.is_large);
    if let Some(widest) = needed.max_by_key(|probe| probe.pages()) {
        bench.time(&widest.batch);
    }
    let mut longest = Duration::ZERO;
    for probe in &mut probes {
        if probe.is_large && started.elapsed() + 3 * longest > TIME_LIMIT {
            continue;
        }
        probe.fastest = bench.time(&probe.batch);
        longest = longest.max(probe.fastest);
    }
    probes.retain(|probe| probe.fastest > Duration::ZERO);
    for _ in 1..REPETITIONS {
        for probe in &mut probes {
            if started.elapsed() + probe.fastest <= TIME_LIMIT {
                probe.fastest = probe.fastest.min(bench.time(&probe.batch));
            }
        }
    }
    let samples: Vec<(StepShape, Nanos)> = probes
        .iter()
        .map(|probe| (probe.shape, probe.fastest.as_nanos() as Nanos))
        .collect();
    let cost = CostModel::fit(&samples);
    tracing::info!(
        milliseconds = started.elapsed().as_millis() as u64,
        samples = samples.len(),
        ?cost,
        "measured what a step takes"
    );
    cost
}

/// A step to be timed.
struct Probe {
    batch: Batch,
    shape: StepShape,
    is_large: bool, // Only if there is time for it.
    fastest: Duration,
}

impl Probe {
    /// A step of `count` sequences, each with `tokens` tokens after `history` others, in pages of its own.
    fn new(count: usize, history: usize, tokens: usize, logits: usize) -> Probe {
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
        Probe {
            batch,
            shape,
            is_large: false,
            fastest: Duration::ZERO,
        }
    }

    /// How many of the store's pages it uses.
    fn pages(&self) -> usize {
        let rows = self.batch.rows().iter();
        rows.map(|row| self.batch.pages(row).len()).sum()
    }

    fn large(self) -> Probe {
        Probe {
            is_large: true,
            ..self
        }
    }
}

/// The steps to time, as far as `limits` allow: tokens, keys of decodes, keys of a chunk, logits, and many of each last.
fn probes(limits: &Limits) -> Vec<Probe> {
    let pages = limits.pages as usize;
    let running = limits.max_running as usize;
    let sequences = running.min(pages).min(limits.max_batch_tokens());
    let longest = usize::try_from(limits.longest_sequence()).unwrap_or(usize::MAX);
    let long = LONG_CONTEXT.min(longest) / PAGE_TOKENS * PAGE_TOKENS;
    // Each a sequence of its own, or all of one where there may not be as many.
    let tokens = |count| {
        if count <= sequences {
            Some(Probe::new(count, 0, 1, 0))
        } else {
            (count <= longest.min(limits.max_batch_tokens())).then(|| Probe::new(1, 0, count, 0))
        }
    };
    let mut probes: Vec<Probe> = [1, 2, 4, 8, 16].into_iter().filter_map(tokens).collect();
    if long > PAGE_TOKENS {
        let many = LONG_SEQUENCES
            .min(sequences)
            .min(pages / (long / PAGE_TOKENS));
        probes.push(Probe::new(many, long - 1, 1, 0));
        probes.push(Probe::new(1, long - PAGE_TOKENS, PAGE_TOKENS, 0));
    }
    for count in [1, 4] {
        if count <= sequences {
            probes.push(Probe::new(count, 0, 1, 1));
        }
    }
    let many = [32, 64, 128].into_iter().filter_map(tokens);
    probes.extend(many.map(Probe::large));
    if sequences >= 16 {
        probes.push(Probe::new(16, 0, 1, 1).large());
    }
    probes
}

struct Bench<'a, F: Forward> {
    model: &'a mut F,
    kv_store: &'a mut F::KvStore,
    sampler: &'a mut BatchSampler,
}

impl<F: Forward> Bench<'_, F> {
    /// One step, with greedy draws.
    fn time(&mut self, batch: &Batch) -> Duration {
        let greedy = SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        };
        let terms = Terms {
            sampling: greedy,
            min_new_tokens: 0,
            max_new_tokens: 1,
            stop_tokens: Vec::new(),
        };
        let started = Instant::now();
        let mut logits = self.model.forward(batch, self.kv_store);
        // Whatever a model makes of a context that nobody wrote, a number or none, takes the same time.
        self.sampler.sample(batch, &mut logits, |_| Continued {
            terms: &terms,
            known: &[0],
            prompt_tokens: 1,
        });
        let took = started.elapsed();
        self.sampler.outputs.clear(); // Nobody asked for them.
        took
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every step that a model is asked for is one that it could be asked for in service.
    #[test]
    fn probes_respect_the_limits() {
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
            for Probe { batch, shape, .. } in probes(&limits) {
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
                let all = used.len();
                used.sort_unstable();
                used.dedup();
                assert_eq!(used.len(), all, "pages are distinct");
                assert!(used.iter().all(|&page| page < pages as usize), "{limits:?}");
                let end = batch.rows().iter().map(|row| row.end()).max();
                assert!(end <= Some(max_sequence_tokens as usize), "{limits:?}");
            }
        }
    }
}
