//! Every metric: its name, help and buckets, and the only functions that record one.
//!
//! Where vLLM has a metric, ours carries its name; what only we have begins with `sterna_`. Seconds and plain counts, counters end
//! in `_total`, label values come from closed sets. Each `Metrics` has a registry of its own, so several can live in one process.

mod tenant;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metrics::{Counter, Gauge, Histogram, NoopRecorder};
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};

use tenant::Tenants;

pub use tenant::TenantLoad;

const FIRST_TOKEN_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const TOKEN_GAP_BUCKETS: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
const REQUEST_BUCKETS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];
const STEP_BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];
const DECISION_BUCKETS: &[f64] = &[
    2e-6, 5e-6, 10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 5e-3, 25e-3,
];
const RATIO_BUCKETS: &[f64] = &[
    0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0, 4.0, 10.0,
];
const LENGTH_BUCKETS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0,
];
const STEP_TOKEN_BUCKETS: &[f64] = &[
    1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0,
];

/// What does not change while the server runs; it becomes labels.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The served model's name, on every series.
    pub model_name: String,
    /// The instruction set of the kernels.
    pub isa: String,
    /// KV pages in the pool.
    pub kv_pages: u32,
    /// Tokens a page holds.
    pub page_tokens: u32,
}

/// How an accepted request ended; the label `finished_reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// A stop token or stop string.
    Stop,
    /// As long as it was allowed to be.
    Length,
    /// Its client left, or the server shut down.
    Abort,
    /// The engine could not go on with it.
    Error,
}

const ENDINGS: [&str; 4] = ["stop", "length", "abort", "error"];

/// Why a request was turned away; the label `reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectionReason {
    /// Too much waits.
    QueueFull,
    /// Its tenant has used up its rate.
    RateLimited,
    /// Too much of its tenant waits.
    TenantQueueFull,
    /// It could not be in time.
    Deadline,
    /// It can never fit.
    TooLong,
    /// It is not a request that the model can run.
    Invalid,
    /// The server shuts down.
    Draining,
    /// The engine has stopped.
    Dead,
}

const REJECTION_REASONS: [&str; 8] = [
    "queue_full",
    "rate_limited",
    "tenant_queue_full",
    "deadline",
    "too_long",
    "invalid",
    "draining",
    "dead",
];
/// Of a [`StepCost`], in the order of its fields.
const COST_PARTS: [&str; 12] = [
    "rows_1",
    "rows_2",
    "rows_4",
    "rows_8",
    "rows_16",
    "rows_32",
    "rows_64",
    "rows_128",
    "kilo_decode_keys",
    "kilo_chunk_keys",
    "head",
    "logit",
];
const PAGE_STATES: [&str; 4] = ["free", "private", "tree_pinned", "tree_cached"];

/// The engine's gauges and running totals at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Sequences that hold pages.
    pub running: usize,
    /// Sequences that wait.
    pub waiting: usize,
    /// Pages nobody holds.
    pub pages_free: usize,
    /// Pages of one sequence.
    pub pages_private: usize,
    /// Shared prefix pages that a sequence uses now.
    pub pages_tree_pinned: usize,
    /// Prefix pages kept in case they are asked for again.
    pub pages_tree_cached: usize,
    /// Prompt tokens looked up in the prefix tree, since the start.
    pub prefix_queries: u64,
    /// Those of them that were found.
    pub prefix_hits: u64,
    /// Preemptions since the start.
    pub preemptions: u64,
    /// Pages evicted from the prefix tree since the start.
    pub evictions: u64,
    /// Tokens guessed from a sequence's own past, since the start.
    pub drafted: u64,
    /// Those of them that the model then drew.
    pub accepted: u64,
    /// Pages copied since the start, since a cached page began as it was wanted.
    pub page_copies: u64,
    /// Machine time that all that waits should take.
    pub queued: Duration,
}

/// What a step took, and what it was.
#[derive(Clone, Copy, Debug)]
pub struct StepTimes {
    /// Tokens computed.
    pub tokens: usize,
    /// What computing it should have taken.
    pub predicted: Duration,
    /// The same, as the machine was at start.
    pub calibrated: Duration,
    /// What computing it took, draws included.
    pub computing: Duration,
    /// What its plan and its commit took.
    pub deciding: Duration,
    /// What everything but the forward pass took: commands, plan, draws, commit, and telling of the step before.
    pub overhead: Duration,
}

/// What the parts of a step take.
#[derive(Clone, Copy, Debug)]
pub struct StepCost {
    /// Steps of 1, 2, 4, up to 128 tokens.
    pub rows: [Duration; 8],
    /// 1,024 keys that decodes look at.
    pub kilo_decode_keys: Duration,
    /// 1,024 keys that chunks of prompts look at.
    pub kilo_chunk_keys: Duration,
    /// The output head, if any logits are wanted.
    pub head: Duration,
    /// A token's logits.
    pub logit: Duration,
}

/// The moments of one request's life, filled in as they pass.
#[derive(Clone, Copy, Debug)]
pub struct Timeline {
    arrived: Instant,
    tenant: u32,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    prompt_tokens: u32,
    generated_tokens: u32,
}

impl Timeline {
    /// A tenant's request of `prompt_tokens` that reached the server at `arrived`.
    pub fn new(arrived: Instant, tenant: u32, prompt_tokens: u32) -> Timeline {
        Timeline {
            arrived,
            tenant,
            admitted: None,
            first_token: None,
            last_token: None,
            prompt_tokens,
            generated_tokens: 0,
        }
    }

    /// From the first admission to `at`, if it was ever admitted.
    pub fn service_time(&self, at: Instant) -> Option<Duration> {
        self.admitted
            .map(|admitted| at.saturating_duration_since(admitted))
    }
}

/// Handles to every series of one engine. Clones share them.
#[derive(Clone)]
pub struct Metrics {
    handles: Arc<Handles>,
    tenants: Arc<Mutex<Tenants>>,
    recorder: Arc<PrometheusRecorder>, // To register more tenants.
    exporter: PrometheusHandle,
}

impl Metrics {
    /// A fresh registry in which every series already exists, at zero.
    pub fn new(identity: &Identity) -> Metrics {
        let mut builder = PrometheusBuilder::new()
            .add_global_label("model_name", &identity.model_name)
            .add_global_label("engine", "0");
        for definition in definitions() {
            if let Some(buckets) = definition.buckets {
                builder = builder
                    .set_buckets_for_metric(Matcher::Full(definition.name.to_owned()), buckets)
                    .expect("every histogram has buckets");
            }
        }
        let recorder = builder.build_recorder();
        let exporter = recorder.handle();
        let (handles, tenants) = metrics::with_local_recorder(&recorder, || {
            let all = &mut Vec::new();
            (Handles::register(all, identity), Tenants::new(all))
        });
        Metrics {
            handles: Arc::new(handles),
            tenants: Arc::new(Mutex::new(tenants)),
            recorder: Arc::new(recorder),
            exporter,
        }
    }

    /// Names tenants: who was not known before has series of its own from now on, while there are fewer than 128. The others are
    /// called `other`; tenant 0 is called `default`. None is ever renamed or removed.
    pub fn set_tenants(&self, tenants: &[(u32, String)]) {
        metrics::with_local_recorder(&*self.recorder, || self.tenants().name(tenants));
    }

    /// A tenant's numbers now.
    pub fn tenant(&self, id: u32, now: TenantLoad) {
        self.tenants().load(id, now);
    }

    fn tenants(&self) -> MutexGuard<'_, Tenants> {
        // Whoever panicked with the lock left numbers that are whole: each is set at once.
        self.tenants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All series in Prometheus's text format.
    pub fn render(&self) -> String {
        self.exporter.render()
    }

    /// Folds recorded samples into their buckets; without it, or `render`, every few seconds, histograms grow.
    pub fn run_upkeep(&self) {
        self.exporter.run_upkeep();
    }

    /// Sets the gauges, and the totals that the scheduler counts.
    pub fn occupancy(&self, now: &Occupancy) {
        let handles = &*self.handles;
        handles.running.set(now.running as f64);
        handles.waiting.set(now.waiting as f64);
        let pages = [
            now.pages_free,
            now.pages_private,
            now.pages_tree_pinned,
            now.pages_tree_cached,
        ];
        for (gauge, pages) in handles.pages.iter().zip(pages) {
            gauge.set(pages as f64);
        }
        let used = now.pages_private + now.pages_tree_pinned;
        let all: usize = pages.iter().sum();
        handles.kv_usage.set(if all == 0 {
            0.0
        } else {
            used as f64 / all as f64
        });
        handles.prefix_queries.absolute(now.prefix_queries);
        handles.prefix_hits.absolute(now.prefix_hits);
        handles.preemptions.absolute(now.preemptions);
        handles.evictions.absolute(now.evictions);
        handles.drafted.absolute(now.drafted);
        handles.accepted.absolute(now.accepted);
        handles.page_copies.absolute(now.page_copies);
        handles.queued.set(now.queued.as_secs_f64());
    }

    /// What a step costs, as measured at start.
    pub fn calibrated(&self, cost: &StepCost) {
        let parts = [
            cost.kilo_decode_keys,
            cost.kilo_chunk_keys,
            cost.head,
            cost.logit,
        ];
        for (gauge, part) in self.handles.cost.iter().zip(cost.rows.iter().chain(&parts)) {
            gauge.set(part.as_secs_f64());
        }
    }

    /// The engine has ended, and holds nothing any more.
    pub fn ended(&self) {
        self.occupancy(&Occupancy::default());
        self.tenants().clear();
    }

    /// A step took `whole`, from the turn's begin to the end of computing.
    pub fn step(&self, whole: Duration, step: &StepTimes) {
        let handles = &*self.handles;
        handles.steps.increment(1);
        handles.step_time.record(whole);
        handles.calibrated_time.record(step.calibrated);
        handles.step_tokens.record(step.tokens as f64);
        handles.decision_time.record(step.deciding);
        handles.overhead.record(step.overhead);
        if !step.predicted.is_zero() {
            let ratio = step.computing.as_secs_f64() / step.predicted.as_secs_f64();
            handles.prediction_ratio.record(ratio);
        }
    }

    /// The request left the queue for the first time.
    pub fn admitted(&self, timeline: &mut Timeline, at: Instant) {
        timeline.admitted = Some(at);
        let waited = at.saturating_duration_since(timeline.arrived);
        self.handles.queue_time.record(waited);
        self.tenants().of(timeline.tenant).queue_time.record(waited);
    }

    /// The request's next token was drawn. Tokens of one step come at one moment: the gaps between them are 0, as their
    /// reader sees it.
    pub fn token(&self, timeline: &mut Timeline, at: Instant) {
        let handles = &*self.handles;
        match timeline.last_token {
            Some(last) => handles.token_gap.record(at.saturating_duration_since(last)),
            None => {
                timeline.first_token = Some(at);
                handles
                    .prompt_tokens
                    .increment(u64::from(timeline.prompt_tokens));
                let waited = at.saturating_duration_since(timeline.arrived);
                handles.time_to_first_token.record(waited);
                self.tenants()
                    .of(timeline.tenant)
                    .time_to_first_token
                    .record(waited);
                if let Some(admitted) = timeline.admitted {
                    handles
                        .prefill_time
                        .record(at.saturating_duration_since(admitted));
                }
            }
        }
        timeline.last_token = Some(at);
        timeline.generated_tokens += 1;
        handles.generation_tokens.increment(1);
    }

    /// The request is over; so many of its prompt's tokens were cached.
    pub fn finished(&self, timeline: &Timeline, ending: Ending, cached_tokens: u32, at: Instant) {
        let handles = &*self.handles;
        let whole = at.saturating_duration_since(timeline.arrived);
        handles.finished[ending as usize].increment(1);
        handles.whole_time.record(whole);
        self.tenant_finished(timeline, ending, cached_tokens, whole);
        handles
            .request_prompt_tokens
            .record(f64::from(timeline.prompt_tokens));
        handles
            .request_generation_tokens
            .record(f64::from(timeline.generated_tokens));
        if let (Some(first), Some(last)) = (timeline.first_token, timeline.last_token) {
            let decode = last.saturating_duration_since(first);
            handles.decode_time.record(decode);
            if timeline.generated_tokens > 1 {
                handles
                    .time_per_token
                    .record(decode / (timeline.generated_tokens - 1));
            }
            if let Some(admitted) = timeline.admitted {
                handles
                    .inference_time
                    .record(last.saturating_duration_since(admitted));
            }
        }
    }

    fn tenant_finished(
        &self,
        timeline: &Timeline,
        ending: Ending,
        cached_tokens: u32,
        whole: Duration,
    ) {
        let tenants = self.tenants();
        let series = tenants.of(timeline.tenant);
        series.finished[ending as usize].increment(1);
        series.whole_time.record(whole);
        if timeline.admitted.is_some() {
            let tokens = [
                timeline.prompt_tokens,
                cached_tokens,
                timeline.generated_tokens,
            ];
            for (counter, tokens) in series.tokens.iter().zip(tokens) {
                counter.increment(u64::from(tokens));
            }
        }
    }

    /// A tenant's request was turned away.
    pub fn rejected(&self, tenant: u32, why: RejectionReason) {
        self.handles.rejected[why as usize].increment(1);
        self.tenants().of(tenant).rejected[why as usize].increment(1);
    }

    /// A client left before its answer was complete.
    pub fn client_disconnected(&self) {
        self.handles.disconnects.increment(1);
    }
}

/// The name of every metric, for checking that a dashboard asks only for what exists.
pub fn names() -> Vec<&'static str> {
    definitions()
        .iter()
        .map(|definition| definition.name)
        .collect()
}

struct Definition {
    name: &'static str,
    buckets: Option<&'static [f64]>, // Of a histogram.
}

/// What `Handles::register` would define, without a registry: buckets must be known before one is built.
fn definitions() -> Vec<Definition> {
    let identity = Identity {
        model_name: String::new(),
        isa: String::new(),
        kv_pages: 0,
        page_tokens: 0,
    };
    let mut definitions = Vec::new();
    metrics::with_local_recorder(&NoopRecorder, || {
        Handles::register(&mut definitions, &identity);
        Tenants::new(&mut definitions);
    });
    definitions
}

struct Handles {
    running: Gauge,
    waiting: Gauge,
    kv_usage: Gauge,
    pages: [Gauge; 4],
    prefix_queries: Counter,
    prefix_hits: Counter,
    preemptions: Counter,
    evictions: Counter,
    drafted: Counter,
    accepted: Counter,
    page_copies: Counter,
    queued: Gauge,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    finished: [Counter; 4],
    rejected: [Counter; 8],
    disconnects: Counter,
    steps: Counter,
    step_time: Histogram,
    calibrated_time: Histogram,
    cost: [Gauge; 12],
    step_tokens: Histogram,
    decision_time: Histogram,
    overhead: Histogram,
    prediction_ratio: Histogram,
    time_to_first_token: Histogram,
    token_gap: Histogram,
    time_per_token: Histogram,
    whole_time: Histogram,
    queue_time: Histogram,
    prefill_time: Histogram,
    decode_time: Histogram,
    inference_time: Histogram,
    request_prompt_tokens: Histogram,
    request_generation_tokens: Histogram,
}

impl Handles {
    /// Registers every metric with the current recorder and lists it in `all`: a metric is one entry here.
    #[rustfmt::skip] // One metric, one line, so that the list reads as a table.
    fn register(all: &mut Vec<Definition>, identity: &Identity) -> Handles {
        register_identity(all, identity);
        let all = &mut *all;
        Handles {
            running: new_gauge(all, "vllm:num_requests_running", "Sequences in the running batch."),
            waiting: new_gauge(all, "vllm:num_requests_waiting", "Sequences waiting to run."),
            kv_usage: new_gauge(all, "vllm:kv_cache_usage_perc", "Share of KV pages in use by running sequences, 0 to 1."),
            pages: new_gauges(all, "sterna_kv_pages", "KV pages by state.", "state", PAGE_STATES),
            prefix_queries: new_counter(all, "vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
            prefix_hits: new_counter(all, "vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
            preemptions: new_counter(all, "vllm:num_preemptions_total", "Sequences sent back to the queue for lack of pages."),
            evictions: new_counter(all, "sterna_evictions_total", "Cached prefix pages given up for new ones."),
            drafted: new_counter(all, "vllm:spec_decode_num_draft_tokens_total", "Tokens guessed from a sequence's own past."),
            accepted: new_counter(all, "vllm:spec_decode_num_accepted_tokens_total", "Guessed tokens that the model then drew."),
            page_copies: new_counter(all, "sterna_page_copies_total", "Cached pages copied because they began as a prompt goes on."),
            queued: new_gauge(all, "sterna_queued_seconds", "Machine time that all that waits should take."),
            prompt_tokens: new_counter(all, "vllm:prompt_tokens_total", "Prompt tokens of requests that reached their first token."),
            generation_tokens: new_counter(all, "vllm:generation_tokens_total", "Generated tokens."),
            finished: new_counters(all, "vllm:request_success_total", "Requests that ended, by reason.", "finished_reason", ENDINGS),
            rejected: new_counters(all, "sterna_refusals_total", "Requests turned away, by reason.", "reason", REJECTION_REASONS),
            disconnects: new_counter(all, "sterna_client_disconnects_total", "Clients that left before their answer was complete."),
            steps: new_counter(all, "sterna_engine_steps_total", "Steps of the engine."),
            step_time: new_histogram(all, "sterna_step_seconds", "From the plan of a step to its commit.", STEP_BUCKETS),
            calibrated_time: new_histogram(all, "sterna_step_calibrated_seconds", "What a step would have taken as the machine was at start.", STEP_BUCKETS),
            cost: new_gauges(all, "sterna_step_cost_seconds", "What a part of a step took at start: steps of so many tokens, 1,024 keys, the output head, a token's logits.", "part", COST_PARTS),
            step_tokens: new_histogram(all, "vllm:iteration_tokens_total", "Tokens computed by a step.", STEP_TOKEN_BUCKETS),
            decision_time: new_histogram(all, "sterna_scheduler_plan_seconds", "Planning a step and committing it.", DECISION_BUCKETS),
            overhead: new_histogram(all, "sterna_step_overhead_seconds", "What a step took beside its forward pass: commands, plan, draws, commit, and telling of the step before.", DECISION_BUCKETS),
            prediction_ratio: new_histogram(all, "sterna_step_prediction_ratio", "What computing a step took, relative to its prediction.", RATIO_BUCKETS),
            time_to_first_token: new_histogram(all, "vllm:time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_BUCKETS),
            token_gap: new_histogram(all, "vllm:inter_token_latency_seconds", "Between two tokens of a request.", TOKEN_GAP_BUCKETS),
            time_per_token: new_histogram(all, "vllm:request_time_per_output_token_seconds", "Mean gap between the tokens of a request.", TOKEN_GAP_BUCKETS),
            whole_time: new_histogram(all, "vllm:e2e_request_latency_seconds", "From arrival to the end.", REQUEST_BUCKETS),
            queue_time: new_histogram(all, "vllm:request_queue_time_seconds", "From arrival to the first admission.", REQUEST_BUCKETS),
            prefill_time: new_histogram(all, "vllm:request_prefill_time_seconds", "From admission to the first token.", REQUEST_BUCKETS),
            decode_time: new_histogram(all, "vllm:request_decode_time_seconds", "From the first token to the last.", REQUEST_BUCKETS),
            inference_time: new_histogram(all, "vllm:request_inference_time_seconds", "From admission to the last token.", REQUEST_BUCKETS),
            request_prompt_tokens: new_histogram(all, "vllm:request_prompt_tokens", "Prompt tokens of a request.", LENGTH_BUCKETS),
            request_generation_tokens: new_histogram(all, "vllm:request_generation_tokens", "Generated tokens of a request.", LENGTH_BUCKETS),
        }
    }
}

/// The two gauges that are always 1 and speak through their labels.
fn register_identity(all: &mut Vec<Definition>, identity: &Identity) {
    let name = "sterna_build_info";
    define(all, name, None);
    describe_gauge!(name, "The running build.");
    gauge!(name, "version" => env!("CARGO_PKG_VERSION"), "isa" => identity.isa.clone()).set(1);

    let name = "vllm:cache_config_info";
    define(all, name, None);
    describe_gauge!(name, "The size of the KV cache.");
    let (page_tokens, pages) = (
        identity.page_tokens.to_string(),
        identity.kv_pages.to_string(),
    );
    gauge!(name, "block_size" => page_tokens, "num_gpu_blocks" => pages).set(1);
}

fn new_gauge(all: &mut Vec<Definition>, name: &'static str, help: &'static str) -> Gauge {
    define(all, name, None);
    describe_gauge!(name, help);
    gauge!(name)
}

fn new_gauges<const N: usize>(
    all: &mut Vec<Definition>,
    name: &'static str,
    help: &'static str,
    label: &'static str,
    values: [&'static str; N],
) -> [Gauge; N] {
    define(all, name, None);
    describe_gauge!(name, help);
    values.map(|value| gauge!(name, label => value))
}

fn new_counter(all: &mut Vec<Definition>, name: &'static str, help: &'static str) -> Counter {
    define(all, name, None);
    describe_counter!(name, help);
    counter!(name)
}

fn new_counters<const N: usize>(
    all: &mut Vec<Definition>,
    name: &'static str,
    help: &'static str,
    label: &'static str,
    values: [&'static str; N],
) -> [Counter; N] {
    define(all, name, None);
    describe_counter!(name, help);
    values.map(|value| counter!(name, label => value))
}

fn new_histogram(
    all: &mut Vec<Definition>,
    name: &'static str,
    help: &'static str,
    buckets: &'static [f64],
) -> Histogram {
    define(all, name, Some(buckets));
    describe_histogram!(name, help);
    histogram!(name)
}

fn define(all: &mut Vec<Definition>, name: &'static str, buckets: Option<&'static [f64]>) {
    all.push(Definition { name, buckets });
}

#[cfg(test)]
mod tests;
