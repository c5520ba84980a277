//! The series of the whole engine, in groups: each metric's name, help text and buckets.

use metrics::{Counter, Gauge, Histogram};

use super::labels::{COST_PARTS, FINISHED_REASONS, Identity, PAGE_STATES, REJECTION_REASONS};
use super::registry::Registry;

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

/// All series without a tenant.
pub(super) struct EngineSeries {
    pub(super) load: LoadSeries,
    pub(super) totals: TotalSeries,
    pub(super) steps: StepSeries,
    pub(super) requests: RequestSeries,
    pub(super) latencies: LatencySeries,
}

impl EngineSeries {
    pub(super) fn register(to: &mut Registry, identity: &Identity) -> EngineSeries {
        to.info(
            "sterna_build_info",
            "The running build: its version and the instruction set of its kernels.",
            [
                ("version", env!("CARGO_PKG_VERSION").to_owned()),
                ("isa", identity.isa.clone()),
            ],
        );
        to.info(
            "vllm:cache_config_info",
            "The size of the KV cache: tokens per page and number of pages.",
            [
                ("block_size", identity.page_tokens.to_string()),
                ("num_gpu_blocks", identity.kv_pages.to_string()),
            ],
        );
        EngineSeries {
            load: LoadSeries::register(to),
            totals: TotalSeries::register(to),
            steps: StepSeries::register(to),
            requests: RequestSeries::register(to),
            latencies: LatencySeries::register(to),
        }
    }
}

/// The load at the end of the last step.
pub(super) struct LoadSeries {
    pub(super) running: Gauge,
    pub(super) waiting: Gauge,
    pub(super) queued_time: Gauge,
    pub(super) kv_usage: Gauge,
    pub(super) pages: [Gauge; 4],
}

impl LoadSeries {
    fn register(to: &mut Registry) -> LoadSeries {
        LoadSeries {
            running: to.gauge(
                "vllm:num_requests_running",
                "Sequences in the running batch.",
            ),
            waiting: to.gauge("vllm:num_requests_waiting", "Sequences waiting to run."),
            queued_time: to.gauge(
                "sterna_queued_seconds",
                "Predicted machine time of all waiting requests.",
            ),
            kv_usage: to.gauge(
                "vllm:kv_cache_usage_perc",
                "Share of KV pages in use by running sequences, 0 to 1.",
            ),
            pages: to.gauges(
                "sterna_kv_pages",
                "KV pages by state: free, private to one sequence, shared and in use \
                 (tree_pinned), shared and unused (tree_cached).",
                "state",
                PAGE_STATES,
            ),
        }
    }
}

/// The scheduler's counts since the start.
pub(super) struct TotalSeries {
    pub(super) prefix_queries: Counter,
    pub(super) prefix_hits: Counter,
    pub(super) preemptions: Counter,
    pub(super) evictions: Counter,
    pub(super) page_copies: Counter,
    pub(super) drafted: Counter,
    pub(super) accepted: Counter,
}

impl TotalSeries {
    fn register(to: &mut Registry) -> TotalSeries {
        TotalSeries {
            prefix_queries: to.counter(
                "vllm:prefix_cache_queries_total",
                "Prompt tokens looked up in the prefix cache.",
            ),
            prefix_hits: to.counter(
                "vllm:prefix_cache_hits_total",
                "Prompt tokens found in the prefix cache.",
            ),
            preemptions: to.counter(
                "vllm:num_preemptions_total",
                "Sequences sent back to the queue because pages ran out.",
            ),
            evictions: to.counter(
                "sterna_evictions_total",
                "Cached prefix pages evicted to free memory.",
            ),
            page_copies: to.counter(
                "sterna_page_copies_total",
                "Cached pages copied because a prompt shares only their first tokens.",
            ),
            drafted: to.counter(
                "vllm:spec_decode_num_draft_tokens_total",
                "Draft tokens: proposed from the sequence's own history.",
            ),
            accepted: to.counter(
                "vllm:spec_decode_num_accepted_tokens_total",
                "Draft tokens that equal the token that the model then drew.",
            ),
        }
    }
}

/// The steps and their predictions.
pub(super) struct StepSeries {
    pub(super) count: Counter,
    pub(super) time: Histogram,
    pub(super) calibrated_time: Histogram,
    pub(super) tokens: Histogram,
    pub(super) decision_time: Histogram,
    pub(super) overhead: Histogram,
    pub(super) prediction_ratio: Histogram,
    pub(super) cost: [Gauge; 12],
}

impl StepSeries {
    fn register(to: &mut Registry) -> StepSeries {
        StepSeries {
            count: to.counter("sterna_engine_steps_total", "Steps of the engine."),
            time: to.histogram(
                "sterna_step_seconds",
                "Duration of a step, from its commands to its drawn tokens.",
                STEP_BUCKETS,
            ),
            calibrated_time: to.histogram(
                "sterna_step_calibrated_seconds",
                "Predicted duration of a step at the machine's speed at start.",
                STEP_BUCKETS,
            ),
            tokens: to.histogram(
                "vllm:iteration_tokens_total",
                "Tokens computed by a step.",
                STEP_TOKEN_BUCKETS,
            ),
            decision_time: to.histogram(
                "sterna_scheduler_plan_seconds",
                "Time to plan and commit a step.",
                DECISION_BUCKETS,
            ),
            overhead: to.histogram(
                "sterna_step_overhead_seconds",
                "Time of a step outside its forward pass: commands, plan, draws, commit, and \
                 publishing the previous step.",
                DECISION_BUCKETS,
            ),
            prediction_ratio: to.histogram(
                "sterna_step_prediction_ratio",
                "Time to compute a step, divided by its prediction.",
                RATIO_BUCKETS,
            ),
            cost: to.gauges(
                "sterna_step_cost_seconds",
                "Cost of a part of a step, measured at start: steps of 1 to 128 tokens, 1,024 \
                 keys, the output head, one row of logits.",
                "part",
                COST_PARTS,
            ),
        }
    }
}

/// The requests and their tokens.
pub(super) struct RequestSeries {
    pub(super) prompt_tokens: Counter,
    pub(super) generation_tokens: Counter,
    pub(super) finished: [Counter; 4],
    pub(super) rejected: [Counter; 8],
    pub(super) disconnects: Counter,
    pub(super) prompt_length: Histogram,
    pub(super) generation_length: Histogram,
}

impl RequestSeries {
    fn register(to: &mut Registry) -> RequestSeries {
        RequestSeries {
            prompt_tokens: to.counter(
                "vllm:prompt_tokens_total",
                "Prompt tokens of requests that reached their first token.",
            ),
            generation_tokens: to.counter("vllm:generation_tokens_total", "Generated tokens."),
            finished: to.counters(
                "vllm:request_success_total",
                "Requests that ended, by reason.",
                "finished_reason",
                FINISHED_REASONS,
            ),
            rejected: to.counters(
                "sterna_refusals_total",
                "Rejected requests, by reason.",
                "reason",
                REJECTION_REASONS,
            ),
            disconnects: to.counter(
                "sterna_client_disconnects_total",
                "Clients that left before their answer was complete.",
            ),
            prompt_length: to.histogram(
                "vllm:request_prompt_tokens",
                "Prompt tokens of a request.",
                LENGTH_BUCKETS,
            ),
            generation_length: to.histogram(
                "vllm:request_generation_tokens",
                "Generated tokens of a request.",
                LENGTH_BUCKETS,
            ),
        }
    }
}

/// The latencies of requests.
pub(super) struct LatencySeries {
    pub(super) time_to_first_token: Histogram,
    pub(super) token_gap: Histogram,
    pub(super) time_per_token: Histogram,
    pub(super) whole: Histogram,
    pub(super) queue: Histogram,
    pub(super) prefill: Histogram,
    pub(super) decode: Histogram,
    pub(super) inference: Histogram,
}

impl LatencySeries {
    fn register(to: &mut Registry) -> LatencySeries {
        LatencySeries {
            time_to_first_token: to.histogram(
                "vllm:time_to_first_token_seconds",
                "Time from arrival to the first token.",
                FIRST_TOKEN_BUCKETS,
            ),
            token_gap: to.histogram(
                "vllm:inter_token_latency_seconds",
                "Time between two tokens of a request.",
                TOKEN_GAP_BUCKETS,
            ),
            time_per_token: to.histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean time between the tokens of a request.",
                TOKEN_GAP_BUCKETS,
            ),
            whole: to.histogram(
                "vllm:e2e_request_latency_seconds",
                "Time from arrival to the end.",
                REQUEST_BUCKETS,
            ),
            queue: to.histogram(
                "vllm:request_queue_time_seconds",
                "Time from arrival to the first admission.",
                REQUEST_BUCKETS,
            ),
            prefill: to.histogram(
                "vllm:request_prefill_time_seconds",
                "Time from admission to the first token.",
                REQUEST_BUCKETS,
            ),
            decode: to.histogram(
                "vllm:request_decode_time_seconds",
                "Time from the first token to the last.",
                REQUEST_BUCKETS,
            ),
            inference: to.histogram(
                "vllm:request_inference_time_seconds",
                "Time from admission to the last token.",
                REQUEST_BUCKETS,
            ),
        }
    }
}
