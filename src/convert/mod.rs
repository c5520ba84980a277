//! `sterna convert`: writes a model into another container.
//!
//! `checkpoint::convert` writes the tensors; this module decides what is written where, checks the
//! text side, and puts the result in place.
//!
//! Invariant: OUT appears whole or not at all. The conversion is written beside it, flushed to the
//! disk, read back and compared with the input, and then renamed.

mod output;
mod text;

use std::error::Error;
use std::fs;
use std::future;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use indicatif::{ProgressBar, ProgressStyle};
use tokio::runtime;

use crate::checkpoint::convert::{ChatTemplates, Container, TernaryLayout, Watch, compare, write};
use crate::checkpoint::{I2sOrder, Source};
use crate::config::ConvertConfig;
use crate::model::{LoadOptions, Model};
use crate::opening::{GOLDEN_FILE, GoldenTokens, OpenCheckpoint, kernels, refuse_without_head};
use crate::signals::StopSignals;
use crate::text::ChatTemplate;
use output::Output;

/// The prompts whose answers `--golden` records if it names no file.
const PROMPTS: [&str; 4] = [
    "The capital of France is",
    "Once upon a time there was a small house at the end of a long road. In it lived",
    "Numbers: 1, 2, 3, 4,",
    "fn main() {\n    println!(",
];

/// Converts a model as the flags say. Ctrl-C and SIGTERM end the conversion and leave nothing
/// behind.
///
/// # Errors
/// If the flags contradict each other, the container cannot hold the model, or reading or writing
/// fails.
pub fn run(config: &ConvertConfig) -> Result<(), Box<dyn Error>> {
    let watch = Watch {
        progress: progress_bar(),
        interrupted: flag_of_signals()?,
    };
    convert(config, &watch)
}

/// Converts a model as the flags say, watched by `watch`.
///
/// # Errors
/// As [`run`].
pub fn convert(config: &ConvertConfig, watch: &Watch) -> Result<(), Box<dyn Error>> {
    let container = container(config)?;
    let prompts = config
        .golden
        .as_ref()
        .map(|file| read_prompts(file.as_deref()));
    let prompts = prompts.transpose()?;
    let output = Output::begin(&config.input, &config.output, config.force)?;
    let input = OpenCheckpoint::read(Source::open(&config.input)?)?;
    let options = LoadOptions {
        progress: io::stderr().is_terminal(),
        ..LoadOptions::new(
            kernels(config.machine.isa.as_deref())?,
            config.machine.threads(),
        )
    };
    let order = config.i2s_order.as_deref().and_then(I2sOrder::named);
    let (source, model) = match order.or(input.source.stated_i2s_order()) {
        None if input.source.has_i2s() => {
            let (model, order) = input.load(None, options)?;
            (input.source.clone().with_i2s_order(order), Some(model))
        }
        None => (input.source.clone(), None),
        Some(order) => (input.source.clone().with_i2s_order(order), None),
    };

    let written = output.path();
    let template = input.text.template.as_ref();
    let templates = ChatTemplates {
        default: template.map(ChatTemplate::source),
        tool_use: template.and_then(ChatTemplate::tool_source),
    };
    let left_out = write(&source, container, &written, templates, watch)?;
    for part in left_out {
        let message = format!(
            "left out: {} tensors {}*, which text generation does not need",
            part.tensors, part.prefix
        );
        watch.progress.suspend(|| eprintln!("{message}"));
    }
    let again = Source::open(&written)?;
    compare(&source, &again, watch)?;
    let again = OpenCheckpoint::read(again)?;
    text::compare(&input.text, &again.text, input.config.vocab)?;
    output.refuse_other_text(&source, container)?;
    if let Some(prompts) = prompts {
        refuse_without_head(&input.config)?;
        let mut model = match model {
            Some(model) => model,
            None => Model::load(&source, options)?,
        };
        let golden = GoldenTokens::record(&mut model, &input.text.tokenizer, &prompts)?;
        let weights = match container {
            Container::HuggingFace => written.join("model.safetensors"),
            Container::Gguf(_) | Container::Bin => written.clone(),
        };
        let content = golden.to_json(&weights)?;
        output.add(container, GOLDEN_FILE, content.as_bytes())?;
    }
    if watch.interrupted.load(Ordering::Relaxed) {
        return Err("interrupted".into());
    }
    output.commit()?;
    watch.progress.finish_and_clear();
    Ok(())
}

/// Returns the prompts in a file, one in each line, or the built-in ones.
///
/// # Errors
/// If the file cannot be read or has no prompt.
fn read_prompts(file: Option<&Path>) -> Result<Vec<String>, String> {
    let Some(file) = file else {
        return Ok(PROMPTS.map(str::to_owned).into());
    };
    let text = fs::read_to_string(file);
    let text = text.map_err(|error| format!("--golden {}: {error}", file.display()))?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let prompts: Vec<String> = lines.map(str::to_owned).collect();
    if prompts.is_empty() {
        return Err(format!("--golden {}: it has no prompt", file.display()));
    }
    Ok(prompts)
}

/// Returns the container that the flags or the name of OUT say.
fn container(config: &ConvertConfig) -> Result<Container, String> {
    let extension = Path::new(&config.output).extension();
    let extension = extension.map(|extension| extension.to_string_lossy().to_lowercase());
    let named = match extension.as_deref() {
        Some("gguf") => "gguf",
        Some("bin") => "bin",
        Some("safetensors") => {
            return Err("OUT: give the directory, not the .safetensors file in it".to_owned());
        }
        _ => "hf",
    };
    let layout = config.layout.as_deref().and_then(TernaryLayout::named);
    match (config.to.as_deref().unwrap_or(named), layout) {
        ("gguf", _) if named != "gguf" => {
            Err("OUT: the name of a GGUF file must end in .gguf".to_owned())
        }
        ("gguf", Some(layout)) => Ok(Container::Gguf(layout)),
        ("gguf", None) => {
            let names = TernaryLayout::ALL.map(TernaryLayout::name).join(", ");
            Err(format!(
                "--layout: missing; a GGUF file needs one of {names}"
            ))
        }
        ("bin", None) if named == "bin" => Ok(Container::Bin),
        ("bin", None) => Err("OUT: the name of a .bin file must end in .bin".to_owned()),
        (_, None) => Ok(Container::HuggingFace),
        (_, Some(layout)) => {
            let layout = layout.name();
            Err(format!(
                "--layout {layout}: only GGUF files have a layout; name OUT .gguf"
            ))
        }
    }
}

fn progress_bar() -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("converting {bar:40} {bytes}/{total_bytes}");
    ProgressBar::new(0).with_style(style.expect("the template is well-formed"))
}

/// Returns a flag that SIGTERM and Ctrl-C set.
fn flag_of_signals() -> io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut signals = runtime.block_on(async { StopSignals::listen() })?;
    let interrupted = flag.clone();
    thread::Builder::new()
        .name("sterna-signals".into())
        .spawn(move || {
            let never = future::pending::<()>();
            runtime.block_on(signals.before(never));
            interrupted.store(true, Ordering::Relaxed);
        })?;
    Ok(flag)
}
