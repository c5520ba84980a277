//! One piece of work, done a given number of times: what `benches/instructions/gate` counts the instructions of.
//!
//! `instructions` lists the cases; `instructions CASE TIMES` prepares one and does its rounds that often. Running it once and twice and
//! subtracting leaves the rounds alone: no start of a process, no preparation, no first look-up of a function. So nothing has to be found
//! by its name in an optimised program.
//!
//! Always true: a case does the same work on every machine. It reads no clock, starts no thread, and names its instruction set.

mod kernels;
mod scheduler;

use std::process::ExitCode;

use sterna_kernels::Isa;

/// Some work whose instructions are counted.
struct Case {
    name: String,
    /// Rounds done at a time: enough that what happens in every tenth of them counts too.
    rounds: u32,
    /// Makes what a round needs, and returns the round.
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
                eprintln!("instructions: no case {name:?}, or {times:?} is no number");
                ExitCode::FAILURE
            }
        },
        _ => {
            eprintln!("usage: instructions [CASE TIMES]");
            ExitCode::FAILURE
        }
    }
}

/// All cases. Valgrind knows no AVX-512, so its kernels cannot be counted.
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
