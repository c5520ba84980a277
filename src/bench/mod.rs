//! `sterna bench`: measures how fast a model runs, and compares it with the machine's limits.
//!
//! Invariant: nothing is timed before the engine has computed the right tokens.
//!
//! Invariant: a figure is compared with limits that were sampled within seconds of it, on the same
//! threads.

mod checks;
mod figure;
mod machine_limits;
mod measure;
mod report;
mod roofline;
mod workload;

use std::error::Error;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};
use sterna_kernels::{Kernels, KvDtype};

pub use checks::{DEMO_ANSWERS, Mismatch, check, check_batching, check_demo, check_isa};
pub use figure::{Figure, FigureKind, FigureResult, Measurement, Repetition, Spread, StepParts};
pub use machine_limits::{LimitsProbe, MachineLimits, PROBE_BYTES};
pub use measure::{Effort, Grid, STEP_TOKENS, Subject, measure};
pub use report::{BenchReport, MachineInfo, ModelInfo};
pub use roofline::{Bound, Work};

use crate::checkpoint::Source;
use crate::config::{BenchConfig, usable_memory};
use crate::cores;
use crate::model::{LoadOptions, Model};
use crate::opening::{kernels, kv_dtype, refuse_without_head, source};

/// Numbers of sequences that decode together.
pub const STREAMS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Lengths of single prompts.
pub const PROMPTS: [usize; 3] = [128, 512, 2048];

const DEMO: &str = "the embedded demo";

/// The share of the memory left after loading the model that keys and values may take. A machine
/// that swaps would measure its disk.
const KV_MEMORY_SHARE: f64 = 0.8;
/// The share of the usable memory that the bandwidth probe may read.
const PROBE_MEMORY_SHARE: f64 = 0.25;

/// The streams, prompts and probe of `--quick`.
const QUICK_STREAMS: [usize; 4] = [1, 4, 16, 64];
const QUICK_PROMPTS: [usize; 1] = [128];
const QUICK_PROBE_BYTES: usize = 256 << 20;

/// Runs the benchmark that the flags describe.
///
/// # Errors
/// If the model cannot be loaded, the engine computes wrong tokens, or the report cannot be
/// written.
pub fn run(config: &BenchConfig) -> Result<(), Box<dyn Error>> {
    let kernels = kernels(config.machine.isa.as_deref())?;
    let json = config.json.as_deref().map(open_json).transpose()?;
    let path = config.model.as_deref();
    let run = BenchRun {
        name: path.map_or(Ok(DEMO.to_owned()), named)?,
        source: source(path)?,
        kernels,
        threads: config.machine.threads(),
        pin_threads: config.machine.pin_threads(),
        kv_dtype: kv_dtype(&config.machine.kv_dtype),
        grid: grid(config),
        probe_bytes: if config.quick {
            QUICK_PROBE_BYTES
        } else {
            PROBE_BYTES
        },
    };
    let report = run.report()?;
    if config.json.as_deref() == Some(Path::new("-")) {
        write!(io::stderr(), "{report}")?;
    } else {
        write!(io::stdout(), "{report}")?;
    }
    if let Some(mut json) = json {
        writeln!(json, "{}", serde_json::to_string_pretty(&report)?)?;
    }
    if config.model.is_none() {
        eprintln!(
            "The demo model is too small to say much about real models. Name one with --model."
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

/// A benchmark run: the model, the compute threads, and what to measure.
pub struct BenchRun {
    /// The model's name in the report.
    pub name: String,
    /// The model's checkpoint.
    pub source: Source,
    /// The kernels.
    pub kernels: Kernels,
    /// The number of compute threads.
    pub threads: usize,
    /// Whether each thread is pinned to a core.
    pub pin_threads: bool,
    /// The number format of keys and values.
    pub kv_dtype: KvDtype,
    /// What to measure.
    pub grid: Grid,
    /// The memory that one pass of the bandwidth probe reads, unless the machine has too little.
    pub probe_bytes: usize,
}

impl BenchRun {
    /// Loads the model, checks it, then measures it. If `pin_threads` is set, the calling thread
    /// stays pinned to a core.
    ///
    /// # Errors
    /// If the model cannot be loaded, or the engine computes wrong tokens.
    pub fn report(self) -> Result<BenchReport, Box<dyn Error>> {
        let options = LoadOptions {
            pin_threads: self.pin_threads,
            kv_dtype: self.kv_dtype,
            progress: true,
            ..LoadOptions::new(self.kernels, self.threads)
        };
        let mut model = Model::load(&self.source, options)?;
        refuse_without_head(model.config())?;
        let progress = progress_bar(self.grid.figures());
        progress.set_message("checking that the engine computes the right tokens");
        let checks = check(&mut model, &self.source, options)?;

        let share = |share: f64| (usable_memory() as f64 * share) as usize;
        let probe_bytes = self.probe_bytes.min(share(PROBE_MEMORY_SHARE));
        let probe = LimitsProbe::new(self.kernels, self.threads, probe_bytes);
        let grid = Grid {
            kv_bytes: self.grid.kv_bytes.min(share(KV_MEMORY_SHARE)),
            ..self.grid
        };
        let model_info = ModelInfo::of(&self.name, &model);
        if self.pin_threads {
            pin_to_first_core();
        }
        let rows = measure(&mut Subject::new(model), &grid, &probe, &progress);
        progress.finish_and_clear();
        Ok(BenchReport {
            version: env!("CARGO_PKG_VERSION"),
            machine: MachineInfo {
                cpu: cpu_name(),
                isa: self.kernels.isa().to_string(),
                threads: self.threads,
                probe_bytes: probe.bytes(),
            },
            model: model_info,
            checks,
            rows,
        })
    }
}

fn named(path: &Path) -> io::Result<String> {
    let path = path
        .canonicalize()
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
    let name = path.file_name().unwrap_or(path.as_os_str());
    Ok(name.to_string_lossy().into_owned())
}

/// Pins this thread like the engine thread, as worker 0 of the model's pool.
fn pin_to_first_core() {
    let first = cores::physical().first().copied();
    if !first.is_some_and(cores::pin) {
        eprintln!("The calling thread could not be pinned to a core, so figures may vary more.");
    }
}

/// Returns the processor's name.
fn cpu_name() -> String {
    let lines = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = lines.lines().find_map(|line| {
        let (key, name) = line.split_once(':')?;
        (key.trim() == "model name").then(|| name.trim().to_owned())
    });
    name.unwrap_or_else(|| format!("an unnamed {} processor", std::env::consts::ARCH))
}

/// Returns a progress bar, which is hidden unless standard error is a terminal.
fn progress_bar(figures: usize) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{elapsed_precise} {bar:40} {pos}/{len} {msg}");
    ProgressBar::new(figures as u64).with_style(style.expect("the template is well-formed"))
}

/// Opens the file of `--json`, unless it is standard output. This comes before the measurement,
/// which takes minutes.
fn open_json(path: &Path) -> Result<Box<dyn Write>, String> {
    if path.as_os_str() == "-" {
        return Ok(Box::new(io::stdout()));
    }
    let file = File::create(path);
    let file = file.map_err(|error| format!("--json {}: {error}", path.display()))?;
    Ok(Box::new(file))
}
