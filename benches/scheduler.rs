//! Times and allocations of the scheduler itself: deciding and committing a step, admitting, and
//! cancelling.
//!
//! `cargo bench --bench scheduler` prints a table. Without `--bench` (as in `cargo test --benches`)
//! or with `--test`, every case runs once with a small size and prints no figures.

use std::alloc::System;
use std::time::{Duration, Instant};

use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use sterna_scheduler::{
    CostModel, FinishReason, Limits, PAGE_TOKENS, Plan, Policy, Request, SAMPLING_UNIT, Sampled,
    Scheduler, SequenceId, TenantId, TenantPolicy,
};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const PROMPT_TOKENS: usize = 100;
const MAX_NEW_TOKENS: u32 = 4_000;

/// The duration of a step on the scheduler's clock.
const STEP_MICROS: u64 = 20_000;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has_flag = |name: &str| arguments.iter().any(|argument| argument == name);
    let smoke = has_flag("--test") || !has_flag("--bench");
    let steps = if smoke { 4 } else { 1_500 };
    if !smoke {
        println!(
            "{:<34}{:>12}{:>12}{:>14}",
            "", "p50 µs", "p99 µs", "allocations"
        );
    }
    for idle_tenants in [0, 10_000] {
        for running in [64, 256, 1024] {
            if smoke && running > 64 {
                continue;
            }
            let (times, allocations) = decode(running, idle_tenants, steps);
            let name = format!("decode, {running} running, {idle_tenants} idle");
            report(smoke, &name, times, Some(allocations as f64 / steps as f64));
        }
    }
    let rounds = if smoke { 4 } else { 1_000 };
    let (submits, admissions, cancels) = admit_and_cancel(rounds);
    report(smoke, "submit", submits, None);
    report(smoke, "plan and commit, one admitted", admissions, None);
    report(smoke, "cancel", cancels, None);
}

fn report(smoke: bool, name: &str, mut times: Vec<Duration>, allocations: Option<f64>) {
    times.sort_unstable();
    let micros = |percent: usize| times[(times.len() - 1) * percent / 100].as_nanos() as f64 / 1e3;
    let (median, high) = (micros(50), micros(99));
    let allocations = allocations.map_or(String::new(), |count| format!("{count:.3}"));
    if !smoke {
        println!("{name:<34}{median:>12.2}{high:>12.2}{allocations:>14}");
    }
}

/// A scheduler, its clock, and the memory for a step's samples.
struct SchedulerBench {
    scheduler: Scheduler,
    now: u64,
    prompts: u32,
    sampled: Vec<Sampled>,
}

impl SchedulerBench {
    fn new(running: u32) -> SchedulerBench {
        let longest = PROMPT_TOKENS as u32 + MAX_NEW_TOKENS;
        let limits = Limits {
            pages: (running + 8) * longest.div_ceil(PAGE_TOKENS as u32),
            max_running: running + 8,
            max_queued: running + 8,
            max_queued_time: u64::MAX,
            step_tokens: (running + 8) * PROMPT_TOKENS as u32,
            prefill_chunk: 512,
            max_sequence_tokens: longest,
            states: None,
            diffusion: None,
        };
        let mut scheduler = Scheduler::new(limits, Policy::default());
        // Steps cost almost nothing, so that time never limits admission.
        scheduler.calibrate(CostModel {
            rows: CostModel::roofline(1_000_000, 1_000),
            kilo_decode_keys: 0,
            kilo_chunk_keys: 0,
            head: 0,
            logit: 0,
            sampling: SAMPLING_UNIT,
        });
        SchedulerBench {
            scheduler,
            now: 0,
            prompts: 0,
            sampled: Vec::new(),
        }
    }

    /// Submits a request with a new prompt. Returns the duration of the call.
    fn submit(&mut self) -> (SequenceId, Duration) {
        self.prompts += 1;
        let prompt = (0..PROMPT_TOKENS as u32)
            .map(|position| self.prompts.wrapping_mul(7919) ^ position)
            .collect();
        let request = Request {
            prompt,
            max_new_tokens: MAX_NEW_TOKENS,
            ..Request::default()
        };
        let began = Instant::now();
        let id = self
            .scheduler
            .submit(self.now, request)
            .expect("the queue has a free place");
        (id, began.elapsed())
    }

    /// Runs a step in which every sequence gets a new token. Returns the duration of plan and
    /// commit, and the number of tokens in the step.
    fn step(&mut self) -> (Duration, usize) {
        self.now += STEP_MICROS;
        let began = Instant::now();
        let Plan::Step(step) = self.scheduler.plan(self.now) else {
            panic!("the plan is idle");
        };
        let planned = began.elapsed();
        let tokens = step.batch().token_count();
        self.sampled.clear();
        // All sampled tokens differ, so that no token is drafted.
        let tokens_drawn = (0..step.batch().logits_count())
            .map(|row| Sampled::Token(0x8000_0000 | (self.now as u32).wrapping_add(row as u32)));
        self.sampled.extend(tokens_drawn);
        self.now += 1;
        let computed = Instant::now();
        step.commit(self.now, &self.sampled);
        (planned + computed.elapsed(), tokens)
    }

    fn drop_events(&mut self) {
        self.scheduler.events().for_each(drop);
    }
}

/// Returns the durations of steps in which `running` sequences decode and nothing else happens, and
/// the number of allocations in all of them.
fn decode(running: u32, idle_tenants: u32, steps: usize) -> (Vec<Duration>, usize) {
    let mut bench = SchedulerBench::new(running);
    let tenants: Vec<(TenantId, TenantPolicy)> = (1..=idle_tenants)
        .map(|id| (TenantId(id), TenantPolicy::default()))
        .collect();
    bench
        .scheduler
        .set_tenants(&tenants)
        .expect("the policies are valid");
    for _ in 0..running {
        bench.submit();
    }
    // The steady state: every sequence decodes, and has filled a few pages.
    let mut steady = 0;
    while steady < 2 * PAGE_TOKENS {
        let (_, tokens) = bench.step();
        steady = if tokens == running as usize {
            steady + 1
        } else {
            0
        };
    }
    bench.drop_events();
    let mut times = Vec::with_capacity(steps);
    let region = Region::new(ALLOCATOR);
    for _ in 0..steps {
        times.push(bench.step().0);
    }
    (times, region.change().allocations)
}

/// Submits, admits and cancels one request at a time beside 64 decodes. Returns the durations of
/// each.
fn admit_and_cancel(rounds: usize) -> (Vec<Duration>, Vec<Duration>, Vec<Duration>) {
    let mut bench = SchedulerBench::new(64);
    for _ in 0..64 {
        bench.submit();
    }
    while bench.step().1 != 64 {}
    let (mut submits, mut admissions, mut cancels) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (id, duration) = bench.submit();
        submits.push(duration);
        admissions.push(bench.step().0);
        let began = Instant::now();
        assert!(bench.scheduler.cancel(id, FinishReason::Cancelled));
        cancels.push(began.elapsed());
        bench.drop_events();
    }
    (submits, admissions, cancels)
}
