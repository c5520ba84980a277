//! Runs the command that the command line names and turns its result into an exit code.

use std::io::{stderr, stdout};
use std::process::ExitCode;

use sterna::bench;
use sterna::config::{Cli, Command};
use sterna::constraint;
use sterna::convert;
use sterna::healthcheck;
use sterna::inspect;
use sterna::startup::serve;
use sterna::synthesize::synthesize;
use sterna::tenants::keygen;

/// The exit code of `inspect` if the server would refuse the checkpoint.
const REFUSED: u8 = 1;
/// The exit code of `healthcheck` if the server accepts no requests. Docker reserves 2.
const UNHEALTHY: u8 = 1;
/// The exit code of every other failure. The message says what is wrong.
const FAILED: u8 = 2;

fn main() -> ExitCode {
    let cli = Cli::read();
    let result = match cli.command.unwrap_or(Command::Serve(Box::new(cli.serve))) {
        Command::Serve(config) => serve(&config),
        Command::Bench(config) => bench::run(&config),
        Command::Convert(config) => convert::run(&config),
        Command::Healthcheck(config) => match healthcheck::run(&config) {
            Ok(()) => Ok(()),
            Err(error) => {
                eprintln!("sterna: {error}");
                return ExitCode::from(UNHEALTHY);
            }
        },
        Command::GrammarTemplate => constraint::run_template(),
        Command::Inspect(config) => match inspect::run(&config) {
            Ok(false) => return ExitCode::from(REFUSED),
            other => other.map(drop),
        },
        Command::Keygen(config) => keygen(config.id.as_deref(), stderr(), stdout()),
        Command::Synthesize(config) => {
            synthesize(&config.shape, config.seed, &config.directory).map_err(Box::from)
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sterna: {error}");
            ExitCode::from(FAILED)
        }
    }
}
