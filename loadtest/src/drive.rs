//! `drive`: parallel streaming clients against an OpenAI-compatible server.
//!
//! Always true: it knows the server only by HTTP and shares no code with it, so it breaks when the wire format does.

mod client;
mod report;
mod sse;
mod text;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::mpsc;

use crate::{fraction, positive};
use client::{Client, Failure, Options, Outcome};
use report::{Recorder, Report};
use text::{Workload, sample_text};

/// The knobs of `drive`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DriveArgs {
    /// The server's address, with or without /v1.
    #[arg(long, default_value = "http://127.0.0.1:30000")]
    url: String,
    /// Model to ask for; the first one served if absent.
    #[arg(long)]
    model: Option<String>,
    /// Clients that each send their next request when the last one has ended.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    clients: u64,
    /// Requests in all.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..))]
    requests: u64,
    /// Instead of --clients: requests a second, arriving at random (Poisson), whether or not earlier ones have ended.
    #[arg(long, value_parser = positive, conflicts_with = "clients")]
    rate: Option<f64>,
    /// Output tokens at most, of each request.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Do not stop at the end-of-sequence token, so that every answer has exactly --max-tokens.
    #[arg(long)]
    ignore_eos: bool,
    /// Mean length of the user's message in tokens. The server's own count of two probing requests sets the scale.
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
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// Drives the server as asked and prints what came of it: 0 when no request failed.
#[tokio::main]
pub(crate) async fn drive(args: &DriveArgs) -> ExitCode {
    match run(args).await {
        Ok(report) => {
            print(args, &report);
            ExitCode::from(u8::from(report.failed > 0))
        }
        Err(failure) => {
            eprintln!("sterna-loadtest: {}: {failure}", args.url);
            ExitCode::FAILURE
        }
    }
}

/// Sends all requests; an error only when the server cannot be asked at all.
async fn run(args: &DriveArgs) -> Result<Report, Failure> {
    let options = Options {
        max_tokens: args.max_tokens,
        temperature: args.temperature,
        ignore_eos: args.ignore_eos,
        timeout: Duration::from_secs_f64(args.timeout_seconds),
    };
    let client = Client::connect(&args.url, args.model.clone(), options).await?;
    let workload = Workload {
        seed: args.seed,
        prompt_tokens: args.prompt_tokens,
        prompt_spread: args.prompt_spread,
        shared_prefix_tokens: args.shared_prefix_tokens,
        disconnect_fraction: args.disconnect_fraction,
        max_tokens: args.max_tokens,
        tokens_per_word: tokens_per_word(&client).await?,
    };
    let run = Arc::new(Run { client, workload });
    let (ended, outcomes) = mpsc::unbounded_channel();
    let start = Instant::now();
    match args.rate {
        Some(rate) => run.open_loop(rate, args.requests, ended),
        None => run.closed_loop(args.clients, args.requests, ended),
    }
    let recorder = gather(args.requests, outcomes).await;
    Ok(recorder.report(start.elapsed()))
}

/// Two prompts of different lengths: their difference has no share of the chat template.
async fn tokens_per_word(client: &Client) -> Result<f64, Failure> {
    const WORDS: [usize; 2] = [8, 56];
    let short = client.prompt_tokens(sample_text(WORDS[0])).await?;
    let long = client.prompt_tokens(sample_text(WORDS[1])).await?;
    let tokens = long.saturating_sub(short).max(1);
    Ok(tokens as f64 / (WORDS[1] - WORDS[0]) as f64)
}

/// What all tasks of a run share.
struct Run {
    client: Client,
    workload: Workload,
}

impl Run {
    /// Each client takes the next request when its last one has ended.
    fn closed_loop(
        self: &Arc<Self>,
        clients: u64,
        requests: u64,
        ended: mpsc::UnboundedSender<Outcome>,
    ) {
        let next = Arc::new(AtomicU64::new(0));
        for _ in 0..clients.min(requests) {
            let (run, next, ended) = (self.clone(), next.clone(), ended.clone());
            tokio::spawn(async move {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= requests || ended.send(run.chat(index).await).is_err() {
                        return;
                    }
                }
            });
        }
    }

    /// Each request is sent at its arrival.
    fn open_loop(
        self: &Arc<Self>,
        rate: f64,
        requests: u64,
        ended: mpsc::UnboundedSender<Outcome>,
    ) {
        let start = tokio::time::Instant::now();
        for (index, arrival) in (0..).zip(self.workload.arrivals(rate, requests)) {
            let (run, ended) = (self.clone(), ended.clone());
            tokio::spawn(async move {
                tokio::time::sleep_until(start + arrival).await;
                // Nobody listens only when the run itself has ended.
                let _ = ended.send(run.chat(index).await);
            });
        }
    }

    async fn chat(&self, index: u64) -> Outcome {
        self.client.chat(&self.workload.request(index)).await
    }
}

/// Records outcomes as they come, under a progress bar when stderr is a terminal.
async fn gather(requests: u64, mut outcomes: mpsc::UnboundedReceiver<Outcome>) -> Recorder {
    let style = "{elapsed_precise} {bar:40} {pos}/{len} requests, {msg}";
    let style = ProgressStyle::with_template(style).expect("the template is well formed");
    let bar = ProgressBar::new(requests)
        .with_style(style)
        .with_message("0 failed");
    bar.enable_steady_tick(Duration::from_millis(200));
    let mut recorder = Recorder::new();
    while let Some(outcome) = outcomes.recv().await {
        recorder.record(&outcome);
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
        Some(rate) => format!("{rate} requests/s"),
        None => format!("{} clients", args.clients),
    };
    println!(
        "{load}, {} requests to {}, seed {}",
        args.requests, args.url, args.seed
    );
    print!("{report}");
}
