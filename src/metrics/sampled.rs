//! Metrics that are read when they are rendered: the state of the process, grammars, and the limits
//! and the service time of each tenant. A service time has fractions, which the counters of the
//! metrics library do not have.

use std::fmt::Write as _;
use std::time::Duration;

use sterna_scheduler::TenantId;

use super::registry::Definition;

/// A metric without buckets.
pub(super) struct SampledMetric {
    name: &'static str,
    help: &'static str,
    kind: &'static str, // As in Prometheus's text format.
}

impl SampledMetric {
    pub(super) const fn gauge(name: &'static str, help: &'static str) -> SampledMetric {
        let kind = "gauge";
        SampledMetric { name, help, kind }
    }

    pub(super) fn definition(&self) -> Definition {
        Definition {
            name: self.name,
            buckets: None,
        }
    }
}

pub(super) const SERVICE: SampledMetric = SampledMetric {
    name: "sterna_tenant_service_seconds_total",
    help: "Machine time charged to a tenant.",
    kind: "counter",
};

/// The metrics of grammars, as in [`GrammarFigures::values`].
const GRAMMARS: [SampledMetric; 4] = [
    SampledMetric::gauge(
        "sterna_grammar_workers",
        "Processes that compile a grammar or compute its masks.",
    ),
    SampledMetric {
        name: "sterna_grammar_deaths_total",
        help: "Processes of grammars that ended before their grammar was given up.",
        kind: "counter",
    },
    SampledMetric::gauge(
        "sterna_grammars_waiting",
        "Grammars that wait to be compiled.",
    ),
    SampledMetric::gauge(
        "sterna_grammar_cache_bytes",
        "Memory that compiled grammars count in the cache.",
    ),
];

/// The processor time of a tenant's grammars, as in [`GrammarFigures::times`].
pub(super) const GRAMMAR_TIMES: [SampledMetric; 2] = [
    SampledMetric {
        name: "sterna_tenant_grammar_compilation_seconds_total",
        help: "Processor time of the compilations of a tenant's grammars.",
        kind: "counter",
    },
    SampledMetric {
        name: "sterna_tenant_grammar_mask_seconds_total",
        help: "Processor time of the masks of a tenant's grammars.",
        kind: "counter",
    },
];

/// What the processes of grammars have taken and take.
#[derive(Clone, Debug, Default)]
pub struct GrammarFigures {
    /// The processes, the deaths so far, the grammars that wait, and the bytes of the cache.
    pub values: [u64; 4],
    /// The processor time of each tenant: for compilations and for masks.
    pub times: Vec<(TenantId, [Duration; 2])>,
}

/// What Prometheus's client libraries say of a process, under the same names.
const PROCESS: [SampledMetric; 7] = [
    SampledMetric {
        name: "process_cpu_seconds_total",
        help: "Processor time of the process, in user and in system mode.",
        kind: "counter",
    },
    SampledMetric {
        name: "process_resident_memory_bytes",
        help: "Memory of the process that is in RAM.",
        kind: "gauge",
    },
    SampledMetric {
        name: "process_virtual_memory_bytes",
        help: "Address space of the process.",
        kind: "gauge",
    },
    SampledMetric {
        name: "process_start_time_seconds",
        help: "When the process started, in Unix seconds.",
        kind: "gauge",
    },
    SampledMetric {
        name: "process_open_fds",
        help: "Open files and connections.",
        kind: "gauge",
    },
    SampledMetric {
        name: "process_max_fds",
        help: "The limit of open files and connections.",
        kind: "gauge",
    },
    SampledMetric {
        name: "process_threads",
        help: "Threads of the process.",
        kind: "gauge",
    },
];

/// Returns the metrics of the process and the service time.
pub(super) fn definitions() -> impl Iterator<Item = Definition> {
    let grammars = GRAMMARS.iter().chain(&GRAMMAR_TIMES);
    let metrics = PROCESS.iter().chain([&SERVICE]).chain(grammars);
    metrics.map(SampledMetric::definition)
}

/// Writes metrics in Prometheus's text format, version 0.0.4.
pub(super) struct TextWriter {
    text: String,
    labels: String, // Of every series.
}

impl TextWriter {
    /// Returns a writer that appends to `text`.
    pub(super) fn new(text: String, model_name: &str) -> TextWriter {
        let labels = format!("model_name=\"{}\",engine=\"0\"", escaped(model_name));
        TextWriter { text, labels }
    }

    pub(super) fn finish(self) -> String {
        self.text
    }

    /// Writes a metric with a series for each tenant.
    pub(super) fn by_tenant<'a>(
        &mut self,
        metric: &SampledMetric,
        values: impl Iterator<Item = (&'a str, f64)>,
    ) {
        self.head(metric);
        for (tenant, value) in values {
            let (name, labels, tenant) = (metric.name, &self.labels, escaped(tenant));
            let line = writeln!(self.text, "{name}{{{labels},tenant=\"{tenant}\"}} {value}");
            line.expect("strings take all text");
        }
    }

    /// Writes the metrics of this process, if the system tells them.
    pub(super) fn process(&mut self) {
        let values = process_values().into_iter().flatten();
        PROCESS
            .iter()
            .zip(values)
            .for_each(|(metric, value)| self.plain(metric, value));
    }

    /// Writes the metrics of grammars.
    pub(super) fn grammars(&mut self, values: [u64; 4]) {
        for (metric, value) in GRAMMARS.iter().zip(values) {
            self.plain(metric, value as f64);
        }
    }

    fn plain(&mut self, metric: &SampledMetric, value: f64) {
        self.head(metric);
        let (name, labels) = (metric.name, &self.labels);
        let line = writeln!(self.text, "{name}{{{labels}}} {value}");
        line.expect("strings take all text");
    }

    fn head(&mut self, SampledMetric { name, help, kind }: &SampledMetric) {
        let lines = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        lines.expect("strings take all text");
    }
}

/// Returns the value of a label as it stands between quotes.
fn escaped(value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"");
    value.replace('\n', "\\n")
}

/// Returns the values of [`PROCESS`], from proc(5).
#[cfg(target_os = "linux")]
fn process_values() -> Option<[f64; 7]> {
    use procfs::process::{LimitValue, Process};

    let process = Process::myself().ok()?;
    let stat = process.stat().ok()?;
    let ticks = procfs::ticks_per_second() as f64;
    let started = procfs::boot_time_secs().ok()? as f64 + stat.starttime as f64 / ticks;
    let files = match process.limits().ok()?.max_open_files.soft_limit {
        LimitValue::Value(files) => files as f64,
        LimitValue::Unlimited => f64::INFINITY,
    };
    Some([
        (stat.utime + stat.stime) as f64 / ticks,
        (stat.rss * procfs::page_size()) as f64,
        stat.vsize as f64,
        started,
        process.fd_count().ok()? as f64,
        files,
        stat.num_threads as f64,
    ])
}

#[cfg(not(target_os = "linux"))]
fn process_values() -> Option<[f64; 7]> {
    None
}
