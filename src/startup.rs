//! The way up and down: flags → kernels → model → engine → HTTP, wait for a signal, drain.
//!
//! Invariants: while a model loads, the server lives but is not ready; whatever is wrong is found before it is ready.

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::PAGE_TOKENS;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::api::{self, App, ConnectionLimits, ModelCard, Serving};
use crate::config::ServeConfig;
use crate::demo;
use crate::engine::{Engine, EngineConfig, Limits};
use crate::metrics::{Identity, Metrics};
use crate::model::{LoadOptions, Model, ModelConfig, Source};
use crate::text::{ChatTemplate, Files, Tokenizer};

const DEMO_NAME: &str = "sterna-demo";
/// The async threads parse, tokenise small texts and frame; the compute threads are the model's.
const ASYNC_THREADS: usize = 2;
/// A step that takes longer means that something is broken.
const STALL_LIMIT: Duration = Duration::from_secs(60);

/// Serves until SIGTERM or Ctrl-C, then drains.
///
/// # Errors
/// When the flags, the checkpoint or the machine do not allow it; the text names what is wrong.
pub fn serve(config: &ServeConfig) -> Result<(), Box<dyn Error>> {
    start_logging(config.log_json);
    let kernels = kernels(config.isa.as_deref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(ASYNC_THREADS)
        .enable_all()
        .build()?;
    // Handlers for signals first: one that comes while the model loads must not be lost.
    let signalled = runtime.block_on(async { Signals::listen() })?;
    let listener = runtime
        .block_on(TcpListener::bind((config.host, config.port)))
        .map_err(|error| format!("can't listen on {}:{}: {error}", config.host, config.port))?;
    let address = listener.local_addr()?;

    let app = App::loading();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let http = runtime.spawn(api::serve(
        listener,
        api::router(app.clone()),
        ConnectionLimits::default(),
        async { drop(stopped.await) },
    ));
    let (serving, engine) = start_engine(config, kernels)?;
    let handle = serving.engine.clone();
    app.serve(serving);
    greet(config, kernels.isa(), &address.to_string());

    runtime.block_on(signalled.first());
    tracing::info!(
        seconds = config.drain_seconds,
        "draining: no new requests, the rest may finish"
    );
    handle.drain();
    engine
        .join()
        .map_err(|_| "the engine stopped after a bug")?;
    drop(stop);
    runtime.block_on(http)?;
    Ok(())
}

/// Loads the model and starts its engine.
fn start_engine(
    config: &ServeConfig,
    kernels: Kernels,
) -> Result<(Serving, Engine), Box<dyn Error>> {
    let source = match &config.model {
        Some(directory) => Source::Directory(directory.clone()),
        None => demo::source(),
    };
    let shape = ModelConfig::read(&source)?;
    let (tokenizer, chat_template) = load_text(&source, shape.vocab)?;
    let limits = limits(config, &shape)?;
    let threads = config.threads();
    let pin = thread::available_parallelism().is_ok_and(|cores| threads <= cores.get());
    let options = LoadOptions {
        kernels,
        threads,
        pin_threads: pin,
        max_step_tokens: limits.max_batch_tokens(),
        max_logits_rows: limits.max_running as usize,
        progress: io::stderr().is_terminal(),
    };
    let model = Model::load(&source, options)?;
    let pages = pages(config, &model, limits.max_sequence_tokens)?;
    let limits = Limits { pages, ..limits };
    let card = ModelCard {
        name: model_name(config)?,
        aliases: Vec::new(),
        max_model_len: u32::try_from(limits.longest_sequence())?,
        vocabulary: u32::try_from(shape.vocab)?,
        stop_tokens: shape.eos_tokens,
    };
    let metrics = Metrics::new(&Identity {
        model_name: card.name.clone(),
        isa: kernels.isa().to_string(),
        kv_pages: pages,
        page_tokens: PAGE_TOKENS as u32,
    });
    let engine_config = EngineConfig {
        submit_lane: limits.max_queued as usize,
        limits,
        drain_limit: Duration::from_secs(config.drain_seconds),
        stall_limit: STALL_LIMIT,
        pin,
    };
    let (engine, threads) = Engine::start(model, engine_config, metrics.clone())?;
    let serving = Serving {
        model: card,
        tokenizer: Arc::new(tokenizer),
        chat_template,
        engine,
        metrics,
    };
    Ok((serving, threads))
}

fn kernels(isa: Option<&str>) -> Result<Kernels, Box<dyn Error>> {
    let isa = match isa {
        Some(name) => name.parse()?,
        None => Isa::best(),
    };
    Kernels::new(isa).ok_or_else(|| format!("--isa {isa}: this machine does not have it").into())
}

fn load_text(
    source: &Source,
    vocabulary: usize,
) -> Result<(Tokenizer, Option<ChatTemplate>), Box<dyn Error>> {
    let tokenizer = source
        .read("tokenizer.json")?
        .ok_or("the checkpoint has no tokenizer.json")?;
    let config = source.read("tokenizer_config.json")?;
    let chat_template = source
        .read("chat_template.jinja")?
        .map(|bytes| String::from_utf8(bytes.into_owned()))
        .transpose()
        .map_err(|_| "chat_template.jinja is not UTF-8")?;
    let files = Files {
        tokenizer: &tokenizer,
        config: config.as_deref(),
        chat_template: chat_template.as_deref(),
    };
    Ok(files.load(u32::try_from(vocabulary)?)?)
}

/// The scheduler's limits; the pages come once the size of one is known.
fn limits(config: &ServeConfig, model: &ModelConfig) -> Result<Limits, Box<dyn Error>> {
    let made_for = u32::try_from(model.max_position)?;
    let max_sequence_tokens = config.max_model_len.unwrap_or(made_for);
    if max_sequence_tokens > made_for {
        return Err(format!(
            "--max-model-len {max_sequence_tokens}: the model was made for {made_for} tokens"
        )
        .into());
    }
    Ok(Limits {
        pages: 1,
        max_running: config.max_running,
        max_queued: config.max_queued,
        step_tokens: config.step_tokens,
        prefill_chunk: config.prefill_chunk,
        max_sequence_tokens,
    })
}

fn pages(
    config: &ServeConfig,
    model: &Model,
    max_sequence_tokens: u32,
) -> Result<u32, Box<dyn Error>> {
    let page = model.kv_bytes_per_page();
    match config.kv_pages(page, PAGE_TOKENS, max_sequence_tokens) {
        0 => Err(format!("--kv-memory: not even one page of {page} bytes fits").into()),
        pages => Ok(pages),
    }
}

fn model_name(config: &ServeConfig) -> Result<String, Box<dyn Error>> {
    if let Some(name) = &config.model_name {
        return Ok(name.clone());
    }
    let Some(directory) = &config.model else {
        return Ok(DEMO_NAME.to_owned());
    };
    let path = directory.canonicalize()?;
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned());
    Ok(name.ok_or("--model-name: this directory has no name to use")?)
}

fn start_logging(json: bool) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr);
    // A second call in one process keeps the first logger.
    drop(if json {
        logs.json().try_init()
    } else {
        logs.try_init()
    });
}

/// What a person who has just started the server needs to know. A closed standard output is no reason not to serve.
fn greet(config: &ServeConfig, isa: Isa, address: &str) {
    let demo = match config.model {
        Some(_) => "",
        None => {
            "This is the embedded demo model: a few million parameters, trained on short chats.\n\
             Serve a real one with: sterna --model DIR (a Hugging Face checkpoint).\n"
        }
    };
    let threads = config.threads();
    let greeting = format!(
        "{demo}Sterna serves on http://{address} with {isa}, {threads} compute threads.\n  \
           chat     http://{address}/\n  \
           metrics  http://{address}/metrics\n  \
           try      curl -N http://{address}/v1/chat/completions -H 'content-type: application/json' \\\n             \
                    -d '{{\"messages\":[{{\"role\":\"user\",\"content\":\"Who are you?\"}}],\"stream\":true}}'\n"
    );
    if let Err(error) = io::stdout().write_all(greeting.as_bytes()) {
        tracing::debug!(%error, "nobody reads standard output");
    }
}

/// SIGTERM and Ctrl-C.
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    /// Call it inside the runtime.
    fn listen() -> io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn first(mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
