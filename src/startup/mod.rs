//! Starts and stops the server.
//!
//! The start goes from the flags to the tenants, the kernels, the listener, the model, the engine
//! and the ready server. A signal drains the engine and ends the process.
//!
//! Invariant: while the model loads, the server answers `/health` but is not ready.
//!
//! Invariant: every error in flags, files or the model is found before the server is ready. That
//! includes kernels that compute something else than plain Rust (`src/opening/self_test.rs`).

mod allocator;
mod decoding;
mod kv_events;
mod listen;
mod load;
mod model_path;
mod service;
mod tenants;
mod traces;

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;
use std::{panic, process};

use sterna_kernels::Isa;
use tokio::runtime::{self, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::Level;
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::api::{self, ConnectionLimits, Serving};
use crate::config::{NetworkFlags, ServeConfig};
use crate::opening::kernels;
use crate::signals::StopSignals;

/// The async threads parse requests, tokenise short texts and write answers. The model has its own
/// compute threads.
const ASYNC_THREADS: usize = 2;
/// The exit code of a failure, as in `main.rs`.
const START_FAILED: i32 = 2;
/// The largest number of log lines that wait to be written: about 3 MB.
const MAX_UNWRITTEN_LINES: usize = 8192;
/// How the names of the crates begin that send downloads and traces. They log the bytes of their
/// requests at the level "trace", which have the token of the Hugging Face Hub or a key of the
/// collector. No value of RUST_LOG shows them.
const NO_REQUEST_BYTES: &str = "ureq";
/// The example in the greeting.
const CHAT_REQUEST: &str =
    r#"{"messages":[{"role":"user","content":"Who are you?"}],"stream":true}"#;
const EMBEDDING_REQUEST: &str = r#"{"input":"Who are you?"}"#;
/// How long clients may take to receive their errors after the engine has died.
const LAST_ANSWERS: Duration = Duration::from_secs(1);
const ENGINE_PANICKED: &str = "the engine thread panicked; its message is above";

/// Serves until SIGTERM or Ctrl-C, then drains. A signal while the model loads and a second signal
/// end the server at once.
///
/// # Errors
/// If the flags, the checkpoint or the machine make it impossible. The error says what is wrong.
pub fn serve(config: &ServeConfig) -> Result<(), Box<dyn Error>> {
    let _log = start_logging(config.operation.log_json);
    allocator::return_large_blocks();
    let addresses = listen::addresses(&config.network)?;
    let roster = tenants::roster(config, listen::are_loopback(&addresses))?;
    let access = listen::access(&config.network, &addresses, roster.is_some())?;
    let connections = listen::allow_files(config.network.max_connections);
    let kernels = kernels(config.machine.isa.as_deref())?;
    let runtime = start_runtime()?;
    // Listen to signals first: one that comes while the model loads must not be lost.
    let mut signals = runtime.block_on(async { StopSignals::listen() })?;
    // Without a roster the default action: SIGHUP ends the process with its terminal.
    let hangups = roster.as_ref().map(|_| hangups(&runtime)).transpose()?;
    // Before the port: a wrong path is more often the mistake.
    model_path::FoundModel::check(&config.model)?;
    let listeners = runtime.block_on(async { listen::listen(&addresses) })?;
    let address = listeners[0].local_addr()?;

    let app = tenants::app(config, roster.as_ref(), connections)?;
    app.set_access(access);
    let traces = traces::start(&config.traces, address, &app)?;
    let (stop, stopped) = oneshot::channel::<()>();
    let http = runtime.spawn(api::serve_all(
        listeners,
        api::router(app.clone()),
        connection_limits(&config.network, connections),
        async { drop(stopped.await) },
    ));
    let public = roster.iter().flat_map(|roster| roster.public()).cloned();
    let loading = load::load(config, kernels, public.collect())
        .map_err(|error| format!("the load thread does not start: {error}"))?;
    let Some(loaded) = runtime.block_on(signals.before(loading)) else {
        tracing::info!("a signal ended the server before the model was ready");
        return Ok(());
    };
    let (serving, engine) =
        loaded.map_err(|_| "the load thread panicked; its message is above")??;
    let events = &config.kv_events;
    kv_events::start(events, address, roster.as_ref(), &serving, &runtime)?;
    let handle = serving.engine.clone();
    if let (Some(roster), Some(hangups)) = (roster, hangups) {
        let reload = tenants::Reload {
            roster,
            model: serving.model.clone(),
            engine: handle.clone(),
            metrics: serving.metrics.clone(),
            app: app.clone(),
        };
        runtime.block_on(reload.install_limits(&reload.roster))?;
        runtime.spawn(reload.at_each(hangups));
    }
    let greeting = greeting(config, &serving, kernels.isa(), &address.to_string());
    runtime.spawn(serving.metrics.clone().keep_recent());
    app.serve(serving);
    print(&greeting);
    service::ready(&runtime, &handle);

    let mut ended = runtime.spawn_blocking(move || engine.join());
    if runtime.block_on(signals.before(&mut ended)).is_some() {
        // The streams have their last events now, which still have to reach the clients.
        drop(stop);
        drop(runtime.block_on(async { timeout(LAST_ANSWERS, http).await }));
        return Err(ENGINE_PANICKED.into());
    }
    let seconds = config.operation.drain_seconds;
    tracing::info!(seconds, "draining: running requests may finish");
    handle.drain();
    service::stopping();
    let Some(ended) = runtime.block_on(signals.before(ended)) else {
        runtime.shutdown_background(); // Dropping the runtime would wait for the engine.
        return Err("a second signal ended the server; running requests were aborted".into());
    };
    ended?.map_err(|_| ENGINE_PANICKED)?;
    drop(stop);
    runtime.block_on(http)?;
    traces.flush();
    Ok(())
}

/// Listens to SIGHUP.
fn hangups(runtime: &Runtime) -> io::Result<Signal> {
    runtime.block_on(async { signal(SignalKind::hangup()) })
}

/// Starts the async threads. `tokio` panics if the system refuses one of them, and unwinding waits
/// forever for the others. So the process ends in the panic hook.
fn start_runtime() -> Result<Runtime, Box<dyn Error>> {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(|panic| {
        let reason = panic.payload_as_str().unwrap_or("unknown");
        eprintln!("sterna: the async threads do not start: {reason}");
        process::exit(START_FAILED);
    }));
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(ASYNC_THREADS)
        .enable_all()
        .build();
    panic::set_hook(usual);
    runtime.map_err(|error| format!("the async threads do not start: {error}").into())
}

/// Starts the log. A thread of its own writes the lines, so a full pipe delays no request. While
/// the queue to that thread is full, further lines are lost. When the guard is dropped, the thread
/// writes the lines in the queue, for at most a second.
fn start_logging(json: bool) -> WorkerGuard {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let no_request_bytes = filter_fn(|metadata| {
        *metadata.level() <= Level::INFO || !metadata.target().starts_with(NO_REQUEST_BYTES)
    });
    let queue = NonBlockingBuilder::default().buffered_lines_limit(MAX_UNWRITTEN_LINES);
    let (writer, guard) = queue.thread_name("log").finish(io::stderr());
    let logs = tracing_subscriber::fmt::layer()
        .with_ansi(io::stderr().is_terminal())
        .with_writer(writer);
    let registry = tracing_subscriber::registry()
        .with(filter)
        .with(no_request_bytes);
    // A second call in one process keeps the first logger.
    drop(if json {
        registry.with(logs.json()).try_init()
    } else {
        registry.with(logs).try_init()
    });
    guard
}

fn connection_limits(network: &NetworkFlags, connections: u32) -> ConnectionLimits {
    ConnectionLimits {
        connections: connections as usize,
        connections_per_ip: network.max_connections_per_ip as usize,
        header_timeout: Duration::from_secs(network.header_seconds),
        idle_timeout: Duration::from_secs(network.idle_seconds),
        ..ConnectionLimits::default()
    }
}

/// Returns the message for the person who has just started the server.
fn greeting(config: &ServeConfig, serving: &Serving, isa: Isa, address: &str) -> String {
    let demo = match config.model.path {
        Some(_) => "",
        None => {
            "This is the embedded demo model: a few million parameters, trained on short chats.\n\
             Serve a real model with: sterna MODEL (a Hugging Face checkpoint, a \
             GGUF file, a .bin file, or OWNER/NAME on the Hugging Face Hub).\n"
        }
    };
    let key = match config.access.tenants {
        Some(_) => "-H \"authorization: Bearer $KEY\" ",
        None => "",
    };
    let (threads, name) = (config.machine.threads(), &serving.model.name);
    let url = format!("http://{address}");
    let (page, path, request) = match serving.model.embedding {
        Some(_) => (
            format!("\n  page     {url}/"),
            "embeddings",
            EMBEDDING_REQUEST,
        ),
        None => (
            format!("\n  chat     {url}/"),
            "chat/completions",
            CHAT_REQUEST,
        ),
    };
    format!(
        "{demo}Sterna serves {name} on {url} with {isa}, {threads} compute threads.{page}\
         \n  metrics  {url}/metrics\
         \n  try      curl -N {url}/v1/{path} -H 'content-type: application/json' \\\
         \n             {key}-d '{request}'\n"
    )
}

/// Prints the greeting. A closed standard output does not stop the server.
fn print(greeting: &str) {
    if let Err(error) = io::stdout().write_all(greeting.as_bytes()) {
        tracing::debug!(%error, "standard output is closed");
    }
}
