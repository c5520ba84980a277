//! `sterna-loadtest`: measures an OpenAI-compatible server, or the scheduler in virtual time.
//!
//! All subcommands run the same workloads. `drive`, `sweep` and `compare` send them to servers.
//! `simulate` runs them against the scheduler, with a cost model in place of the machine.
//!
//! Exit code of `drive` and `compare`: 0 if every request was complete or its client disconnected
//! on purpose, 1 if a request failed or a server could not be reached. `sweep` exits with 1 if no
//! load meets the objective. Exit code 2: a wrong flag.

mod coefficients;
mod drive;
mod flags;
mod latency;
mod output;
mod simulate;
mod workload;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use drive::{CompareArgs, DriveArgs, SweepArgs, compare, drive, sweep};
use simulate::{SimulateArgs, simulate};

/// Measures an OpenAI-compatible server, or Sterna's scheduler in virtual time.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct LoadtestCli {
    /// The subcommand. If omitted: `drive`.
    #[command(subcommand)]
    command: Option<LoadtestCommand>,
    /// The flags of `drive`, if the subcommand is omitted.
    #[command(flatten)]
    drive: DriveArgs,
}

/// The subcommands.
#[derive(Subcommand)]
enum LoadtestCommand {
    /// Send chat requests from parallel streaming clients to a server, and print latencies and
    /// throughput. This is the default subcommand.
    Drive(DriveArgs),
    /// Find the highest load under which a server meets a latency objective.
    Sweep(SweepArgs),
    /// Run one workload against several servers in turns, and print ratios.
    Compare(CompareArgs),
    /// Run a named workload in virtual time, under Sterna's scheduling policy or another one.
    Simulate(SimulateArgs),
}

fn main() -> ExitCode {
    let cli = LoadtestCli::parse();
    let result = match cli.command.unwrap_or(LoadtestCommand::Drive(cli.drive)) {
        LoadtestCommand::Drive(args) => drive(&args),
        LoadtestCommand::Sweep(args) => sweep(&args),
        LoadtestCommand::Compare(args) => compare(&args),
        LoadtestCommand::Simulate(args) => simulate(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("sterna-loadtest: {error}");
        ExitCode::from(2)
    })
}
