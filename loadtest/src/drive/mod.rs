//! `drive`: parallel streaming clients against an OpenAI-compatible server.
//!
//! Invariant: `drive` knows the server only by HTTP and shares no code with it, so a changed wire
//! format breaks the load test.

mod args;
mod client;
mod conversation;
mod costs;
mod outcome;
mod prompt_text;
mod report;
mod sse;
mod stream;

use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::output::{print, progress_bar};
use crate::workload::{Session, Trace};
pub(crate) use args::DriveArgs;
use client::{ChatClient, ChatOptions};
use conversation::{ConversationSettings, run_session};
use costs::StepCosts;
use outcome::{ChatOutcome, Failure};
use prompt_text::{TextScale, all_words};
use report::{LiveRecorder, LiveReport};

/// Drives the server and prints the report. Returns the exit code.
///
/// # Errors
/// If flags do not fit the workload.
#[tokio::main]
pub(crate) async fn drive(args: &DriveArgs) -> Result<ExitCode, String> {
    let workload = args.workload();
    args.check_keys(&workload)?;
    let only = workload.only_class(args.only.as_deref())?;
    let classes = workload.classes.iter().map(|class| class.name).collect();
    let trace = Trace::new(&workload, args.seed, args.rate.unwrap_or(1.0))
        .requests(args.requests)
        .only(only);
    Ok(run(args, classes, trace).await.unwrap_or_else(|failure| {
        eprintln!("sterna-loadtest: {}: {failure}", args.url);
        ExitCode::FAILURE
    }))
}

/// Sends all requests and prints the report. Fails only if the server cannot be reached before the
/// first request.
async fn run(
    args: &DriveArgs,
    classes: Vec<&'static str>,
    trace: Trace,
) -> Result<ExitCode, String> {
    let options = ChatOptions {
        temperature: args.temperature,
        ignore_eos: args.ignore_eos,
        timeout: Duration::from_secs_f64(args.timeout_seconds),
    };
    let key = args.keys().first().cloned();
    let client = ChatClient::connect(&args.url, args.model.clone(), key, options).await;
    let client = Arc::new(client.map_err(|failure| failure.to_string())?);
    let scale = measure_scale(&client).await;
    let settings = ConversationSettings {
        scale: scale.map_err(|failure| failure.to_string())?,
        exact_length: args.ignore_eos,
        keys: args.keys().to_vec(),
    };
    let costs_before = match args.costs {
        Some(_) => Some(step_costs(&client).await?),
        None => None,
    };
    let (outcomes, received) = mpsc::unbounded_channel();
    let clients = Arc::new(LiveClients {
        client: Arc::clone(&client),
        settings,
        classes,
        outcomes,
    });
    let start = Instant::now();
    match args.rate {
        Some(_) => clients.open_loop(trace),
        None => clients.closed_loop(trace, args.clients),
    }
    let recorder = record_outcomes(args.requests, received).await;
    let report = recorder.report(start.elapsed());
    print(args.json, &report, &table(args, &report));
    let costs = match (&args.costs, costs_before) {
        (Some(file), Some(before)) => write_costs(&client, &before, file).await,
        _ => Ok(()),
    };
    if let Err(error) = &costs {
        eprintln!("sterna-loadtest: --costs: {error}");
    }
    Ok(ExitCode::from(u8::from(
        report.failed > 0 || costs.is_err(),
    )))
}

/// Writes the server's step costs since `before` to `file`.
async fn write_costs(client: &ChatClient, before: &StepCosts, file: &Path) -> Result<(), String> {
    let costs = step_costs(client).await?.since(before)?;
    costs
        .write(file)
        .map_err(|error| format!("cannot write {}: {error}", file.display()))
}

/// Reads the server's step costs so far from its metrics.
async fn step_costs(client: &ChatClient) -> Result<StepCosts, String> {
    let metrics = client.metrics().await;
    StepCosts::read(&metrics.map_err(|failure| failure.to_string())?)
}

/// Measures how many tokens the server counts per word, and for the chat template.
///
/// A prompt of a word twice has one word more than a prompt of the word once. The rest of the
/// prompt is the template. A prompt of all words then gives the mean tokens of a word.
async fn measure_scale(client: &ChatClient) -> Result<TextScale, Failure> {
    let words = all_words();
    let texts = [1, 2].map(|times| [words[0]].repeat(times).join(" "));
    let [once, twice] = texts.map(|text| client.prompt_tokens(text));
    let (once, twice) = (once.await?, twice.await?);
    let template = (2 * once).saturating_sub(twice);
    let all = client.prompt_tokens(words.join(" ")).await?;
    Ok(TextScale {
        tokens_per_word: all.saturating_sub(template).max(1) as f64 / words.len() as f64,
        template_tokens: template as u32,
    })
}

/// What all tasks of a run share.
struct LiveClients {
    client: Arc<ChatClient>,
    settings: ConversationSettings,
    classes: Vec<&'static str>,
    outcomes: mpsc::UnboundedSender<(&'static str, ChatOutcome)>,
}

impl LiveClients {
    /// Starts `clients` tasks. Each starts its next session when its last one has ended.
    fn closed_loop(self: Arc<Self>, trace: Trace, clients: u64) {
        let trace = Arc::new(Mutex::new(trace));
        for _ in 0..clients {
            let (run, trace) = (self.clone(), trace.clone());
            tokio::spawn(async move {
                loop {
                    let session = trace.lock().expect("a trace does not panic").next();
                    match session {
                        Some(session) => run.session(&session).await,
                        None => return,
                    }
                }
            });
        }
    }

    /// Starts each session at its time.
    fn open_loop(self: Arc<Self>, trace: Trace) {
        let start = tokio::time::Instant::now();
        tokio::spawn(async move {
            for session in trace {
                tokio::time::sleep_until(start + Duration::from_secs_f64(session.at)).await;
                let run = self.clone();
                tokio::spawn(async move { run.session(&session).await });
            }
        });
    }

    async fn session(&self, session: &Session) {
        let class = self.classes[session.class];
        run_session(&self.client, &self.settings, session, |outcome| {
            // Sending fails only if the run has ended.
            let _ = self.outcomes.send((class, outcome));
        })
        .await;
    }
}

/// Records outcomes as they arrive. Shows a progress bar if stderr is a terminal.
async fn record_outcomes(
    requests: u64,
    mut outcomes: mpsc::UnboundedReceiver<(&'static str, ChatOutcome)>,
) -> LiveRecorder {
    let bar = progress_bar(requests).with_message("0 failed");
    bar.enable_steady_tick(Duration::from_millis(200));
    let mut recorder = LiveRecorder::default();
    while let Some((class, outcome)) = outcomes.recv().await {
        recorder.record(class, &outcome);
        bar.set_message(format!("{} failed", recorder.failed()));
        bar.inc(1);
    }
    bar.finish_and_clear();
    recorder
}

fn table(args: &DriveArgs, report: &LiveReport) -> String {
    let load = match args.rate {
        Some(rate) => format!("{rate} sessions/s"),
        None => format!("{} clients", args.clients),
    };
    let (requests, url, seed) = (args.requests, &args.url, args.seed);
    format!("{load}, {requests} requests to {url}, seed {seed}\n{report}")
}
