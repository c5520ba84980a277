//! Tests of the metrics: what each record function changes in the rendered text.

use sterna_scheduler::Rate;

use super::labels::FINISHED_REASONS;
use super::*;

fn metrics() -> Metrics {
    Metrics::new(&Identity {
        model_name: "toy".into(),
        isa: "scalar".into(),
        kv_dtype: "f16".to_owned(),
        kv_pages: 8,
        page_tokens: 16,
    })
}

/// Returns the value of the series whose line begins with `series`.
#[track_caller]
fn value(text: &str, series: &str) -> f64 {
    let line = text
        .lines()
        .find(|line| line.starts_with(series))
        .unwrap_or_else(|| panic!("no {series} in\n{text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn exactly_the_named_metrics_render_from_the_start() {
    let text = metrics().render();
    let mut rendered: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    let mut expected = names();
    rendered.sort_unstable();
    expected.sort_unstable();
    assert_eq!(rendered, expected, "{text}");
    for line in text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        assert!(
            line.contains("model_name=\"toy\"") && line.contains("engine=\"0\""),
            "{line}"
        );
    }
    for reason in FINISHED_REASONS {
        assert!(
            text.contains(&format!("finished_reason=\"{reason}\"}} 0")),
            "{reason}"
        );
    }
    assert_eq!(value(&text, "vllm:num_requests_running{"), 0.0);
    assert_eq!(value(&text, "vllm:time_to_first_token_seconds_count"), 0.0);
}

#[test]
fn no_histogram_is_a_summary() {
    assert!(!metrics().render().contains("summary"));
}

#[test]
fn the_build_and_the_cache_are_described_by_labels() {
    let text = metrics().render();
    assert!(text.contains("isa=\"scalar\"") && text.contains(env!("CARGO_PKG_VERSION")));
    assert!(text.contains("block_size=\"16\"") && text.contains("num_gpu_blocks=\"8\""));
    assert!(text.contains("cache_dtype=\"f16\""));
}

#[test]
fn a_request_records_each_latency_once() {
    let metrics = metrics();
    let start = Instant::now();
    let after = |ms: u64| start + Duration::from_millis(ms);
    let mut timeline = Timeline::new(start, TenantId(0), 7);
    metrics.admitted(&mut timeline, after(100));
    for ms in [1100, 1600, 2600] {
        metrics.token(&mut timeline, after(ms));
    }
    metrics.finished(&timeline, FinishReason::Length, 4, after(2700));

    let text = metrics.render();
    let close = |series: &str, expected: f64| {
        let found = value(&text, &format!("{series}{{"));
        assert!((found - expected).abs() < 1e-9, "{series}: {found}");
    };
    close("vllm:request_queue_time_seconds_sum", 0.1);
    close("vllm:time_to_first_token_seconds_sum", 1.1);
    close("vllm:request_prefill_time_seconds_sum", 1.0);
    close("vllm:inter_token_latency_seconds_sum", 1.5);
    close("vllm:inter_token_latency_seconds_count", 2.0);
    close("vllm:request_decode_time_seconds_sum", 1.5);
    close("vllm:request_time_per_output_token_seconds_sum", 0.75);
    close("vllm:request_inference_time_seconds_sum", 2.5);
    close("vllm:e2e_request_latency_seconds_sum", 2.7);
    close("vllm:prompt_tokens_total", 7.0);
    close("vllm:generation_tokens_total", 3.0);
    close("vllm:request_generation_tokens_sum", 3.0);
    let tenant = |series: &str| value(&text, series);
    let tokens = ["prompt", "cached", "completion"].map(|kind| {
        let series = labelled(&text, "sterna_tenant_tokens_total", &["default", kind]);
        tenant(&series)
    });
    assert_eq!(tokens, [7.0, 4.0, 3.0]);
}

#[test]
fn tokens_of_one_step_have_no_gap_between_them() {
    let metrics = metrics();
    let start = Instant::now();
    let mut timeline = Timeline::new(start, TenantId(0), 7);
    for ms in [100, 200, 200, 200] {
        metrics.token(&mut timeline, start + Duration::from_millis(ms));
    }
    let text = metrics.render();
    let gaps = |rest: &str| value(&text, &format!("vllm:inter_token_latency_seconds_{rest}"));
    assert!((gaps("sum{") - 0.1).abs() < 1e-9);
    assert_eq!(gaps("count{"), 3.0);
    assert_eq!(value(&text, "vllm:generation_tokens_total{"), 4.0);
}

#[test]
fn a_request_that_ends_in_the_queue_records_no_token_latency() {
    let metrics = metrics();
    let start = Instant::now();
    metrics.finished(
        &Timeline::new(start, TenantId(0), 3),
        FinishReason::Cancelled,
        0,
        start + Duration::from_secs(1),
    );
    let text = metrics.render();
    assert_eq!(value(&text, "vllm:request_decode_time_seconds_count"), 0.0);
    assert_eq!(value(&text, "vllm:e2e_request_latency_seconds_count"), 1.0);
    assert_eq!(value(&text, "vllm:prompt_tokens_total"), 0.0);
}

#[test]
fn cached_pages_do_not_count_as_used() {
    let metrics = metrics();
    metrics.snapshot(&Snapshot {
        free: 2,
        private: 1,
        tree: 5,
        pinned: 1,
        ..Snapshot::default()
    });
    let text = metrics.render();
    assert_eq!(value(&text, "vllm:kv_cache_usage_perc"), 0.25);
    assert!(
        text.lines()
            .any(|line| line.contains("state=\"tree_cached\"") && line.ends_with(" 4"))
    );
}

/// Returns the line, without its value, of the one series of `name` with all these label values.
#[track_caller]
fn labelled(text: &str, name: &str, labels: &[&str]) -> String {
    let found: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with(&format!("{name}{{")))
        .filter(|line| {
            labels
                .iter()
                .all(|label| line.contains(&format!("=\"{label}\"")))
        })
        .collect();
    let [line] = found[..] else {
        panic!("{name} {labels:?}: {found:?}");
    };
    line[..line.rfind(' ').unwrap()].to_owned()
}

#[test]
fn tenants_have_their_own_series_and_the_rest_share_one() {
    let metrics = metrics();
    let names: Vec<(TenantId, String)> = (1..200)
        .map(|id| (TenantId(id), format!("t{id}")))
        .collect();
    metrics.set_tenants(&names, Vec::new());
    metrics.set_tenants(&[(TenantId(1), "renamed".into())], Vec::new());
    let state = |running, seconds: u64| TenantState {
        running,
        service: seconds * 1_000_000 + 600_000,
        ..TenantState::default()
    };
    for (id, running, seconds) in [(1, 2, 3), (150, 4, 1), (160, 5, 1), (150, 1, 2)] {
        metrics.tenant(TenantId(id), state(running, seconds));
    }
    metrics.rejected(TenantId(160), RejectionReason::QueueFull);
    let text = metrics.render();
    let read = |name: &str, labels: &[&str]| value(&text, &labelled(&text, name, labels));
    assert_eq!(read("sterna_tenant_requests_running", &["t1"]), 2.0);
    assert_eq!(read("sterna_tenant_requests_running", &["other"]), 6.0);
    assert_eq!(read("sterna_tenant_service_seconds_total", &["t1"]), 3.6);
    assert_eq!(read("sterna_tenant_service_seconds_total", &["other"]), 4.2);
    assert_eq!(
        read("sterna_tenant_refusals_total", &["other", "queue_full"]),
        1.0
    );
    assert!(!text.contains("renamed") && !text.contains("t150"));
    let running = "sterna_tenant_requests_running{";
    assert_eq!(
        text.matches(running).count(),
        129,
        "128 tenants and `other`"
    );

    metrics.ended();
    let text = metrics.render();
    let other = labelled(&text, "sterna_tenant_requests_running", &["other"]);
    assert_eq!(value(&text, &other), 0.0);
}

#[test]
fn a_step_is_compared_with_its_prediction() {
    let metrics = metrics();
    let step = StepTimes {
        tokens: 4,
        predicted: Duration::from_millis(20),
        calibrated: Duration::from_millis(25),
        whole: Duration::from_millis(31),
        computing: Duration::from_millis(30),
        deciding: Duration::from_micros(8),
        overhead: Duration::from_micros(70),
    };
    metrics.step(&step);
    let text = metrics.render();
    assert_eq!(value(&text, "sterna_step_prediction_ratio_sum"), 1.5);
    assert_eq!(value(&text, "sterna_step_seconds_sum"), 0.031);
    assert_eq!(value(&text, "sterna_step_calibrated_seconds_sum"), 0.025);
    assert_eq!(value(&text, "sterna_scheduler_plan_seconds_sum"), 8e-6);
    assert_eq!(value(&text, "sterna_step_overhead_seconds_sum"), 7e-5);
}

#[test]
fn each_part_of_a_steps_cost_has_its_own_label() {
    let metrics = metrics();
    let rows: [u64; 10] = std::array::from_fn(|knot| 1 << knot);
    const SECOND: u64 = 1_000_000_000;
    metrics.calibrated(&CostModel {
        rows: rows.map(|rows| rows * SECOND),
        kilo_decode_keys: 201 * SECOND,
        kilo_chunk_keys: 202 * SECOND,
        head: 203 * SECOND,
        logit: 204 * SECOND,
        sampling: 0,
    });
    let text = metrics.render();
    let read = |part: &str| value(&text, &labelled(&text, "sterna_step_cost_seconds", &[part]));
    for count in rows {
        assert_eq!(read(&format!("rows_{count}")), count as f64);
    }
    let rest = ["kilo_decode_keys", "kilo_chunk_keys", "head", "logit"].map(read);
    assert_eq!(rest, [201.0, 202.0, 203.0, 204.0]);
}

#[test]
fn responses_are_counted_by_route_and_status() {
    let metrics = metrics();
    for (route, status) in [
        (Some("/v1/models"), 200),
        (Some("/v1/models"), 200),
        (Some("/v1/models"), 429),
        (None, 404),
    ] {
        metrics.responded(route, status);
    }
    let text = metrics.render();
    let count = |route: &str, status: &str| {
        let series = labelled(&text, "sterna_http_responses_total", &[route, status]);
        value(&text, &series)
    };
    assert_eq!(count("/v1/models", "200"), 2.0);
    assert_eq!(count("/v1/models", "429"), 1.0);
    assert_eq!(count("unknown", "404"), 1.0);
}

#[cfg(target_os = "linux")]
#[test]
fn the_process_is_described() {
    let text = metrics().render();
    let read = |name: &str| value(&text, &format!("{name}{{"));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.unwrap().as_secs_f64();
    let started = read("process_start_time_seconds");
    assert!(now - 86_400.0 < started && started < now + 2.0, "{started}");
    assert!(read("process_resident_memory_bytes") > 1e6);
    assert!(read("process_virtual_memory_bytes") >= read("process_resident_memory_bytes"));
    assert!(read("process_open_fds") >= 3.0);
    assert!(read("process_max_fds") >= read("process_open_fds"));
    assert!(read("process_threads") >= 1.0);
    assert!(read("process_cpu_seconds_total") >= 0.0);
}

#[test]
fn limits_are_gauges_and_tenants_without_one_have_no_series() {
    let metrics = metrics();
    let limits = Limits {
        pages: 8,
        max_running: 32,
        max_queued: 64,
        max_queued_time: 1_500_000,
        step_tokens: 256,
        prefill_chunk: 256,
        max_sequence_tokens: 128,
        states: None,
        diffusion: None,
    };
    metrics.limits(&limits, &Budget::within(200_000));
    let limited = TenantPolicy {
        max_running: 3,
        max_queued: 4,
        max_pages: 6,
        guaranteed_pages: 5,
        requests: Some(Rate {
            per_minute: 60,
            burst: 6,
        }),
        tokens: Some(Rate {
            per_minute: 900,
            burst: 90,
        }),
        ..TenantPolicy::default()
    };
    let names = [(TenantId(1), "acme".into()), (TenantId(2), "free".into())];
    let free = (TenantId(2), TenantPolicy::default());
    metrics.set_tenants(&names, vec![(TenantId(1), limited), free.clone()]);
    let text = metrics.render();
    assert_eq!(value(&text, "sterna_max_running_sequences"), 32.0);
    assert_eq!(value(&text, "sterna_max_queued_requests"), 64.0);
    assert_eq!(value(&text, "sterna_max_queued_seconds"), 1.5);
    assert_eq!(value(&text, "sterna_inter_token_target_seconds"), 0.2);
    let of_tenant = |name: &str| value(&text, &labelled(&text, name, &["acme"]));
    for (name, limit) in [
        ("sterna_tenant_max_running_sequences", 3.0),
        ("sterna_tenant_max_queued_requests", 4.0),
        ("sterna_tenant_max_kv_pages", 6.0),
        ("sterna_tenant_guaranteed_kv_pages", 5.0),
        ("sterna_tenant_max_requests_per_minute", 60.0),
        ("sterna_tenant_max_tokens_per_minute", 900.0),
    ] {
        assert_eq!(of_tenant(name), limit, "{name}");
    }
    assert!(!text.contains("_max_kv_pages{model_name=\"toy\",engine=\"0\",tenant=\"free\""));
    metrics.set_tenants(&names, vec![(TenantId(1), free.1.clone()), free]);
    assert!(!metrics.render().contains("sterna_tenant_max_kv_pages{"));
}

#[test]
fn labels_are_escaped() {
    let metrics = metrics();
    metrics.set_tenants(&[(TenantId(1), "a\"b\\c".into())], Vec::new());
    let service = "sterna_tenant_service_seconds_total{model_name=\"toy\",engine=\"0\",\
                   tenant=\"a\\\"b\\\\c\"} 0";
    assert!(metrics.render().contains(service));
}

#[test]
fn two_registries_do_not_mix() {
    let (one, other) = (metrics(), metrics());
    one.client_disconnected();
    assert_eq!(value(&one.render(), "sterna_client_disconnects_total"), 1.0);
    assert_eq!(
        value(&other.render(), "sterna_client_disconnects_total"),
        0.0
    );
}
