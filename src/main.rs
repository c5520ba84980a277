//! Flags → what they ask for → an exit code. No logic of its own.

use std::io::{stderr, stdout};
use std::process::ExitCode;

use clap::Parser;
use sterna::bench;
use sterna::config::{Cli, Command};
use sterna::startup::serve;
use sterna::synthesize::synthesize;
use sterna::tenants::keygen;

/// What is wrong with the flags, the checkpoint or the machine; the message names it.
const UNUSABLE: u8 = 2;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command.unwrap_or(Command::Serve(cli.serve)) {
        Command::Serve(config) => serve(&config),
        Command::Bench(config) => bench::run(&config),
        Command::Keygen(config) => keygen(&config.id, stderr(), stdout()),
        Command::Synthesize(config) => {
            synthesize(&config.shape, config.seed, &config.directory).map_err(Box::from)
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sterna: {error}");
            ExitCode::from(UNUSABLE)
        }
    }
}
