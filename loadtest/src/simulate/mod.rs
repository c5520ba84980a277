//! `simulate`: a workload in virtual time, over the product's scheduler and a model of the machine.

mod fairness;
mod machine;
mod policies;
mod record;
mod report;
mod text;
mod world;

use std::time::Instant;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use sterna_scheduler::{Budget, CostModel, INTER_TOKEN_TARGET, Limits};

use crate::workload::{CONTEXT, NAMES, Trace, Workload, named};
use machine::{Machine, cost_model, rate};
use record::{Objective, Recorder};
use report::{Heading, Report};
use text::table;
use world::World;

/// Sessions whose work says what a load of 1 is.
const SAMPLE: u64 = 4000;

/// The knobs of `simulate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct SimulateArgs {
    /// What is asked; `--list` says what each is.
    #[arg(long, default_value = "chat", value_parser = NAMES)]
    workload: String,
    /// List the workloads and end.
    #[arg(long)]
    list: bool,
    /// How the scheduler decides.
    #[arg(long, default_value = policies::NAMES[0], value_parser = policies::NAMES)]
    policy: String,
    /// Milliseconds between two tokens of an answer that everybody should be within, as the server's flag of that name; for policies that
    /// know such a thing.
    #[arg(long, value_name = "MS", default_value_t = INTER_TOKEN_TARGET / 1000, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    itl_target_ms: u64,
    /// All policies, one after the other, on the same workload.
    #[arg(long, conflicts_with = "policy")]
    compare: bool,
    /// Requests in all.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..))]
    requests: u64,
    /// No session begins after this many seconds.
    #[arg(long, value_parser = crate::positive)]
    seconds: Option<f64>,
    /// Seed of the workload, and of the noise.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Work that arrives in a second, in seconds of the machine; by default the workload's own.
    #[arg(long, value_parser = crate::positive)]
    load: Option<f64>,
    /// Instead of --load: sessions that begin in a second.
    #[arg(long, value_parser = crate::positive, conflicts_with = "load")]
    rate: Option<f64>,
    /// Only the sessions of this class; they are the same, at the same times, as among the others.
    #[arg(long, value_name = "CLASS")]
    only: Option<String>,
    /// The machine: 2b-2core, 2b-2core-zen4, 2b-32core, demo, or a JSON file with the coefficients of a cost model in nanoseconds.
    #[arg(long, default_value = "2b-2core")]
    cost: String,
    /// Steps take up to this part more or less than predicted.
    #[arg(long, default_value_t = 0.03, value_parser = crate::fraction)]
    noise: f64,
    /// Pages of KV memory, of 16 tokens each.
    #[arg(long, default_value_t = 6990, value_parser = clap::value_parser!(u32).range(256..))]
    pages: u32,
    /// Sequences that run at the same time, if the policy asks for no less.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_running: u32,
    /// Requests that may wait.
    #[arg(long, default_value_t = 10_000_000, value_parser = clap::value_parser!(u32).range(1..))]
    max_queued: u32,
    /// A good answer's first token comes within this many milliseconds.
    #[arg(long, default_value_t = 5000)]
    slo_ttft_ms: u64,
    /// A good answer's tokens come within this many milliseconds of each other, on average.
    #[arg(long, default_value_t = 250)]
    slo_itl_ms: u64,
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

/// Simulates as asked and prints what came of it.
pub(crate) fn simulate(args: &SimulateArgs) -> Result<(), String> {
    if args.list {
        for workload in NAMES.iter().filter_map(|name| named(name)) {
            println!(
                "{:<18}load {:>4.1}: {}",
                workload.name, workload.load, workload.about
            );
        }
        return Ok(());
    }
    let simulation = Simulation::new(args)?;
    if args.compare {
        let reports: Vec<Report> = policies::NAMES.map(|name| simulation.run(name)).into();
        print(args, &reports, &table(&reports));
    } else {
        let report = simulation.run(&args.policy);
        print(args, &report, &report.to_string());
    }
    Ok(())
}

fn print(args: &SimulateArgs, report: &impl serde::Serialize, text: &str) {
    if args.json {
        let json = serde_json::to_string_pretty(report);
        println!("{}", json.expect("a report has only numbers and strings"));
    } else {
        print!("{text}");
    }
}

/// A workload and a machine, for any policy.
struct Simulation<'a> {
    args: &'a SimulateArgs,
    workload: Workload,
    only: Option<usize>,
    cost: CostModel,
    load: f64,
    rate: f64,
}

impl Simulation<'_> {
    fn new(args: &SimulateArgs) -> Result<Simulation<'_>, String> {
        let workload = named(&args.workload).expect("the flag takes known names");
        let only = match &args.only {
            Some(name) => Some(workload.class_called(name)?),
            None => None,
        };
        let cost = cost_model(&args.cost)?;
        let sample = Trace::new(&workload, args.seed, 1.0, SAMPLE, f64::INFINITY);
        let sample: Vec<_> = sample.collect();
        let rate_at_full_load = rate(&cost, &sample, 1.0);
        let load = match args.rate {
            Some(rate) => rate / rate_at_full_load,
            None => args.load.unwrap_or(workload.load),
        };
        Ok(Simulation {
            args,
            only,
            cost,
            load,
            rate: args.rate.unwrap_or(load * rate_at_full_load),
            workload,
        })
    }

    fn run(&self, policy: &str) -> Report {
        let args = self.args;
        let limits = Limits {
            pages: args.pages,
            max_running: args.max_running,
            max_queued: args.max_queued,
            max_queued_time: u64::MAX,
            step_tokens: 2048,
            prefill_chunk: 512,
            max_sequence_tokens: CONTEXT,
        };
        let budget = Budget::within(args.itl_target_ms * 1000);
        let choice = policies::named(policy, &limits, budget).expect("the flag takes known names");
        let name = choice.name;
        let objective = Objective {
            first_token: args.slo_ttft_ms * 1000,
            inter_token: args.slo_itl_ms * 1000,
        };
        let trace = Trace::new(
            &self.workload,
            args.seed,
            self.rate,
            args.requests,
            args.seconds.unwrap_or(f64::INFINITY),
        );
        let machine = Machine::new(self.cost, args.noise, args.seed);
        let recorder = Recorder::new(&self.workload, objective);
        let trace = (trace, self.only);
        let world = World::new(
            &self.workload,
            trace,
            choice,
            (self.cost, machine),
            recorder,
        );
        let bar = progress_bar(args.requests, name);
        let began = Instant::now();
        let mut steps = 0u64;
        let mut record = world.run(|now, ended| {
            steps += 1;
            if steps.is_multiple_of(1024) {
                bar.set_position(ended);
                bar.set_message(format!("{} s of virtual time", now / 1_000_000));
            }
        });
        bar.finish_and_clear();
        let heading = Heading {
            workload: self.workload.name,
            policy: name,
            seed: args.seed,
            load: self.load,
            sessions_per_second: self.rate,
            wall_seconds: began.elapsed().as_secs_f64(),
        };
        Report::new(&heading, &mut record)
    }
}

fn progress_bar(requests: u64, policy: &'static str) -> ProgressBar {
    let style = "{prefix:<14}{elapsed_precise} {bar:40} {pos}/{len} requests, {msg}";
    let style = ProgressStyle::with_template(style).expect("the template is well formed");
    ProgressBar::new(requests)
        .with_style(style)
        .with_prefix(policy)
}
