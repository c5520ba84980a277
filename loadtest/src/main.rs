//! `sterna-loadtest`: one definition of what is asked, and two clocks: `simulate` runs it in virtual time over the scheduler
//! and a model of the machine, `drive` sends it to a server.
//!
//! Exit code 0 when every request was complete (or its client left on purpose), 1 when any failed, 2 for a wrong flag.

mod coefficients;
mod drive;
mod latency;
mod simulate;
mod workload;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use drive::{DriveArgs, drive};
use simulate::{SimulateArgs, simulate};

/// Measures a server, or the scheduler alone in virtual time.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Cli {
    /// What to do; `drive` when left out.
    #[command(subcommand)]
    command: Option<Command>,
    /// The flags of `drive`, which may stand without its name.
    #[command(flatten)]
    drive: DriveArgs,
}

/// The two clocks.
#[derive(Subcommand)]
enum Command {
    /// Send seeded chat requests from parallel streaming clients; report latencies and throughput (the default).
    Drive(DriveArgs),
    /// Run a named workload in virtual time, under the product's policy or others.
    Simulate(SimulateArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.command.unwrap_or(Command::Drive(cli.drive)) {
        Command::Drive(args) => drive(&args),
        Command::Simulate(args) => match simulate(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(what) => {
                eprintln!("sterna-loadtest: {what}");
                ExitCode::from(2)
            }
        },
    }
}

/// A number from 0 to 1.
fn fraction(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err("not a number from 0 to 1".into()),
    }
}

/// A number above 0.
fn positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if value > 0.0 && value < 1e9 => Ok(value),
        _ => Err("not a positive number".into()),
    }
}
