//! `sterna-loadtest`: measures an OpenAI-compatible server, or the scheduler in virtual time.
//!
//! Both subcommands run the same workloads. `drive` sends them to a server. `simulate` runs them
//! against the scheduler, with a cost model in place of the machine.
//!
//! Exit code of `drive`: 0 if every request was complete or its client disconnected on purpose,
//! 1 if a request failed or the server could not be reached. Exit code 2: a wrong flag.

mod coefficients;
mod drive;
mod flags;
mod latency;
mod output;
mod simulate;
mod workload;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use drive::{DriveArgs, drive};
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
    /// Run a named workload in virtual time, under Sterna's scheduling policy or another one.
    Simulate(SimulateArgs),
}

fn main() -> ExitCode {
    let cli = LoadtestCli::parse();
    let result = match cli.command.unwrap_or(LoadtestCommand::Drive(cli.drive)) {
        LoadtestCommand::Drive(args) => drive(&args),
        LoadtestCommand::Simulate(args) => simulate(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("sterna-loadtest: {error}");
        ExitCode::from(2)
    })
}
