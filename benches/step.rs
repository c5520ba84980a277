//! Whole steps of a model of BitNet b1.58 2B-4T's shape, with random weights: decode at 1 to 64 streams and contexts of 256 to 4,096,
//! prefill of 128 to 2,048, each beside the least time that the machine's limits allow.
//!
//! `cargo bench --bench step [-- [--threads N] [--isa NAME] [--model DIR]]`. It takes about ten minutes; the model is written to a
//! temporary folder (1.2 GB) unless one is named. It is what `sterna bench` does, with more contexts. Without `--bench` (so in
//! `cargo test --benches`), or with `--test`, a tiny model runs everything once, and no figures are printed, since they would mean
//! nothing.

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use clap::Parser;
use sterna::bench::{Effort, Grid, Outcome, PROBE_BYTES, PROMPTS, Run, STREAMS};
use sterna::cores;
use sterna::model::{Source, toy};
use sterna::synthesize::synthesize;
use sterna_kernels::{Isa, Kernels};

const SHAPE: &str = "2b-4t";
const CONTEXTS: [usize; 3] = [256, 2048, 4096];

#[derive(Parser)]
struct Flags {
    /// Given by `cargo bench`.
    #[arg(long = "bench", hide = true)]
    _bench: bool,
    /// Compute threads; by default one for each core.
    #[arg(long)]
    threads: Option<usize>,
    /// Instruction set; by default the best.
    #[arg(long)]
    isa: Option<Isa>,
    /// A checkpoint of another shape.
    #[arg(long)]
    model: Option<PathBuf>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let given = |name: &str| std::env::args().any(|argument| argument == name);
    if given("--test") || !given("--bench") {
        return smoke(); // Whatever else is said is for the tests beside it.
    }
    let flags = Flags::parse();
    let cores = cores::usable();
    let threads = flags.threads.unwrap_or(cores);
    let isa = flags.isa.unwrap_or_else(Isa::best);
    let made = match flags.model {
        Some(_) => None,
        None => Some(Made::new()?),
    };
    let directory = flags.model.or(made.as_ref().map(|made| made.0.clone()));
    let directory = directory.expect("one is named, or was made");
    let run = Run {
        name: match made {
            Some(_) => format!("the {SHAPE} shape, random weights"),
            None => directory.display().to_string(),
        },
        source: Source::Directory(directory),
        kernels: Kernels::new(isa).ok_or_else(|| format!("this machine has no {isa}"))?,
        threads,
        pin_threads: threads == cores,
        grid: Grid {
            streams: STREAMS.to_vec(),
            depths: CONTEXTS.to_vec(),
            prompts: PROMPTS.to_vec(),
            kv_bytes: usize::MAX,
            effort: Effort::FULL,
        },
        probe_bytes: PROBE_BYTES,
    };
    print!("{}", run.report()?);
    Ok(())
}

fn smoke() -> Result<(), Box<dyn Error>> {
    let run = Run {
        name: "the toy".to_owned(),
        source: toy::source(),
        kernels: Kernels::new(Isa::best()).expect("the best is available"),
        threads: 2,
        pin_threads: false,
        grid: Grid {
            streams: vec![1, 3],
            depths: vec![32],
            prompts: vec![48],
            kv_bytes: usize::MAX,
            effort: Effort::SMOKE,
        },
        probe_bytes: 1 << 16,
    };
    for row in run.report()?.rows {
        assert!(
            matches!(row.outcome, Outcome::Measured(_)),
            "{} was left out",
            row.what
        );
        println!("{}: a smoke run", row.what);
    }
    Ok(())
}

/// A checkpoint in a temporary folder, which goes with it.
struct Made(PathBuf);

impl Made {
    fn new() -> Result<Made, Box<dyn Error>> {
        let made = Made(std::env::temp_dir().join(format!("sterna-step-{}", std::process::id())));
        synthesize(SHAPE, 1, &made.0)?;
        Ok(made)
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("{} is left: {error}", self.0.display());
        }
    }
}
