//! `simulate`: a workload in virtual time, with the product's scheduler and a cost model, on one
//! machine or on many behind a router.

mod args;
mod disturbance;
mod event_loop;
mod failures;
mod fairness;
mod machine;
mod policies;
mod print;
mod record;
mod report;
mod router;
mod server;

use std::process::ExitCode;
use std::time::Instant;

use sterna_scheduler::{Budget, CostModel, Limits};

use crate::output::{print, progress_bar};
use crate::workload::{CONTEXT, RecordedTrace, Trace, Workload, all, named};
pub(crate) use args::SimulateArgs;
use disturbance::Disturbance;
use event_loop::EventLoop;
use failures::Failures;
use machine::{SimulatedMachine, cost_model, session_rate};
use policies::PolicyPreset;
use print::comparison;
use record::{Objective, SimulationRecorder};
use report::{FleetLabel, RunLabel, SimulationReport};
use router::{HashKey, Router, RouterKind};
use server::ServerSettings;

/// The sessions that are sampled to convert a load into a session rate.
const SAMPLE: u64 = 4000;

/// Runs the simulation and prints its report.
///
/// # Errors
/// If flags do not fit the workload, or if the file of `--cost` cannot be read.
pub(crate) fn simulate(args: &SimulateArgs) -> Result<ExitCode, String> {
    if args.list {
        for workload in all() {
            println!(
                "{:<18}load {:>4.1}: {}",
                workload.name, workload.load, workload.description
            );
        }
        return Ok(ExitCode::SUCCESS);
    }
    let simulation = Simulation::new(args)?;
    if args.compare {
        let reports = policies::NAMES.map(|name| simulation.run(name));
        print(args.json, &reports, &comparison(&reports));
    } else {
        let report = simulation.run(&args.policy);
        print(args.json, &report, &report.to_string());
    }
    Ok(ExitCode::SUCCESS)
}

/// A workload and a machine, to be run under any policy.
struct Simulation<'a> {
    args: &'a SimulateArgs,
    workload: Workload,
    recorded: Option<RecordedTrace>,
    only: Option<usize>,
    hash_key: HashKey,
    cost: CostModel,
    load: f64,
    rate: f64,
}

impl Simulation<'_> {
    fn new(args: &SimulateArgs) -> Result<Simulation<'_>, String> {
        let recorded = match args.trace.as_deref() {
            Some(file) => Some(RecordedTrace::read(file, args.speed)?),
            None => None,
        };
        let workload = match &recorded {
            Some(trace) => trace.workload(),
            None => named(&args.workload).expect("clap accepts only known names"),
        };
        let only = workload.only_class(args.only.as_deref())?;
        let cost = cost_model(&args.cost)?;
        let trace = match &recorded {
            Some(trace) => Trace::recorded(trace),
            None => Trace::new(&workload, args.seed, 1.0),
        };
        let sample: Vec<_> = trace.requests(SAMPLE).collect();
        let machines = args.machines() as f64;
        let full_rate = machines * session_rate(&cost, &sample);
        let rate = args.rate.or(recorded.as_ref().map(RecordedTrace::rate));
        let load = match rate {
            Some(rate) => rate / full_rate,
            None => args.load.unwrap_or(workload.load),
        };
        Ok(Simulation {
            args,
            only,
            hash_key: args.hash_key()?,
            cost,
            load,
            rate: rate.unwrap_or(load * full_rate),
            recorded,
            workload,
        })
    }

    fn run(&self, policy: &str) -> SimulationReport {
        let args = self.args;
        let longest = self.recorded.as_ref().map(RecordedTrace::longest);
        let limits = Limits {
            pages: args.pages,
            max_running: args.max_running,
            max_queued: args.max_queued,
            max_queued_time: u64::MAX,
            step_tokens: 2048,
            prefill_chunk: 512,
            max_sequence_tokens: longest.map_or(CONTEXT, |longest| longest.max(CONTEXT)),
            states: None,
            diffusion: None,
        };
        let target = args.itl_target_ms * 1000;
        let budget = if args.itl_strict {
            Budget::strictly_within(target)
        } else {
            Budget::within(target)
        };
        let preset = policies::named(policy, &limits, budget);
        let preset = preset.expect("clap accepts only known names");
        let name = preset.name;
        let objective = Objective {
            first_token: args.slo_ttft_ms * 1000,
            inter_token: args.slo_itl_ms * 1000,
        };
        let trace = match &self.recorded {
            Some(trace) => Trace::recorded(trace),
            None => Trace::new(&self.workload, args.seed, self.rate),
        };
        let trace = trace
            .requests(args.requests)
            .seconds(args.seconds.unwrap_or(f64::INFINITY))
            .only(self.only);
        let disturbance = disturbance(args);
        let recorder = SimulationRecorder::new(&self.workload, objective).disturbed(disturbance);
        let events = self.event_loop(preset, trace, recorder);
        let bar = progress_bar(args.requests).with_prefix(format!("{name:<14}"));
        let start = Instant::now();
        let mut steps = 0u64;
        let (record, work) = events.run(|now, ended| {
            steps += 1;
            if steps.is_multiple_of(1024) {
                bar.set_position(ended);
                bar.set_message(format!("{} s of virtual time", now / 1_000_000));
            }
        });
        bar.finish_and_clear();
        let label = RunLabel {
            workload: self.workload.name,
            policy: name,
            seed: args.seed,
            load: self.load,
            sessions_per_second: self.rate,
            fleet: args.router.map(|router| FleetLabel {
                machines: args.machines(),
                router: router.name(),
            }),
        };
        SimulationReport::new(label, record, &work, start.elapsed().as_secs_f64())
    }

    /// Returns the servers behind their router, before the first request.
    fn event_loop(
        &self,
        preset: PolicyPreset,
        trace: Trace,
        recorder: SimulationRecorder,
    ) -> EventLoop {
        let args = self.args;
        let count = args.machines();
        let machine = |number| {
            SimulatedMachine::new(self.cost, args.noise, args.seed, number)
                .disturbed(disturbance(args))
        };
        let machines = (0..count as u64).map(machine).collect();
        // One machine gets all requests from any router.
        let kind = args.router.unwrap_or(RouterKind::RoundRobin);
        let router = Router::new(kind, count).hash_by(self.hash_key);
        let settings = ServerSettings::new(&self.workload, preset);
        let failures = |mean| Failures::new(count, mean, args.down_seconds, args.seed);
        EventLoop::new(settings, machines, router, trace, recorder)
            .clients(args.clients)
            .failures(args.mtbf_seconds.map(failures))
    }
}

/// Returns the disturbance of the flags. The calibration is at time 0, so a disturbance of it alone
/// lasts for a microsecond.
fn disturbance(args: &SimulateArgs) -> Option<Disturbance> {
    let from = args.disturb_from * 1_000_000;
    args.disturb.map(|kind| Disturbance {
        kind,
        from,
        until: from + (args.disturb_seconds * 1_000_000).max(1),
    })
}
