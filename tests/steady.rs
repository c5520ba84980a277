//! A steady step takes no memory: nothing is allocated by plan, forward pass, draws and commit, nor by handing work to threads.
//!
//! This is the engine thread's inner loop without its channels: plan, forward, sample, commit. What the engine allocates beside it,
//! once a step, is the list of notices that leaves with the step's one message; the channel takes a block for every few messages.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use sterna::engine::{
    BatchSampler, Continued, Forward, Limits, LogitRows, Policy, SamplingParams, Terms,
};
use sterna::model::{KvStore, LoadOptions, Model, toy};
use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::{CostModel, Event, PAGE_TOKENS, Plan, Request, Scheduler, SequenceId};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Steps that are counted, over several pages of every sequence.
const STEPS: usize = 5 * PAGE_TOKENS;

/// Allocations of one kind of work.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Counts {
    deciding: usize,
    forward: usize,
    sampling: usize,
    threads: usize, // A job for every thread that does nothing.
}

struct Loop {
    scheduler: Scheduler,
    model: Model,
    kv_store: KvStore,
    sampler: BatchSampler,
    terms: Vec<(SequenceId, Terms)>,
    now: u64,
}

/// Greedy, plain, and with each filter and penalty; none reports log-probabilities, which leave with the token.
fn ways_to_sample() -> Vec<SamplingParams> {
    let plain = SamplingParams::default();
    let mut ways = vec![plain; 7];
    ways[0].temperature = 0.0;
    ways[1].temperature = 0.7;
    ways[2].top_k = 5;
    ways[3].top_p = 0.9;
    ways[4].min_p = 0.1;
    (ways[5].repetition_penalty, ways[5].top_p) = (1.2, 0.8);
    (ways[6].frequency_penalty, ways[6].top_k) = (0.3, 40);
    (ways[6].top_p, ways[6].logit_bias) = (0.7, vec![(3, 1.0)]);
    ways
}

impl Loop {
    fn new(threads: usize, exact_head_bytes: usize) -> Loop {
        let kernels = Kernels::new(Isa::best()).unwrap();
        let options = LoadOptions {
            exact_head_bytes,
            ..LoadOptions::new(kernels, threads)
        };
        let model = Model::load(&toy::source(), options).unwrap();
        let limits = Limits {
            pages: 512,
            max_running: 16,
            max_queued: 16,
            max_queued_time: u64::MAX,
            step_tokens: 256,
            prefill_chunk: 64,
            max_sequence_tokens: 1000,
        };
        let policy = Policy {
            max_draft: 0, // What is copied to check drafts grows with the sequence.
            ..Policy::default()
        };
        let mut scheduler = Scheduler::new(limits, policy);
        scheduler.calibrate(CostModel {
            rows: CostModel::roofline(1_000_000, 1_000),
            kilo_decode_keys: 0,
            kilo_chunk_keys: 0,
            head: 0,
            logit: 0,
        });
        let mut terms = Vec::new();
        for (index, sampling) in (0..).zip(ways_to_sample()) {
            let request = Request {
                prompt: (0..20).map(|i| (i * 7 + 31 * index) % 512).collect(),
                max_new_tokens: 900,
                ..Request::default()
            };
            let id = scheduler.submit(0, request).unwrap();
            let asked = Terms {
                sampling,
                min_new_tokens: 0,
                max_new_tokens: 900,
                stop_tokens: Vec::new(),
            };
            terms.push((id, asked));
        }
        Loop {
            scheduler,
            kv_store: model.new_kv_store(512),
            sampler: BatchSampler::new(model.config().vocab),
            model,
            terms,
            now: 0,
        }
    }

    /// One step; how many rows it had, all of them decodes.
    fn step(&mut self, counts: &mut Counts) -> Option<usize> {
        self.now += 1_000;
        let mut counted = Region::new(ALLOCATOR);
        let mut since = move || {
            let count = counted.change().allocations;
            counted.reset();
            count
        };
        let Plan::Step(step) = self.scheduler.plan(self.now) else {
            panic!("there is work");
        };
        counts.deciding += since();
        let batch = step.batch();
        let decodes = (batch.logits_count() == batch.token_count()).then(|| batch.rows().len());
        let mut logits = Forward::forward(&mut self.model, batch, &mut self.kv_store);
        counts.forward += since();
        let terms = |id| self.terms.iter().find(|(other, _)| *other == id);
        self.sampler.sample(batch, &mut logits, |id| Continued {
            terms: &terms(id).unwrap().1,
            known: step.history(id),
            prompt_tokens: step.prompt_len(id),
        });
        counts.sampling += since();
        let parts = 0..logits.workers();
        logits.share(parts, |part, _| assert!(part < 8));
        drop(logits);
        counts.threads += since();
        step.commit(self.now + 500, &self.sampler.sampled);
        counts.deciding += since();
        assert!(self.sampler.outputs.iter().all(|(_, drawn)| drawn.is_ok()));
        self.sampler.outputs.clear();
        let finished = |event| matches!(event, Event::Finished { .. });
        assert!(
            !self.scheduler.events().any(finished),
            "steady until the end"
        );
        decodes
    }
}

#[test]
fn a_steady_step_allocates_nothing() {
    // A head of floats alone, and one that is screened in 8 bits first.
    for (threads, exact_head_bytes) in [(1, usize::MAX), (2, usize::MAX), (1, 0), (2, 0), (3, 0)] {
        let mut steps = Loop::new(threads, exact_head_bytes);
        // Steady once all decode, and every sequence has gone through a few pages.
        let mut quiet = 0;
        while quiet < 3 * PAGE_TOKENS {
            let all = steps.step(&mut Counts::default()) == Some(steps.terms.len());
            quiet = if all { quiet + 1 } else { 0 };
        }
        let mut counts = Counts::default();
        for _ in 0..STEPS {
            assert_eq!(steps.step(&mut counts), Some(steps.terms.len()));
        }
        println!("{threads} threads, {STEPS} steps: {counts:?}");
        let head = ["floats", "8 bits first"][usize::from(exact_head_bytes == 0)];
        assert_eq!(counts, Counts::default(), "{threads} threads, {head}");
    }
}
