//! Tests of `mod.rs`.

use super::*;

fn metrics() -> Metrics {
    Metrics::new(&Identity {
        model_name: "toy".into(),
        isa: "scalar".into(),
        kv_pages: 8,
        page_tokens: 16,
    })
}

/// The value of the series whose text begins with `series`.
#[track_caller]
fn value(text: &str, series: &str) -> f64 {
    let line = text
        .lines()
        .find(|line| line.starts_with(series))
        .unwrap_or_else(|| panic!("no {series} in\n{text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn every_metric_renders_from_the_start_and_nothing_else_does() {
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
    for reason in ENDINGS {
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
}

#[test]
fn a_request_leaves_each_latency_once() {
    let metrics = metrics();
    let start = Instant::now();
    let after = |ms: u64| start + Duration::from_millis(ms);
    let mut timeline = Timeline::new(start, 0, 7);
    metrics.admitted(&mut timeline, after(100));
    for ms in [1100, 1600, 2600] {
        metrics.token(&mut timeline, after(ms));
    }
    metrics.finished(&timeline, Ending::Length, 4, after(2700));

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
    let mut timeline = Timeline::new(start, 0, 7);
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
fn a_request_that_ends_in_the_queue_leaves_no_token_latency() {
    let metrics = metrics();
    let start = Instant::now();
    metrics.finished(
        &Timeline::new(start, 0, 3),
        Ending::Abort,
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
    let now = Occupancy {
        pages_free: 2,
        pages_private: 1,
        pages_tree_pinned: 1,
        pages_tree_cached: 4,
        ..Occupancy::default()
    };
    metrics.occupancy(&now);
    let text = metrics.render();
    assert_eq!(value(&text, "vllm:kv_cache_usage_perc"), 0.25);
    assert!(
        text.lines()
            .any(|line| line.contains("state=\"tree_cached\"") && line.ends_with(" 4"))
    );
}

/// The beginning, up to the value, of the one series of `name` that has all these label values.
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
fn tenants_have_series_of_their_own_and_those_without_share_one() {
    let metrics = metrics();
    let names: Vec<(u32, String)> = (1..200).map(|id| (id, format!("t{id}"))).collect();
    metrics.set_tenants(&names);
    metrics.set_tenants(&[(1, "renamed".into())]);
    let load = |running, seconds: u64| TenantLoad {
        running,
        service: Duration::from_millis(seconds * 1000 + 600),
        ..TenantLoad::default()
    };
    for (id, running, seconds) in [(1, 2, 3), (150, 4, 1), (160, 5, 1), (150, 1, 2)] {
        metrics.tenant(id, load(running, seconds));
    }
    metrics.rejected(160, RejectionReason::QueueFull);
    let text = metrics.render();
    let read = |name: &str, labels: &[&str]| value(&text, &labelled(&text, name, labels));
    assert_eq!(read("sterna_tenant_requests_running", &["t1"]), 2.0);
    assert_eq!(read("sterna_tenant_requests_running", &["other"]), 6.0);
    assert_eq!(read("sterna_tenant_service_seconds_total", &["t1"]), 3.0);
    assert_eq!(read("sterna_tenant_service_seconds_total", &["other"]), 4.0);
    assert_eq!(
        read("sterna_tenant_refusals_total", &["other", "queue_full"]),
        1.0
    );
    assert!(!text.contains("renamed") && !text.contains("t150"));
    let running = "sterna_tenant_requests_running{";
    assert_eq!(
        text.matches(running).count(),
        129,
        "128 tenants, and the others"
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
        computing: Duration::from_millis(30),
        deciding: Duration::from_micros(8),
        overhead: Duration::from_micros(70),
    };
    metrics.step(Duration::from_millis(31), &step);
    let text = metrics.render();
    assert_eq!(value(&text, "sterna_step_prediction_ratio_sum"), 1.5);
    assert_eq!(value(&text, "sterna_step_seconds_sum"), 0.031);
    assert_eq!(value(&text, "sterna_step_calibrated_seconds_sum"), 0.025);
    assert_eq!(value(&text, "sterna_scheduler_plan_seconds_sum"), 8e-6);
    assert_eq!(value(&text, "sterna_step_overhead_seconds_sum"), 7e-5);
}

#[test]
fn each_part_of_a_steps_cost_stands_under_its_own_name() {
    let metrics = metrics();
    let rows: [u64; 8] = std::array::from_fn(|knot| 1 << knot);
    metrics.calibrated(&StepCost {
        rows: rows.map(Duration::from_secs),
        kilo_decode_keys: Duration::from_secs(201),
        kilo_chunk_keys: Duration::from_secs(202),
        head: Duration::from_secs(203),
        logit: Duration::from_secs(204),
    });
    let text = metrics.render();
    let read = |part: &str| value(&text, &labelled(&text, "sterna_step_cost_seconds", &[part]));
    for count in rows {
        assert_eq!(read(&format!("rows_{count}")), count as f64);
    }
    let others = ["kilo_decode_keys", "kilo_chunk_keys", "head", "logit"].map(read);
    assert_eq!(others, [201.0, 202.0, 203.0, 204.0]);
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
