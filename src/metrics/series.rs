//! The table of all series: each one's handle, and its metric's name, help text, label and buckets.

use metrics::{Counter, Gauge, Histogram};

use super::labels::{FINISHED_REASONS, Identity, REJECTION_REASONS};
use super::registry::Registry;

const FIRST_TOKEN_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
// The next two begin lower than vLLM's, because a small model answers in milliseconds.
const TOKEN_GAP_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const REQUEST_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0,
    10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
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
// Few, because up to 129 tenants have three such histograms. They serve objectives from 10 ms, for
// small models, to a minute.
const TENANT_LATENCY_BUCKETS: &[f64] = &[0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0];

/// Declares groups of series. The call after each `=` registers the series.
macro_rules! groups {
    ($(
        $(#[$doc:meta])*
        $group:ident { $($field:ident: $handle:ty = $kind:ident $metric:tt;)* }
    )*) => {$(
        $(#[$doc])*
        pub(super) struct $group {
            $(pub(super) $field: $handle,)*
        }

        impl $group {
            pub(super) fn register(to: &mut Registry) -> $group {
                $group { $($field: to.$kind $metric,)* }
            }
        }
    )*};
}

groups! {
    /// The load at the end of the last step.
    LoadSeries {
        running: Gauge = gauge("vllm:num_requests_running", "Sequences in the running batch.");
        waiting: Gauge = gauge("vllm:num_requests_waiting", "Sequences waiting to run.");
        queued_time: Gauge =
            gauge("sterna_queued_seconds", "Predicted machine time of all waiting requests.");
        kv_usage: Gauge = gauge(
            "vllm:kv_cache_usage_perc", "Share of KV pages in use by running sequences, 0 to 1.");
        pages: [Gauge; 4] = gauges(
            "sterna_kv_pages",
            "KV pages by state: free, private to one sequence, shared and in use (tree_pinned), \
             shared and unused (tree_cached).",
            "state", ["free", "private", "tree_pinned", "tree_cached"]);
        slabs: [Gauge; 3] = gauges(
            "sterna_state_slabs",
            "Slabs for states of recurrent layers: free, of running sequences, cached in the \
             prefix tree. All are 0 for a model without such layers.",
            "state", ["free", "running", "cached"]);
    }

    /// The limits of the load.
    LimitSeries {
        running: Gauge =
            gauge("sterna_max_running_sequences", "The most sequences in the running batch.");
        queued: Gauge = gauge("sterna_max_queued_requests", "The most waiting requests.");
        queued_time: Gauge = gauge(
            "sterna_max_queued_seconds",
            "The largest predicted machine time of all waiting requests.");
        inter_token_target: Gauge = gauge(
            "sterna_inter_token_target_seconds",
            "The target for the time between two tokens of a sequence.");
    }

    /// The scheduler's counts since the start.
    TotalSeries {
        prefix_queries: Counter = counter(
            "vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.");
        prefix_hits: Counter =
            counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.");
        preemptions: Counter = counter(
            "vllm:num_preemptions_total",
            "Sequences sent back to the queue because pages ran out.");
        evictions: Counter =
            counter("sterna_evictions_total", "Cached prefix pages evicted to free memory.");
        state_evictions: Counter = counter(
            "sterna_state_evictions_total", "Cached states evicted to make room for others.");
        page_copies: Counter = counter(
            "sterna_page_copies_total",
            "Cached pages copied because a prompt shares only their first tokens.");
        drafted: Counter = counter(
            "vllm:spec_decode_num_draft_tokens_total",
            "Draft tokens: of the sequence's own history, or of the model.");
        accepted: Counter = counter(
            "vllm:spec_decode_num_accepted_tokens_total",
            "Draft tokens that equal the token that the model then drew.");
        own_drafted: Counter = counter(
            "sterna_self_draft_tokens_total",
            "Draft tokens that the model drafted for itself.");
        own_accepted: Counter = counter(
            "sterna_self_accepted_tokens_total",
            "Accepted draft tokens that the model drafted for itself.");
        block_passes: Counter = counter(
            "sterna_block_passes_total",
            "Passes over a block that replace mask tokens, by sequence.");
        unmasked: Counter = counter(
            "sterna_unmasked_tokens_total", "Mask tokens that passes over a block have replaced.");
    }

    /// The experts of mixtures, from the load of the model on.
    ExpertSeries {
        rows: Counter = counter(
            "sterna_expert_rows_total", "Rows that experts of mixtures have computed.");
        hits: Counter = counter(
            "sterna_expert_hits_total",
            "Experts with rows, whose weights a step reads, by step and layer.");
        candidates: Counter = counter(
            "sterna_expert_candidates_total",
            "Experts with and without rows, by step and layer. Hits divided by these are the \
             distinct share.");
        rows_at_largest_load: Counter = counter(
            "sterna_expert_rows_at_largest_load_total",
            "Rows if each expert had as many as the one with most, by step and layer. Divided by \
             the rows, they are the largest load over the mean one.");
    }

    /// The steps and their predictions.
    StepSeries {
        count: Counter = counter("sterna_engine_steps_total", "Steps of the engine.");
        time: Histogram = histogram(
            "sterna_step_seconds", "Duration of a step, from its commands to its drawn tokens.",
            STEP_BUCKETS);
        calibrated_time: Histogram = histogram(
            "sterna_step_calibrated_seconds",
            "Predicted duration of a step at the machine's speed at start.", STEP_BUCKETS);
        tokens: Histogram = histogram(
            "vllm:iteration_tokens_total", "Tokens computed by a step.", STEP_TOKEN_BUCKETS);
        decision_time: Histogram = histogram(
            "sterna_scheduler_plan_seconds", "Time to plan and commit a step.", DECISION_BUCKETS);
        overhead: Histogram = histogram(
            "sterna_step_overhead_seconds",
            "Time of a step outside its forward pass: commands, plan, draws, commit, and \
             publishing the previous step.", DECISION_BUCKETS);
        prediction_ratio: Histogram = histogram(
            "sterna_step_prediction_ratio", "Time to compute a step, divided by its prediction.",
            RATIO_BUCKETS);
        // The parts of a `CostModel`, in the order of its fields. `sampling` is missing, because
        // it is the same in every calibration.
        cost: [Gauge; 14] = gauges(
            "sterna_step_cost_seconds",
            "Cost of a part of a step, as calibrated: steps of 1 to 512 tokens, 1,024 keys, the \
             output head, one row of logits.",
            "part",
            ["rows_1", "rows_2", "rows_4", "rows_8", "rows_16", "rows_32", "rows_64", "rows_128",
             "rows_256", "rows_512", "kilo_decode_keys", "kilo_chunk_keys", "head", "logit"]);
    }

    /// The requests and their tokens.
    RequestSeries {
        prompt_tokens: Counter = counter(
            "vllm:prompt_tokens_total",
            "Prompt tokens of requests that reached their first token.");
        generation_tokens: Counter = counter("vllm:generation_tokens_total", "Generated tokens.");
        finished: [Counter; 4] = counters(
            "vllm:request_success_total", "Requests that ended, by reason.",
            "finished_reason", FINISHED_REASONS);
        rejected: [Counter; 8] = counters(
            "sterna_refusals_total", "Rejected requests, by reason.",
            "reason", REJECTION_REASONS);
        disconnects: Counter = counter(
            "sterna_client_disconnects_total",
            "Clients that left before their answer was complete.");
        prompt_length: Histogram = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", LENGTH_BUCKETS);
        generation_length: Histogram = histogram(
            "vllm:request_generation_tokens", "Generated tokens of a request.", LENGTH_BUCKETS);
    }

    /// The latencies of requests.
    LatencySeries {
        time_to_first_token: Histogram = histogram(
            "vllm:time_to_first_token_seconds", "Time from arrival to the first token.",
            FIRST_TOKEN_BUCKETS);
        token_gap: Histogram = histogram(
            "vllm:inter_token_latency_seconds", "Time between two tokens of a request.",
            TOKEN_GAP_BUCKETS);
        time_per_token: Histogram = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of a request.", TOKEN_GAP_BUCKETS);
        whole: Histogram = histogram(
            "vllm:e2e_request_latency_seconds", "Time from arrival to the end.", REQUEST_BUCKETS);
        queue: Histogram = histogram(
            "vllm:request_queue_time_seconds", "Time from arrival to the first admission.",
            REQUEST_BUCKETS);
        prefill: Histogram = histogram(
            "vllm:request_prefill_time_seconds", "Time from admission to the first token.",
            REQUEST_BUCKETS);
        decode: Histogram = histogram(
            "vllm:request_decode_time_seconds", "Time from the first token to the last.",
            REQUEST_BUCKETS);
        inference: Histogram = histogram(
            "vllm:request_inference_time_seconds", "Time from admission to the last token.",
            REQUEST_BUCKETS);
    }

    /// The series of one value of the label `tenant`.
    TenantSeries {
        finished: [Counter; 4] = counters(
            "sterna_tenant_requests_total", "A tenant's requests that ended, by reason.",
            "finished_reason", FINISHED_REASONS);
        tokens: [Counter; 3] = counters(
            "sterna_tenant_tokens_total",
            "A tenant's tokens: in prompts, in prompts and found in the prefix cache, generated.",
            "kind", ["prompt", "cached", "completion"]);
        rejected: [Counter; 8] = counters(
            "sterna_tenant_refusals_total", "A tenant's rejected requests, by reason.",
            "reason", REJECTION_REASONS);
        time_to_first_token: Histogram = histogram(
            "sterna_tenant_time_to_first_token_seconds",
            "Time from arrival to the first token, by tenant.", TENANT_LATENCY_BUCKETS);
        whole: Histogram = histogram(
            "sterna_tenant_request_seconds", "Time from arrival to the end, by tenant.",
            TENANT_LATENCY_BUCKETS);
        queue: Histogram = histogram(
            "sterna_tenant_queue_seconds", "Time from arrival to the first admission, by tenant.",
            TENANT_LATENCY_BUCKETS);
        running: Gauge = gauge(
            "sterna_tenant_requests_running", "A tenant's sequences in the running batch.");
        waiting: Gauge =
            gauge("sterna_tenant_requests_waiting", "A tenant's sequences waiting to run.");
        pages: Gauge =
            gauge("sterna_tenant_kv_pages", "A tenant's KV pages, cached ones included.");
    }
}

/// All series without a tenant.
pub(super) struct EngineSeries {
    pub(super) load: LoadSeries,
    pub(super) limits: LimitSeries,
    pub(super) totals: TotalSeries,
    pub(super) experts: ExpertSeries,
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
            "The KV cache: its number format, tokens per page and number of pages.",
            [
                ("cache_dtype", identity.kv_dtype.clone()),
                ("block_size", identity.page_tokens.to_string()),
                ("num_gpu_blocks", identity.kv_pages.to_string()),
            ],
        );
        EngineSeries {
            load: LoadSeries::register(to),
            limits: LimitSeries::register(to),
            totals: TotalSeries::register(to),
            experts: ExpertSeries::register(to),
            steps: StepSeries::register(to),
            requests: RequestSeries::register(to),
            latencies: LatencySeries::register(to),
        }
    }
}
