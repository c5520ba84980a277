//! What the sampling parameters of a request add to its draws, by kind.
//!
//! It is measured at the start, and again in an idle moment if other work disturbed the start.
//!
//! The cost of a step contains plain draws, which are greedy. The scheduler adds the rest to the
//! predictions of a request's steps and charges it to the request's tenant.

use std::time::{Duration, Instant};

use sterna_kernels::Kernels;
use sterna_random::Random;
use sterna_scheduler::{
    Batch, MAX_DRAW_TIME, Nanos, OutputRules, PAGE_TOKENS, Page, SequenceId, TokenId,
};

use super::batch_runner::BatchRunner;
use super::batch_sampler::{BatchSampler, Continuation};
use super::calibrate::FreeMemory;
use super::forward::{CopyRow, Forward, LogitRows};
use super::request::GenerationRequest;
use super::sampling_params::{MAX_LOGPROBS, SamplingParams};

/// The least repetitions of each kind. The fastest counts, because other load makes a draw longer,
/// never shorter. There are more until the two fastest differ by less than [`MAX_DIFFERENCE`].
const REPETITIONS: u64 = 5;

/// One part in this many: the greatest difference between the two fastest draws of a kind.
const MAX_DIFFERENCE: u32 = 10;

/// The time after which a kind is repeated no more.
const TIME_LIMIT: Duration = Duration::from_millis(100);

/// The top-k up to which a small one is measured.
const SMALL_TOP_K: usize = 64;

/// The top-k up to which a medium one is measured.
const MEDIUM_TOP_K: usize = 2048;

/// The number of tokens before each measured draw.
const HISTORY: usize = 1024;

/// The time that each kind of sampling adds to a greedy draw, divided by the number of threads that
/// draw at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SamplingCosts {
    vocabulary: usize,
    random: Nanos,  // A draw from all tokens.
    nucleus: Nanos, // Top-p or min-p without top-k.
    small_top_k: Nanos,
    medium_top_k: Nanos,
    large_top_k: Nanos,
    logprobs: Nanos,
    changed_logits: Nanos, // By a bias, a penalty, a mask or a minimum length.
    kilo_history: Nanos,   // A repetition penalty for each 1,024 tokens of the prompt.
}

impl SamplingCosts {
    /// Measures draws on all threads of the model. It writes to `free` memory.
    pub(super) fn measure<F: Forward>(
        runner: &mut BatchRunner<F>,
        free: FreeMemory<'_>,
    ) -> SamplingCosts {
        let (model, kv_store, sampler) = runner.parts();
        let vocabulary = model.vocabulary();
        let row = random_row(vocabulary);
        let mut batch = Batch::new();
        let token = TokenId::default();
        batch.push_row(SequenceId::new(0, 0), 0, &[token], &free.pages[..1], 1);
        if let Some(states) = free.row_states(0) {
            batch.set_states(states);
        }
        let logits = SameRow {
            logits: model.forward(&batch, kv_store),
            row: &row,
        };
        let mut bench = DrawBench::new(sampler, logits, vocabulary);
        let costs = bench.measure(vocabulary);
        bench.sampler.take_draws().for_each(drop);
        tracing::debug!(
            ?costs,
            "what sampling parameters add to a draw, in nanoseconds"
        );
        costs
    }

    /// Returns what each draw of a request costs beyond a greedy one.
    pub(super) fn of(&self, request: &GenerationRequest) -> Nanos {
        let params = &request.sampling;
        let penalizes_prompt = params.repetition_penalty != 1.0;
        let changes_logits = penalizes_prompt
            || params.frequency_penalty != 0.0
            || params.presence_penalty != 0.0
            || !params.logit_bias.is_empty()
            || params.grammar.is_some()
            || request.min_new_tokens > 0 && !request.stop_tokens.is_empty();
        let reports_logprobs = params.logprobs.or(params.prompt_logprobs).is_some();
        let when = |applies: bool, cost: Nanos| if applies { cost } else { 0 };
        let history = self.kilo_history * request.prompt.len() as Nanos / HISTORY as Nanos;
        let draw_time = self.of_choice(params)
            + when(reports_logprobs, self.logprobs)
            + when(changes_logits, self.changed_logits)
            + when(penalizes_prompt, history);
        draw_time.min(MAX_DRAW_TIME)
    }

    fn of_choice(&self, params: &SamplingParams) -> Nanos {
        let top_k = params.top_k as usize;
        if params.temperature == 0.0 || top_k == 1 {
            0
        } else if top_k == 0 || top_k >= self.vocabulary {
            let is_nucleus = params.top_p < 1.0 || params.min_p > 0.0;
            if is_nucleus {
                self.nucleus
            } else {
                self.random
            }
        } else if top_k <= SMALL_TOP_K {
            self.small_top_k
        } else if top_k <= MEDIUM_TOP_K {
            self.medium_top_k
        } else {
            self.large_top_k
        }
    }
}

/// Returns a row of logits that are about normally distributed, as a model's logits are.
fn random_row(vocabulary: usize) -> Vec<f32> {
    let mut random = Random::new(1);
    let mut logit = || {
        let sixths = (0..6).map(|_| random.below(1000) as f32 / 250.0);
        sixths.sum::<f32>()
    };
    (0..vocabulary).map(|_| logit()).collect()
}

/// The logits of a step in which every row is replaced by `row`. The real rows may contain NaN,
/// because the calibration reads unwritten memory.
struct SameRow<'a, L> {
    logits: L,
    row: &'a [f32],
}

impl<L: LogitRows> LogitRows for SameRow<'_, L> {
    fn copy_row(&self, _: usize, logits: &mut [f32]) {
        logits.copy_from_slice(self.row);
    }

    fn kernels(&self) -> Kernels {
        self.logits.kernels()
    }

    fn workers(&self) -> usize {
        self.logits.workers()
    }

    fn share<T: Send>(
        &mut self,
        parts: impl Iterator<Item = T>,
        work: impl Fn(T, &CopyRow<'_>) + Sync,
    ) {
        let row = self.row;
        self.logits.share(parts, |part, _| {
            work(part, &|_, logits: &mut [f32]| logits.copy_from_slice(row));
        });
    }
}

/// Draws on every thread at the same time.
struct DrawBench<'a, L> {
    sampler: &'a mut BatchSampler,
    logits: L,
    batch: Batch, // One row for each thread.
    history: Vec<TokenId>,
}

impl<'a, L: LogitRows> DrawBench<'a, L> {
    fn new(sampler: &'a mut BatchSampler, logits: L, vocabulary: usize) -> DrawBench<'a, L> {
        let tokens = (0..HISTORY).map(|at| (at * 31 % vocabulary) as TokenId);
        let history: Vec<TokenId> = tokens.collect();
        let pages: Vec<Page> = (0..).map(Page::new).take(HISTORY / PAGE_TOKENS).collect();
        let mut batch = Batch::new();
        for index in 0..logits.workers() {
            let id = SequenceId::new(index as u32, 0);
            batch.push_row(id, HISTORY - 1, &history[HISTORY - 1..], &pages, 1);
        }
        DrawBench {
            sampler,
            logits,
            batch,
            history,
        }
    }

    fn measure(&mut self, vocabulary: usize) -> SamplingCosts {
        let workers = self.batch.rows().len() as Nanos;
        let greedy = self.time(&SamplingParams::greedy());
        let mut more = |change: &dyn Fn(&mut SamplingParams), than: Nanos| {
            let mut params = SamplingParams::greedy();
            change(&mut params);
            self.time(&params).saturating_sub(than) / workers
        };
        let top_k = |top_k: usize| {
            move |params: &mut SamplingParams| {
                (params.temperature, params.top_k, params.top_p) = (1.0, top_k as u32, 0.95);
            }
        };
        let changed_logits = more(&|params| params.logit_bias = vec![(0, 1.0)], greedy);
        let penalized = more(&|params| params.repetition_penalty = 1.1, greedy);
        SamplingCosts {
            vocabulary,
            random: more(&|params| params.temperature = 1.0, greedy),
            nucleus: more(&top_k(0), greedy),
            small_top_k: more(&top_k(SMALL_TOP_K), greedy),
            medium_top_k: more(&top_k(MEDIUM_TOP_K), greedy),
            large_top_k: more(&top_k(vocabulary - 1), greedy),
            logprobs: more(&|params| params.logprobs = Some(MAX_LOGPROBS), greedy),
            changed_logits,
            kilo_history: penalized.saturating_sub(changed_logits),
        }
    }

    /// Returns the shortest time of a draw on every thread.
    fn time(&mut self, params: &SamplingParams) -> Nanos {
        let rules = OutputRules {
            max_new_tokens: 1,
            ..OutputRules::default()
        };
        let time = fastest(|seed| {
            let params = SamplingParams {
                seed,
                ..params.clone()
            };
            let started = Instant::now();
            self.sampler
                .sample(&self.batch, &mut self.logits, |_| Continuation {
                    params: &params,
                    rules: &rules,
                    known: &self.history,
                    ahead: &[],
                    prompt_tokens: HISTORY,
                    masks: None,
                });
            started.elapsed()
        });
        time.as_nanos() as Nanos
    }
}

/// Repeats a measurement. Returns its shortest time.
fn fastest(mut time: impl FnMut(u64) -> Duration) -> Duration {
    let (mut least, mut second, mut total) = (Duration::MAX, Duration::MAX, Duration::ZERO);
    for repetition in 0.. {
        let agree = || second - least <= least / MAX_DIFFERENCE;
        if repetition >= REPETITIONS && (agree() || total > TIME_LIMIT) {
            break;
        }
        let took = time(repetition);
        total += took;
        second = second.min(took.max(least));
        least = least.min(took);
    }
    least
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use sterna_scheduler::TenantId;

    use super::*;
    use crate::model::toy;

    const COSTS: SamplingCosts = SamplingCosts {
        vocabulary: 131_072,
        random: 2,
        nucleus: 5,
        small_top_k: 10,
        medium_top_k: 100,
        large_top_k: 1_000,
        logprobs: 10_000,
        changed_logits: 100_000,
        kilo_history: 1_024_000,
    };

    fn cost(change: impl Fn(&mut GenerationRequest)) -> Nanos {
        let mut request = GenerationRequest {
            prompt: vec![1; 30],
            sampling: SamplingParams::default(),
            max_new_tokens: 20,
            is_length_given: false,
            min_new_tokens: 0,
            stop_tokens: vec![2],
            tenant: TenantId(0),
            sub_tenant: None,
            band: None,
            arrived: Instant::now(),
            first_token_within: None,
            ends_within: None,
        };
        change(&mut request);
        COSTS.of(&request)
    }

    #[test]
    fn a_request_costs_what_its_parameters_ask_for() {
        assert_eq!(cost(|_| {}), 2);
        assert_eq!(cost(|request| request.sampling.top_p = 0.9), 5);
        assert_eq!(cost(|request| request.sampling.top_k = 40), 10);
        assert_eq!(cost(|request| request.sampling.top_k = 2_000), 100);
        assert_eq!(cost(|request| request.sampling.top_k = 100_000), 1_000);
        let greedy = |request: &mut GenerationRequest| {
            (request.sampling.top_k, request.sampling.temperature) = (100_000, 0.0);
        };
        assert_eq!(cost(greedy), 0);
        assert_eq!(cost(|request| request.sampling.top_k = 131_072), 2);
        assert_eq!(cost(|request| request.sampling.logprobs = Some(0)), 10_002);
        assert_eq!(cost(|request| request.min_new_tokens = 5), 100_002);
        let frequency = cost(|request| request.sampling.frequency_penalty = 0.5);
        assert_eq!(frequency, 100_002);
        let repetition = |request: &mut GenerationRequest| {
            request.sampling.repetition_penalty = 1.2;
        };
        assert_eq!(cost(repetition), 100_002 + 30_000);
        let long = cost(|request| {
            repetition(request);
            request.prompt = vec![1; 1_000_000];
        });
        assert_eq!(long, MAX_DRAW_TIME);
    }

    #[test]
    fn a_disturbed_draw_is_repeated_until_two_agree() {
        let measured = |micros: &[u64]| {
            let mut times = micros.iter().copied();
            let time = |_| Duration::from_micros(times.next().expect("another repetition"));
            (fastest(time).as_micros(), times.len())
        };
        assert_eq!(measured(&[30, 20, 21, 50, 40, 1]), (20, 1));
        assert_eq!(
            measured(&[900, 700, 500, 300, 200, 20, 600, 21, 1]),
            (20, 1)
        );
        let slow = [30_000, 60_000, 40_000, 90_000, 50_000, 1];
        assert_eq!(measured(&slow), (30_000, 1), "the time is over");
    }

    #[test]
    fn every_kind_is_measured() {
        let mut model = toy::model(2);
        let kv_store = model.new_kv_store(1).unwrap();
        let mut runner = BatchRunner::new(&mut model, kv_store);
        let costs = SamplingCosts::measure(&mut runner, FreeMemory::of_pages(&[Page::new(0)]));
        assert!(
            costs.vocabulary > 0 && costs.large_top_k < MAX_DRAW_TIME,
            "{costs:?}"
        );
        assert_eq!(runner.sampler().draws(), [], "nothing is left of it");
    }
}
