//! `drive`: parallel streaming clients against an OpenAI-compatible server.
//!
//! Always true: it knows the server only by HTTP and shares no code with it, so it breaks when the wire format does.

mod client;
mod conversation;
mod costs;
mod report;
mod sse;
mod text;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::mpsc;

use crate::workload::{Class, Count, NAMES, Session, Shared, Trace, Workload, named};
use crate::{fraction, positive};
use client::{Client, Failure, Options, Outcome};
use conversation::{Speech, converse, read_keys};
use costs::StepCosts;
use report::{Recorder, Report};
use text::{Scale, all_words};

/// The latest a disconnecting client leaves, in seconds: long enough to reach decoding, short enough to hit the queue too.
const DISCONNECT_WITHIN: f64 = 2.0;

/// The knobs of `drive`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DriveArgs {
    /// The server's address, with or without /v1.
    #[arg(long, default_value = "http://127.0.0.1:30000")]
    url: String,
    /// Model to ask for; the first one served if absent.
    #[arg(long)]
    model: Option<String>,
    /// A named workload (`simulate --list` says what each is) instead of the flags that describe one. With --ignore-eos the
    /// answers are as long as the workload says.
    #[arg(long, value_parser = NAMES, conflicts_with_all = ["max_tokens", "prompt_tokens", "prompt_spread", "shared_prefix_tokens", "disconnect_fraction"])]
    workload: Option<String>,
    /// Only the sessions of this class of the named workload; they are the same, at the same times, as among the others.
    #[arg(long, value_name = "CLASS", requires = "workload")]
    only: Option<String>,
    /// File of API keys, `tenant=key` a line: the first line's for the workload's tenant 0, and so on.
    #[arg(long, value_name = "FILE", value_parser = keys)]
    keys: Option<Keys>,
    /// Clients that each begin their next session when the last one has ended.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    clients: u64,
    /// Requests in all.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..))]
    requests: u64,
    /// Instead of --clients: sessions a second, beginning at random (Poisson), whether or not earlier ones have ended.
    #[arg(long, value_parser = positive, conflicts_with = "clients")]
    rate: Option<f64>,
    /// Output tokens at most, of each request.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Do not stop at the end-of-sequence token, so that every answer has exactly --max-tokens.
    #[arg(long)]
    ignore_eos: bool,
    /// Mean tokens of a turn's new prompt, what the chat template puts around the user's message among them. The server's own count of a
    /// few probing requests, the longest of 192 words, sets the scale.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    prompt_tokens: u32,
    /// Prompt lengths vary evenly within this share of the mean; 0 makes all equal.
    #[arg(long, default_value_t = 0.5, value_parser = fraction)]
    prompt_spread: f64,
    /// Tokens of a system message that all requests share.
    #[arg(long, default_value_t = 0)]
    shared_prefix_tokens: u32,
    /// Share of requests whose client leaves at a random moment before its answer is complete.
    #[arg(long, default_value_t = 0.0, value_parser = fraction)]
    disconnect_fraction: f64,
    /// Sampling temperature; 0 is greedy.
    #[arg(long, default_value_t = 0.0, value_parser = clap::value_parser!(f64))]
    temperature: f64,
    /// A request that takes longer than this has failed.
    #[arg(long, default_value_t = 600.0, value_parser = positive)]
    timeout_seconds: f64,
    /// Seed of prompts, lengths, arrivals, disconnections and sampling.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write what a step cost the server during the run to this file, as `simulate --cost` reads it; only Sterna tells.
    #[arg(long, value_name = "FILE")]
    costs: Option<PathBuf>,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// By tenant.
#[derive(Clone, Debug)]
struct Keys(Vec<String>);

fn keys(path: &str) -> Result<Keys, String> {
    read_keys(Path::new(path)).map(Keys)
}

/// Drives the server as asked and prints what came of it: 0 when no request failed.
#[tokio::main]
pub(crate) async fn drive(args: &DriveArgs) -> ExitCode {
    let workload = args.workload();
    let tenants = workload.tenants() as usize;
    if let Some(Keys(keys)) = args.keys.as_ref().filter(|keys| keys.0.len() < tenants) {
        eprintln!(
            "sterna-loadtest: {tenants} tenants, but {} keys",
            keys.len()
        );
        return ExitCode::from(2);
    }
    let only = match args.only.as_ref().map(|name| workload.class_called(name)) {
        Some(Err(error)) => {
            eprintln!("sterna-loadtest: {error}");
            return ExitCode::from(2);
        }
        Some(Ok(class)) => Some(class),
        None => None,
    };
    match run(args, &workload, only).await {
        Ok((report, costs)) => {
            print(args, &report);
            if let Err(error) = &costs {
                eprintln!("sterna-loadtest: --costs: {error}");
            }
            ExitCode::from(u8::from(report.failed > 0 || costs.is_err()))
        }
        Err(failure) => {
            eprintln!("sterna-loadtest: {}: {failure}", args.url);
            ExitCode::FAILURE
        }
    }
}

/// Sends all requests; an error only when the server cannot be asked at all. Beside the report stands what became of the file of costs.
async fn run(
    args: &DriveArgs,
    workload: &Workload,
    only: Option<usize>,
) -> Result<(Report, Result<(), String>), String> {
    let options = Options {
        temperature: args.temperature,
        ignore_eos: args.ignore_eos,
        timeout: Duration::from_secs_f64(args.timeout_seconds),
    };
    let key = args.keys.as_ref().and_then(|keys| keys.0.first());
    let key = key.map(String::as_str);
    let client = Client::connect(&args.url, args.model.clone(), key, options).await;
    let client = Arc::new(client.map_err(|failure| failure.to_string())?);
    let mut speech = Speech {
        scale: Scale {
            tokens_per_word: 1.0,
            marks: 0,
        },
        exact: args.ignore_eos,
        keys: args.keys.clone().map_or(Vec::new(), |keys| keys.0),
    };
    speech.scale = measure(&client, &speech)
        .await
        .map_err(|failure| failure.to_string())?;
    let before = match args.costs {
        Some(_) => Some(step_costs(&client, key).await?),
        None => None,
    };
    let rate = args.rate.unwrap_or(1.0);
    let trace = Trace::new(workload, args.seed, rate, args.requests, f64::INFINITY);
    let trace = trace.filter(move |session| only.is_none_or(|class| session.class == class));
    let (ended, outcomes) = mpsc::unbounded_channel();
    let run = Run {
        client: Arc::clone(&client),
        speech,
        classes: workload.classes.iter().map(|class| class.name).collect(),
        ended,
    };
    let start = Instant::now();
    match args.rate {
        Some(_) => Arc::new(run).open_loop(trace),
        None => Arc::new(run).closed_loop(trace, args.clients),
    }
    let recorder = gather(args.requests, outcomes).await;
    let report = recorder.report(start.elapsed());
    let written = match (&args.costs, before) {
        (Some(file), Some(before)) => write_costs(&client, key, &before, file).await,
        _ => Ok(()),
    };
    Ok((report, written))
}

/// Writes what a step has cost the server since `before`.
async fn write_costs(
    client: &Client,
    key: Option<&str>,
    before: &StepCosts,
    file: &Path,
) -> Result<(), String> {
    let costs = step_costs(client, key).await?.since(before)?;
    costs
        .write(file)
        .map_err(|error| format!("{}: {error}", file.display()))
}

/// What a step has cost the server so far.
async fn step_costs(client: &Client, key: Option<&str>) -> Result<StepCosts, String> {
    let metrics = client.metrics(key).await;
    StepCosts::read(&metrics.map_err(|failure| failure.to_string())?)
}

/// A word twice is longer than once by its tokens, and the rest is the chat template's share; all words, without it, say what a word is
/// on average.
async fn measure(client: &Client, speech: &Speech) -> Result<Scale, Failure> {
    let words = all_words();
    let texts = [1, 2].map(|times| [words[0]].repeat(times).join(" "));
    let [once, twice] = texts.map(|text| client.prompt_tokens(text, speech.key(0)));
    let (once, twice) = (once.await?, twice.await?);
    let marks = (2 * once).saturating_sub(twice);
    let all = client.prompt_tokens(words.join(" "), speech.key(0)).await?;
    Ok(Scale {
        tokens_per_word: all.saturating_sub(marks).max(1) as f64 / words.len() as f64,
        marks: marks as u32,
    })
}

impl DriveArgs {
    /// The named workload, or the one that the other flags describe.
    fn workload(&self) -> Workload {
        if let Some(name) = &self.workload {
            return named(name).expect("the flag takes known names");
        }
        let mean = f64::from(self.prompt_tokens);
        let bound = |sign: f64| (mean * (1.0 + sign * self.prompt_spread)).round() as u32;
        let class = Class {
            shared: Shared {
                count: 1,
                tokens: self.shared_prefix_tokens,
            },
            prompt: Count::Between(bound(-1.0).max(1), bound(1.0)),
            output: Count::Exactly(self.max_tokens),
            leaving: self.disconnect_fraction,
            leave_within: DISCONNECT_WITHIN,
            ..Class::default()
        };
        Workload {
            name: "flags",
            about: "what the flags say",
            load: 1.0,
            classes: vec![class],
            weights: &[],
        }
    }
}

/// What all tasks of a run share.
struct Run {
    client: Arc<Client>,
    speech: Speech,
    classes: Vec<&'static str>,
    ended: mpsc::UnboundedSender<(&'static str, Outcome)>,
}

impl Run {
    /// Each client begins the next session when its last one has ended.
    fn closed_loop(
        self: Arc<Self>,
        trace: impl Iterator<Item = Session> + Send + 'static,
        clients: u64,
    ) {
        let trace = Arc::new(Mutex::new(trace));
        for _ in 0..clients {
            let (run, trace) = (self.clone(), trace.clone());
            tokio::spawn(async move {
                loop {
                    let session = trace.lock().expect("a trace does not panic").next();
                    match session {
                        Some(session) => run.hold(&session).await,
                        None => return,
                    }
                }
            });
        }
    }

    /// Each session begins at its time.
    fn open_loop(self: Arc<Self>, trace: impl Iterator<Item = Session> + Send + 'static) {
        let start = tokio::time::Instant::now();
        tokio::spawn(async move {
            for session in trace {
                tokio::time::sleep_until(start + Duration::from_secs_f64(session.at)).await;
                let run = self.clone();
                tokio::spawn(async move { run.hold(&session).await });
            }
        });
    }

    async fn hold(&self, session: &Session) {
        let class = self.classes[session.class];
        converse(&self.client, &self.speech, session, |outcome| {
            // Nobody listens only when the run itself has ended.
            let _ = self.ended.send((class, outcome));
        })
        .await;
    }
}

/// Records outcomes as they come, under a progress bar when stderr is a terminal.
async fn gather(
    requests: u64,
    mut outcomes: mpsc::UnboundedReceiver<(&'static str, Outcome)>,
) -> Recorder {
    let style = "{elapsed_precise} {bar:40} {pos}/{len} requests, {msg}";
    let style = ProgressStyle::with_template(style).expect("the template is well formed");
    let bar = ProgressBar::new(requests)
        .with_style(style)
        .with_message("0 failed");
    bar.enable_steady_tick(Duration::from_millis(200));
    let mut recorder = Recorder::new();
    while let Some((class, outcome)) = outcomes.recv().await {
        recorder.record(class, &outcome);
        bar.set_message(format!("{} failed", recorder.failed()));
        bar.inc(1);
    }
    bar.finish_and_clear();
    recorder
}

fn print(args: &DriveArgs, report: &Report) {
    if args.json {
        println!(
            "{}",
            serde_json::to_string_pretty(report).expect("a report has only numbers and strings")
        );
        return;
    }
    let load = match args.rate {
        Some(rate) => format!("{rate} sessions/s"),
        None => format!("{} clients", args.clients),
    };
    println!(
        "{load}, {} requests to {}, seed {}",
        args.requests, args.url, args.seed
    );
    print!("{report}");
}
