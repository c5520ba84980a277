//! `sterna inspect`: what a checkpoint holds, and whether this server would serve it.
//!
//! The command reads the files without regard to the architecture, and then loads the model as the
//! server does. So its verdict equals the server's.
//!
//! Invariant: what cannot be read is missing in the report, with the reason among the refusals.

mod report;
mod table;

use std::error::Error;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use crate::checkpoint::{I2sOrder, ModelConfig, Source, Survey};
use crate::config::InspectConfig;
use crate::cores;
use crate::model::LoadOptions;
use crate::opening::{ModelText, OpenCheckpoint, i2s_order, kernels};
use crate::text::ChatTemplate;

pub use report::{
    ExpertsReport, InspectReport, RecurrentReport, RotationReport, StopToken, TemplateReport,
    WindowReport,
};

/// The lines of a chat template that the report has.
const TEMPLATE_LINES: usize = 5;
/// The longest of these lines, in characters.
const TEMPLATE_COLUMNS: usize = 200;

/// Writes the report of a checkpoint to standard output. Returns whether the server would serve it.
///
/// # Errors
/// If the path does not exist, or writing fails.
pub fn run(config: &InspectConfig) -> Result<bool, Box<dyn Error>> {
    std::fs::metadata(&config.path)
        .map_err(|error| format!("{}: {error}", config.path.display()))?;
    let report = inspect(&config.path, i2s_order(config.i2s_order.as_deref()));
    match write(&report, config.json) {
        // A reader such as `head` has seen enough.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(report.served),
    }
}

fn write(report: &InspectReport, json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, report)?;
        return writeln!(out);
    }
    table::write(report, &mut out)
}

/// Returns the report of the checkpoint at `path`. `order` is the order of I2_S weights, if it is
/// known.
pub fn inspect(path: &Path, order: Option<I2sOrder>) -> InspectReport {
    match Survey::open(path) {
        Ok((survey, source)) => {
            let mut report = InspectReport::new(path, survey);
            add_text(&mut report, &source);
            load(&mut report, &source, order);
            report
        }
        Err(error) => InspectReport::unreadable(path, error.to_string()),
    }
}

/// Adds what needs the tokenizer: the texts of stop tokens and the template.
fn add_text(report: &mut InspectReport, source: &Source) {
    let vocabulary = report
        .model
        .vocabulary
        .and_then(|size| usize::try_from(size).ok());
    let Some(vocabulary) = vocabulary else {
        return;
    };
    let named: Vec<u32> = report.stops.iter().map(|stop| stop.id).collect();
    match ModelText::read(source, vocabulary, &named) {
        Ok(ModelText {
            tokenizer,
            template,
        }) => {
            let text = |id| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned();
            for stop in &mut report.stops {
                stop.text = Some(text(stop.id));
            }
            if report.stops.is_empty() {
                let warning = "no stop tokens: answers end only at their maximum length";
                report.warnings.push(warning.to_owned());
            }
            report.template = template.map(|template| template_report(report, source, &template));
        }
        Err(error) => report.refuse(error.to_string()),
    }
}

fn template_report(
    report: &InspectReport,
    source: &Source,
    template: &ChatTemplate,
) -> TemplateReport {
    let text = template.source();
    let has = |name: &str| source.has_file(name);
    let is_in_metadata = report.metadata_template.as_deref() == Some(text);
    let origin = match report.container {
        _ if has("chat_template.jinja") => "chat_template.jinja",
        "gguf" if !has("tokenizer_config.json") && is_in_metadata => "tokenizer.chat_template",
        "gguf" if !has("tokenizer_config.json") => "built-in",
        _ => "tokenizer_config.json",
    };
    let lines = text.lines().take(TEMPLATE_LINES);
    let lines = lines.map(|line| line.chars().take(TEMPLATE_COLUMNS).collect());
    TemplateReport {
        source: origin,
        first_lines: lines.collect(),
    }
}

/// Loads the model as the server does, and records the order of I2_S weights.
fn load(report: &mut InspectReport, source: &Source, order: Option<I2sOrder>) {
    let config = ModelConfig::read(source);
    if let Err(error) = &config {
        report.refuse(error.to_string());
    }
    report.set_i2s_order(order, if order.is_some() { "flag" } else { "unknown" });
    if let Ok(config) = &config {
        report.describe(config);
        report.computes = Some(if config.has_head {
            "text"
        } else {
            "embeddings"
        });
        report.pooling = Some(config.pooling.name());
    }
    let Some(config) = config.ok().filter(|_| report.refusals.is_empty()) else {
        return; // Loading would only repeat what is wrong.
    };
    let opened = OpenCheckpoint::read(source.clone()).map_err(|error| error.to_string());
    let loaded = opened.and_then(|checkpoint| {
        let options = LoadOptions::new(kernels(None)?, cores::usable());
        checkpoint.load(order, options)
    });
    match loaded {
        Ok((_, found)) if order.is_none() => {
            let told_by = if config.has_head { "probe" } else { "writer" };
            report.set_i2s_order(Some(found), told_by);
        }
        Ok(_) => {}
        Err(why) => report.refuse(why),
    }
    report.served = report.refusals.is_empty();
}
