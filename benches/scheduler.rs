//! What the scheduler itself takes: planning and committing a step, admitting, cancelling, and how often it allocates.
//!
//! `cargo bench --bench scheduler` prints a table. Without `--bench` (so in `cargo test --benches`), or with `--test`, everything runs
//! once and small, and prints no figures, since they would mean nothing.

use std::alloc::System;
use std::time::{Duration, Instant};

use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use sterna_scheduler::{
    CostModel, FinishReason, Limits, PAGE_TOKENS, Plan, Policy, Request, Sampled, Scheduler,
    SequenceId, TenantId, TenantPolicy,
};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const PROMPT_TOKENS: usize = 100;
const MOST_NEW_TOKENS: u32 = 4_000;

/// A step as the clock tells it: never moving backwards, and a plausible length each.
const STEP_MICROS: u64 = 20_000;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |name: &str| arguments.iter().any(|argument| argument == name);
    let smoke = given("--test") || !given("--bench");
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
    let (submits, admissions, cancels) = come_and_go(rounds);
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

/// A scheduler, its clock, and the memory for a step's results.
struct World {
    scheduler: Scheduler,
    now: u64,
    prompts: u32,
    sampled: Vec<Sampled>,
}

impl World {
    fn new(running: u32) -> World {
        let longest = PROMPT_TOKENS as u32 + MOST_NEW_TOKENS;
        let limits = Limits {
            pages: (running + 8) * longest.div_ceil(PAGE_TOKENS as u32),
            max_running: running + 8,
            max_queued: running + 8,
            max_queued_time: u64::MAX,
            step_tokens: (running + 8) * PROMPT_TOKENS as u32,
            prefill_chunk: 512,
            max_sequence_tokens: longest,
        };
        let mut scheduler = Scheduler::new(limits, Policy::default());
        // A machine so fast that its time never keeps anybody out.
        scheduler.calibrate(CostModel {
            rows: CostModel::roofline(1_000_000, 1_000),
            kilo_decode_keys: 0,
            kilo_chunk_keys: 0,
            head: 0,
            logit: 0,
        });
        World {
            scheduler,
            now: 0,
            prompts: 0,
            sampled: Vec::new(),
        }
    }

    /// With a prompt that nobody had before.
    fn submit(&mut self) -> (SequenceId, Duration) {
        self.prompts += 1;
        let prompt = (0..PROMPT_TOKENS as u32)
            .map(|position| self.prompts.wrapping_mul(7919) ^ position)
            .collect();
        let request = Request {
            prompt,
            max_new_tokens: MOST_NEW_TOKENS,
            ..Request::default()
        };
        let began = Instant::now();
        let id = self
            .scheduler
            .submit(self.now, request)
            .expect("there is room");
        (id, began.elapsed())
    }

    /// One step, in which every sequence that wants a token gets a new one; what its plan and commit took, and how many tokens it had.
    fn step(&mut self) -> (Duration, usize) {
        self.now += STEP_MICROS;
        let began = Instant::now();
        let Plan::Step(step) = self.scheduler.plan(self.now) else {
            panic!("there is work");
        };
        let planned = began.elapsed();
        let tokens = step.batch().token_count();
        self.sampled.clear();
        // No two sequences say the same, nor one the same twice, so that nothing can be drafted.
        let said = (0..step.batch().logits_count())
            .map(|row| Sampled::Token(0x8000_0000 | (self.now as u32).wrapping_add(row as u32)));
        self.sampled.extend(said);
        self.now += 1;
        let computed = Instant::now();
        step.commit(self.now, &self.sampled);
        (planned + computed.elapsed(), tokens)
    }

    fn forget_events(&mut self) {
        self.scheduler.events().for_each(drop);
    }
}

/// Times of steps in which `running` sequences decode and nothing else happens, and how often they allocated.
fn decode(running: u32, idle_tenants: u32, steps: usize) -> (Vec<Duration>, usize) {
    let mut world = World::new(running);
    let tenants: Vec<(TenantId, TenantPolicy)> = (1..=idle_tenants)
        .map(|id| (TenantId(id), TenantPolicy::default()))
        .collect();
    world
        .scheduler
        .set_tenants(&tenants)
        .expect("they are possible");
    for _ in 0..running {
        world.submit();
    }
    // Steady once every sequence decodes, and a few pages later.
    let mut quiet = 0;
    while quiet < 2 * PAGE_TOKENS {
        let (_, tokens) = world.step();
        quiet = if tokens == running as usize {
            quiet + 1
        } else {
            0
        };
    }
    world.forget_events();
    let mut times = Vec::with_capacity(steps);
    let region = Region::new(ALLOCATOR);
    for _ in 0..steps {
        times.push(world.step().0);
    }
    (times, region.change().allocations)
}

/// Beside 64 that decode, one request at a time comes, is admitted, and is cancelled: the times of each.
fn come_and_go(rounds: usize) -> (Vec<Duration>, Vec<Duration>, Vec<Duration>) {
    let mut world = World::new(64);
    for _ in 0..64 {
        world.submit();
    }
    while world.step().1 != 64 {}
    let (mut submits, mut admissions, mut cancels) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (id, submitting) = world.submit();
        submits.push(submitting);
        admissions.push(world.step().0);
        let began = Instant::now();
        assert!(world.scheduler.cancel(id, FinishReason::Cancelled));
        cancels.push(began.elapsed());
        world.forget_events();
    }
    (submits, admissions, cancels)
}
