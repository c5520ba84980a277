//! `sterna bench`: how fast a model runs on this machine, beside the least time that the machine's limits allow.
//!
//! Always true: nothing is timed before the engine was seen to compute what it should; a figure stands beside limits that were sampled
//! within seconds of it, on the same threads.

mod golden;
mod limits;
mod measure;
mod report;
mod roofline;
mod seeded;

use std::error::Error;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};
use sterna_kernels::Kernels;

pub use golden::{
    DEMO_ANSWERS, Mismatch, check, company_changes_nothing, demo_answers, equal_models,
};
pub use limits::{Limits, PROBE_BYTES, Probe};
pub use measure::{Effort, Grid, Repetition, STEP_TOKENS, Subject, measure};
pub use report::{Machine, Measured, ModelCard, Outcome, Parts, Report, Row, Spread, What};
pub use roofline::{Bound, Work};

use crate::config::{BenchConfig, usable_memory};
use crate::cores;
use crate::demo;
use crate::model::{LoadOptions, Model, Source};
use crate::startup::kernels;

/// Sequences that decode at the same time.
pub const STREAMS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Tokens of single prompts.
pub const PROMPTS: [usize; 3] = [128, 512, 2048];

const DEMO: &str = "the embedded demo";

/// Of the memory that is left once the model is loaded, the part that keys and values may take: a machine that swaps measures its disk.
const KV_MEMORY_SHARE: f64 = 0.8;
/// Of the memory that may be used, the part that the bandwidth is sampled on at most.
const PROBE_MEMORY_SHARE: f64 = 0.25;

/// A first look: some streams, a short prompt, and memory that is read in a moment.
const QUICK_STREAMS: [usize; 4] = [1, 4, 16, 64];
const QUICK_PROMPTS: [usize; 1] = [128];
const QUICK_PROBE_BYTES: usize = 256 << 20;

/// Measures as the flags say.
///
/// # Errors
/// When the model can't be loaded, the engine computes something else than it should, or the report can't be written.
pub fn run(config: &BenchConfig) -> Result<(), Box<dyn Error>> {
    let kernels = kernels(config.machine.isa.as_deref())?;
    let json = Json::open(config.json.as_deref())?;
    let (name, source) = match &config.model {
        Some(directory) => (named(directory)?, Source::Directory(directory.clone())),
        None => (DEMO.to_owned(), demo::source()),
    };
    let run = Run {
        name,
        source,
        kernels,
        threads: config.machine.threads(),
        pin_threads: config.machine.pin_threads(),
        grid: grid(config),
        probe_bytes: if config.quick {
            QUICK_PROBE_BYTES
        } else {
            PROBE_BYTES
        },
    };
    let report = run.report()?;
    json.write(&report)?;
    if config.model.is_none() {
        eprintln!(
            "The demo is so small that these figures say little about real models: see --model."
        );
    }
    Ok(())
}

fn grid(config: &BenchConfig) -> Grid {
    let depths = config.depths.iter().map(|&depth| depth as usize).collect();
    let (streams, prompts, effort) = if config.quick {
        (&QUICK_STREAMS[..], &QUICK_PROMPTS[..], Effort::QUICK)
    } else {
        (&STREAMS[..], &PROMPTS[..], Effort::FULL)
    };
    Grid {
        streams: streams.to_vec(),
        depths,
        prompts: prompts.to_vec(),
        kv_bytes: usize::MAX,
        effort,
    }
}

/// A model, what computes it, and what is measured.
pub struct Run {
    /// What the report calls the model.
    pub name: String,
    /// Its checkpoint.
    pub source: Source,
    /// The arithmetic.
    pub kernels: Kernels,
    /// Compute threads.
    pub threads: usize,
    /// Whether each is bound to a core.
    pub pin_threads: bool,
    /// The figures.
    pub grid: Grid,
    /// Memory read in a pass that samples the bandwidth; less is taken where there is little.
    pub probe_bytes: usize,
}

impl Run {
    /// Loads, checks, and only then measures, on this thread, which stays bound to a core if threads are.
    ///
    /// # Errors
    /// When the model can't be loaded, or the engine computes something else than it should.
    pub fn report(self) -> Result<Report, Box<dyn Error>> {
        let options = LoadOptions {
            pin_threads: self.pin_threads,
            progress: true,
            ..LoadOptions::new(self.kernels, self.threads)
        };
        let mut model = Model::load(&self.source, options)?;
        let progress = progress_bar(self.grid.rows());
        progress.set_message("checking that the engine computes what it should");
        let checks = check(&mut model, &self.source, options)?;

        let room = (usable_memory() as f64 * PROBE_MEMORY_SHARE) as usize;
        let probe = Probe::new(self.kernels, self.threads, self.probe_bytes.min(room));
        let room = (usable_memory() as f64 * KV_MEMORY_SHARE) as usize;
        let grid = Grid {
            kv_bytes: self.grid.kv_bytes.min(room),
            ..self.grid
        };
        let model_card = ModelCard::of(&self.name, &model);
        if self.pin_threads {
            pin_to_first_core();
        }
        let rows = measure(&mut Subject::new(model), &grid, &probe, &progress);
        progress.finish_and_clear();
        Ok(Report {
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine {
                cpu: cpu_name(),
                isa: self.kernels.isa().to_string(),
                threads: self.threads,
                probe_bytes: probe.bytes(),
            },
            model: model_card,
            checks,
            rows,
        })
    }
}

fn named(directory: &Path) -> io::Result<String> {
    let path = directory.canonicalize().map_err(|error| {
        io::Error::new(error.kind(), format!("{}: {error}", directory.display()))
    })?;
    let name = path.file_name().unwrap_or(path.as_os_str());
    Ok(name.to_string_lossy().into_owned())
}

/// As the engine's thread, which is worker 0 of the model's threads.
fn pin_to_first_core() {
    let first = cores::physical().first().copied();
    if !first.is_some_and(cores::pin) {
        eprintln!("this thread could not be bound to a core: figures may vary more");
    }
}

/// The processor's name, as the system tells it.
fn cpu_name() -> String {
    let lines = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = lines.lines().find_map(|line| {
        let (key, name) = line.split_once(':')?;
        (key.trim() == "model name").then(|| name.trim().to_owned())
    });
    name.unwrap_or_else(|| format!("an unnamed {} processor", std::env::consts::ARCH))
}

/// A bar of so many figures, if somebody watches.
fn progress_bar(rows: usize) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{elapsed_precise} {bar:40} {pos}/{len} {msg}");
    ProgressBar::new(rows as u64).with_style(style.expect("the template is well-formed"))
}

/// Where the report goes.
enum Json {
    Nowhere,
    Output,
    File(File),
}

impl Json {
    /// Made before anything is measured: whoever has waited for a minute wants the file.
    fn open(path: Option<&Path>) -> Result<Json, String> {
        match path {
            None => Ok(Json::Nowhere),
            Some(path) if path.as_os_str() == "-" => Ok(Json::Output),
            Some(path) => File::create(path)
                .map(Json::File)
                .map_err(|error| format!("--json {}: {error}", path.display())),
        }
    }

    /// The table goes to standard output, unless the JSON does.
    fn write(self, report: &Report) -> io::Result<()> {
        match self {
            Json::Nowhere => write!(io::stdout(), "{report}"),
            Json::Output => {
                write!(io::stderr(), "{report}")?;
                writeln!(io::stdout(), "{}", serde_json::to_string_pretty(report)?)
            }
            Json::File(mut file) => {
                writeln!(file, "{}", serde_json::to_string_pretty(report)?)?;
                write!(io::stdout(), "{report}")
            }
        }
    }
}
