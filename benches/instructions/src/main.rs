//! Runs one piece of work a given number of times, so that `benches/instructions/gate.py` can count
//! its instructions.
//!
//! `instructions` lists the cases. `instructions CASE TIMES` prepares a case and runs its rounds
//! that often. The difference between two runs with different TIMES is the rounds alone, without
//! the start of the process and the preparation. So the gate does not need to find functions by
//! name in an optimized program.
//!
//! Invariant: a case does the same work on every machine. It reads no clock, starts no thread, and
//! names its instruction set.

mod kernels;
mod scheduler;

use std::process::ExitCode;

use sterna_kernels::Isa;

/// A piece of work whose instructions are counted.
struct Case {
    name: String,
    /// The number of rounds that are run together, so that work which only some rounds do counts.
    rounds: u32,
    /// Prepares the work and returns a function that runs one round.
    prepare: Prepare,
}

type Prepare = Box<dyn FnOnce() -> Round>;
type Round = Box<dyn FnMut()>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [] => {
            cases().for_each(|case| println!("{} {}", case.name, case.rounds));
            ExitCode::SUCCESS
        }
        [name, times] => match (cases().find(|case| case.name == *name), times.parse()) {
            (Some(case), Ok(times)) => {
                run(case, times);
                ExitCode::SUCCESS
            }
            _ => {
                eprintln!("instructions: there is no case {name:?}, or {times:?} is not a number");
                ExitCode::FAILURE
            }
        },
        _ => {
            eprintln!("usage: instructions [CASE TIMES]");
            ExitCode::FAILURE
        }
    }
}

/// Returns all cases. Valgrind does not support AVX-512, so its kernels cannot be counted.
fn cases() -> impl Iterator<Item = Case> {
    [Isa::Scalar, Isa::Avx2]
        .into_iter()
        .flat_map(kernels::cases)
        .chain(scheduler::cases())
}

fn run(case: Case, times: u32) {
    let mut round = (case.prepare)();
    for _ in 0..times * case.rounds {
        round();
    }
}
