//! The report of a benchmark run, as a table and as JSON.

use std::fmt;

use serde::Serialize;

use super::figure::{Figure, FigureKind, FigureResult, Measurement, Spread};
use super::machine_limits::MachineLimits;
use super::roofline::Bound;
use crate::model::{Model, Stage};

/// The result of a benchmark run.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// The version of this program.
    pub version: &'static str,
    /// The machine.
    pub machine: MachineInfo,
    /// The model.
    pub model: ModelInfo,
    /// The checks that passed before anything was timed.
    pub checks: Vec<String>,
    /// The figures.
    pub rows: Vec<Figure>,
}

/// The machine that computed.
#[derive(Clone, Debug, Serialize)]
pub struct MachineInfo {
    /// The name of the processor.
    pub cpu: String,
    /// The instruction set of the kernels.
    pub isa: String,
    /// The number of compute threads.
    pub threads: usize,
    /// The memory that one pass of the bandwidth probe reads, in bytes.
    pub probe_bytes: usize,
}

/// The model that was computed.
#[derive(Clone, Debug, Serialize)]
pub struct ModelInfo {
    /// The name in the table.
    pub name: String,
    /// Bits per ternary weight, padding included.
    pub bits_per_weight: f64,
    /// Bytes of the layers' matrices.
    pub layer_bytes: usize,
    /// Bytes of the output head.
    pub head_bytes: usize,
    /// Bytes of the keys and values of one token.
    pub kv_bytes_per_token: usize,
    /// Bytes of the states of one sequence; 0 without recurrent layers.
    pub state_bytes: usize,
    /// The number format of keys and values.
    pub kv_dtype: &'static str,
}

impl ModelInfo {
    /// Returns the sizes of a loaded model.
    pub fn of(name: &str, model: &Model) -> ModelInfo {
        let sizes = model.sizes();
        ModelInfo {
            name: name.to_owned(),
            bits_per_weight: sizes.bits_per_weight(),
            layer_bytes: sizes.layer_bytes + sizes.expert_bytes * sizes.experts_per_token,
            head_bytes: sizes.head_bytes,
            kv_bytes_per_token: sizes.kv_bytes_per_token,
            state_bytes: sizes.state_bytes,
            kv_dtype: model.kv_dtype().name(),
        }
    }
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BenchReport { machine, model, .. } = self;
        let gigabytes = |bytes: usize| bytes as f64 / 1e9;
        writeln!(
            f,
            "Sterna {} on {}: {}, {} compute threads",
            self.version, machine.cpu, machine.isa, machine.threads
        )?;
        writeln!(
            f,
            "{}: layers {:.3} GB ({:.2} bits per ternary weight), head {:.3} GB, \
             keys and values {:.1} kB per token ({})",
            model.name,
            gigabytes(model.layer_bytes),
            model.bits_per_weight,
            gigabytes(model.head_bytes),
            model.kv_bytes_per_token as f64 / 1e3,
            model.kv_dtype,
        )?;
        if model.state_bytes > 0 {
            let megabytes = model.state_bytes as f64 / 1e6;
            writeln!(
                f,
                "states of recurrent layers: {megabytes:.1} MB per sequence"
            )?;
        }
        writeln!(f, "checked: {}", self.checks.join("; "))?;
        self.write_limits(f)?;
        self.write_figures(f)?;
        self.write_parts(f)
    }
}

impl BenchReport {
    fn measured(&self) -> impl Iterator<Item = (&FigureKind, &Measurement)> + Clone {
        self.rows.iter().filter_map(|figure| match &figure.result {
            FigureResult::Measured(measured) => Some((&figure.kind, measured)),
            FigureResult::Skipped { .. } => None,
        })
    }

    fn write_limits(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let range = |limit: fn(&MachineLimits) -> f64| {
            let limits = self.measured().map(|(_, measured)| limit(&measured.limits));
            (
                limits.clone().fold(f64::INFINITY, f64::min),
                limits.fold(0.0, f64::max),
            )
        };
        let (slow, fast) = range(|limits| limits.gigabytes_per_second);
        let (few, many) = range(|limits| limits.gigaops_per_second);
        writeln!(
            f,
            "limits, sampled with each figure: memory {slow:.1} to {fast:.1} GB/s \
             ({} MiB per pass), int8 peak {few:.0} to {many:.0} Gop/s",
            self.machine.probe_bytes >> 20,
        )
    }

    fn write_figures(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{:<20}{:>9}{:>19}{:>11}{:>10}  {:<10}{:>9}{:>9}{:>8}",
            "", "tok/s", "min – max", "ms a step", "roofline", "of", "in turn", "GB/s", "Gop/s"
        )?;
        for figure in &self.rows {
            match &figure.result {
                FigureResult::Skipped { skipped } => {
                    writeln!(f, "{:<20}  {skipped}", figure.kind)?;
                }
                FigureResult::Measured(measured) => write_figure(f, &figure.kind, measured)?,
            }
        }
        Ok(())
    }

    /// Writes how a step's time divides among its parts.
    fn write_parts(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\n{:<20}{:>10}", "ms a step", "plan")?;
        for stage in Stage::ALL {
            write!(f, "{:>11}", stage.name())?;
        }
        writeln!(f, "{:>10}{:>10}{:>18}", "sample", "commit", "not the model")?;
        for (kind, measured) in self.measured() {
            let parts = &measured.parts_ms;
            write!(f, "{kind:<20}{:>10.3}", parts.plan)?;
            for (_, spent) in &parts.stages {
                write!(f, "{spent:>11.3}")?;
            }
            let overhead = parts.plan + parts.sample + parts.commit;
            writeln!(
                f,
                "{:>10.3}{:>10.3}{:>16.1} %",
                parts.sample,
                parts.commit,
                100.0 * overhead / measured.step_ms
            )?;
        }
        Ok(())
    }
}

fn write_figure(
    f: &mut fmt::Formatter<'_>,
    kind: &FigureKind,
    measured: &Measurement,
) -> fmt::Result {
    let Spread { median, min, max } = measured.tokens_per_second;
    let bound = match measured.bound {
        Bound::Bandwidth => "bandwidth",
        Bound::Int8 => "int8 peak",
    };
    writeln!(
        f,
        "{kind:<20}{median:>9.1}{:>19}{:>11.3}{:>8.0} %  {bound:<10}{:>7.0} %{:>9.1}{:>8.0}",
        format!("{min:.1} – {max:.1}"),
        measured.step_ms,
        100.0 * measured.roofline,
        100.0 * measured.in_turn,
        measured.limits.gigabytes_per_second,
        measured.limits.gigaops_per_second,
    )
}
