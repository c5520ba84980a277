//! The way up and down: flags → tenants → kernels → model → engine → HTTP, wait for a signal, drain.
//!
//! Invariants: while a model loads, the server lives but is not ready; whatever is wrong is found before it is ready.

mod tenants;

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::PAGE_TOKENS;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tracing_subscriber::EnvFilter;

use crate::api::{self, ConnectionLimits, ModelCard, Serving};
use crate::config::ServeConfig;
use crate::demo;
use crate::engine::{Budget, Engine, EngineConfig, Limits, Policy};
use crate::metrics::{Identity, Metrics};
use crate::model::{LoadOptions, Model, ModelConfig, Source};
use crate::tenants::PublicText;
use crate::text::{ChatTemplate, Message, TextFiles, Tokenizer};

const DEMO_NAME: &str = "sterna-demo";
/// The async threads parse, tokenise small texts and frame; the compute threads are the model's.
const ASYNC_THREADS: usize = 2;
/// A step that takes longer means that something is broken.
const STALL_LIMIT: Duration = Duration::from_secs(60);

/// Serves until SIGTERM or Ctrl-C, then drains. A signal while the model loads ends at once; so does a second one.
///
/// # Errors
/// When the flags, the checkpoint or the machine do not allow it; the text names what is wrong.
pub fn serve(config: &ServeConfig) -> Result<(), Box<dyn Error>> {
    start_logging(config.log_json);
    let roster = tenants::roster(config)?;
    let kernels = kernels(config.isa.as_deref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(ASYNC_THREADS)
        .enable_all()
        .build()?;
    // Handlers first: a signal that comes while the model loads must not be lost.
    let mut signals = runtime.block_on(async { Signals::listen() })?;
    let hangups = match &roster {
        Some(_) => Some(runtime.block_on(async { signal(SignalKind::hangup()) })?),
        None => None, // As for any program: its terminal has gone, and so should it.
    };
    let listener = runtime
        .block_on(TcpListener::bind((config.host, config.port)))
        .map_err(|error| format!("can't listen on {}:{}: {error}", config.host, config.port))?;
    let address = listener.local_addr()?;

    let app = tenants::app(config, roster.as_ref());
    let (stop, stopped) = oneshot::channel::<()>();
    let http = runtime.spawn(api::serve(
        listener,
        api::router(app.clone()),
        connection_limits(config),
        async { drop(stopped.await) },
    ));
    let public = roster
        .as_ref()
        .map_or_else(Vec::new, |roster| roster.public().to_vec());
    let loading = load(config, kernels, public)?;
    let Some(loaded) = runtime.block_on(signals.before(loading)) else {
        return Ok(());
    };
    let (serving, engine) = loaded.map_err(|_| "loading the model failed after a bug")??;
    let handle = serving.engine.clone();
    if let (Some(roster), Some(hangups)) = (roster, hangups) {
        let installing = tenants::install(&roster, &serving.model, &handle, &serving.metrics);
        runtime.block_on(installing)?;
        let reloading = tenants::Reloading {
            roster,
            model: serving.model.clone(),
            engine: handle.clone(),
            metrics: serving.metrics.clone(),
            app: app.clone(),
        };
        let reloading = reloading.at(hangups);
        runtime.spawn(reloading);
    }
    let greeting = greeting(config, &serving, kernels.isa(), &address.to_string());
    app.serve(serving);
    say(&greeting);

    let mut ended = runtime.spawn_blocking(move || engine.join());
    if runtime.block_on(signals.before(&mut ended)).is_some() {
        return Err("the engine stopped after a bug".into());
    }
    tracing::info!(
        seconds = config.drain_seconds,
        "draining: the rest may finish"
    );
    handle.drain();
    let Some(ended) = runtime.block_on(signals.before(ended)) else {
        runtime.shutdown_background(); // Else it would wait for the engine after all.
        return Err("ended by a second signal; requests were cut".into());
    };
    ended?.map_err(|_| "the engine stopped after a bug")?;
    drop(stop);
    runtime.block_on(http)?;
    Ok(())
}

type Loaded = Result<(Serving, Engine), String>;

/// Loads on a thread of its own, which a signal may leave behind.
fn load(
    config: &ServeConfig,
    kernels: Kernels,
    public: Vec<PublicText>,
) -> io::Result<oneshot::Receiver<Loaded>> {
    let (sender, loaded) = oneshot::channel();
    let config = config.clone();
    thread::Builder::new()
        .name("sterna-load".into())
        .spawn(move || {
            let result = start_engine(&config, kernels, &public).map_err(|error| error.to_string());
            // Nobody waits any more after a signal.
            drop(sender.send(result));
        })?;
    Ok(loaded)
}

/// Loads the model and starts its engine.
fn start_engine(
    config: &ServeConfig,
    kernels: Kernels,
    public: &[PublicText],
) -> Result<(Serving, Engine), Box<dyn Error>> {
    let source = match &config.model {
        Some(directory) => Source::Directory(directory.clone()),
        None => demo::source(),
    };
    let shape = ModelConfig::read(&source)?;
    let (tokenizer, chat_template) = load_text(&source, shape.vocab)?;
    let limits = limits(config, &shape)?;
    let pin = config.pin_threads();
    let options = LoadOptions {
        pin_threads: pin,
        max_step_tokens: limits.max_batch_tokens(),
        max_logits_rows: limits.max_logits(),
        progress: io::stderr().is_terminal(),
        ..LoadOptions::new(kernels, config.threads())
    };
    let model = Model::load(&source, options)?;
    let page = model.kv_bytes_per_page();
    let pages = config.kv_pages(page, PAGE_TOKENS, limits.max_sequence_tokens)?;
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
        policy: policy(config),
        public_prefixes: tenants::public_prefixes(
            public,
            chat_template.as_ref(),
            &tokenizer,
            pages,
        )?,
        cost: None,
        drain_limit: Duration::from_secs(config.drain_seconds),
        stall_limit: STALL_LIMIT,
        pin,
    };
    tracing::info!(
        pages,
        bytes = pages as usize * page,
        "memory for keys and values"
    );
    let (engine, running) = Engine::start(model, engine_config, metrics.clone())?;
    let serving = Serving {
        model: card,
        tokenizer: Arc::new(tokenizer),
        chat_template,
        engine,
        metrics,
    };
    Ok((serving, running))
}

fn connection_limits(config: &ServeConfig) -> ConnectionLimits {
    ConnectionLimits {
        connections: config.max_connections as usize,
        connections_per_ip: config.max_connections_per_ip as usize,
        ..ConnectionLimits::default()
    }
}

/// The kernels of the instruction set that is asked for, or of the best.
pub(crate) fn kernels(isa: Option<&str>) -> Result<Kernels, Box<dyn Error>> {
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
        .map(|bytes| String::from_utf8(bytes.to_vec()))
        .transpose()
        .map_err(|_| "chat_template.jinja is not UTF-8")?;
    let files = TextFiles {
        tokenizer: &tokenizer,
        config: config.as_deref(),
        chat_template: chat_template.as_deref(),
    };
    let (tokenizer, chat_template) = files.load(u32::try_from(vocabulary)?)?;
    warm_up(&tokenizer, chat_template.as_ref());
    Ok((tokenizer, chat_template))
}

/// Turns a conversation and a text into tokens: the first time takes two milliseconds more (the demo's first text completion of one token took
/// 3.7 ms, with this 1.7; the next takes 1.1), for which no user shall wait. What comes out, or that a template refuses, matters to nobody yet.
fn warm_up(tokenizer: &Tokenizer, chat_template: Option<&ChatTemplate>) {
    let text = "Hello, it's 1 warm-up.";
    let message = Message {
        role: "user".into(),
        content: text.into(),
    };
    drop(chat_template.map(|template| template.prompt(tokenizer, &[message])));
    drop(tokenizer.encode_prompt(text));
}

/// How the scheduler decides.
fn policy(config: &ServeConfig) -> Policy {
    Policy {
        budget: Budget::within(config.itl_target_ms * 1000),
        max_draft: config.speculate,
        ..Policy::default()
    }
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
        max_queued_time: config.max_queued_seconds * 1_000_000,
        step_tokens: config.step_tokens,
        prefill_chunk: config.step_tokens,
        max_sequence_tokens,
    })
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
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr);
    // A second call in one process keeps the first logger.
    drop(if json {
        logs.json().try_init()
    } else {
        logs.try_init()
    });
}

/// What a person who has just started the server needs to know.
fn greeting(config: &ServeConfig, serving: &Serving, isa: Isa, address: &str) -> String {
    let demo = match config.model {
        Some(_) => "",
        None => {
            "This is the embedded demo model: a few million parameters, trained on short chats.\n\
             Serve a real one with: sterna --model DIR (a Hugging Face checkpoint).\n"
        }
    };
    let key = match config.tenants {
        Some(_) => "-H \"authorization: Bearer $KEY\" ",
        None => "",
    };
    let (threads, name) = (config.threads(), &serving.model.name);
    format!(
        "{demo}Sterna serves {name} on http://{address} with {isa}, {threads} compute threads.\n  \
           chat     http://{address}/\n  \
           metrics  http://{address}/metrics\n  \
           try      curl -N http://{address}/v1/chat/completions -H 'content-type: application/json' \\\n             {key}\
                    -d '{{\"messages\":[{{\"role\":\"user\",\"content\":\"Who are you?\"}}],\"stream\":true}}'\n"
    )
}

/// A closed standard output is no reason not to serve.
fn say(greeting: &str) {
    if let Err(error) = io::stdout().write_all(greeting.as_bytes()) {
        tracing::debug!(%error, "nobody reads standard output");
    }
}

/// SIGTERM and Ctrl-C.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Call it inside the runtime.
    fn listen() -> io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// What `work` comes to, or nothing if a signal comes first.
    async fn before<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            done = work => Some(done),
            _ = self.terminate.recv() => None,
            _ = self.interrupt.recv() => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use sterna_kernels::Isa;

    use super::kernels;
    use crate::config::Cli;

    #[test]
    fn every_instruction_set_can_be_asked_for() {
        for isa in [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Avx512Vbmi] {
            let name = isa.to_string();
            for flags in [&["sterna"][..], &["sterna", "bench"]] {
                let asked = Cli::try_parse_from(flags.iter().chain(&["--isa", &name]));
                assert!(asked.is_ok(), "{flags:?} --isa {name}");
            }
            assert_eq!(kernels(Some(&name)).is_ok(), isa.is_available());
        }
    }
}
