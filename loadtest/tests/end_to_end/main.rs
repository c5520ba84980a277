//! Runs the program against a tiny server.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod server;

use std::net::TcpListener;
use std::process::{Command, Output};

use serde_json::Value;

use server::{TEMPLATE_TOKENS, server};

/// Runs the load test with `flags` against a server that rejects requests whose `seed` is a
/// multiple of `reject_every`. With 0, the server rejects none.
fn loadtest(flags: &[&str], reject_every: u64) -> Output {
    let url = server(reject_every);
    Command::new(env!("CARGO_BIN_EXE_sterna-loadtest"))
        .args(flags)
        .args(["--url", &url])
        .output()
        .unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn a_closed_loop_counts_every_request_and_token() {
    let flags = [
        "--clients",
        "4",
        "--requests",
        "12",
        "--max-tokens",
        "7",
        "--prompt-tokens",
        "20",
    ];
    let output = loadtest(
        &[
            &flags[..],
            &[
                "--prompt-spread",
                "0",
                "--shared-prefix-tokens",
                "30",
                "--json",
            ],
        ]
        .concat(),
        0,
    );
    assert!(output.status.success(), "{output:?}");
    let report = json(&output);
    assert_eq!(report["complete"], 12);
    assert_eq!(report["output_tokens"], 12 * 7);
    let expected = 12 * 50; // Prompts have whole words, and one word is two tokens.
    let tokens = report["prompt_tokens"].as_u64().unwrap();
    assert!(tokens.abs_diff(expected) < expected / 50, "{tokens}");
    assert_eq!(report["inter_token_seconds"]["count"], 12 * 6);
    assert_eq!(report["time_to_first_token_seconds"]["count"], 12);
}

#[test]
fn a_prompt_may_be_longer_than_the_simulated_models_allow() {
    let flags = ["--requests", "2", "--prompt-tokens", "9000", "--json"];
    let more = ["--prompt-spread", "0", "--max-tokens", "5"];
    let report = json(&loadtest(&[&flags[..], &more].concat(), 0));
    let tokens = report["prompt_tokens"].as_u64().unwrap();
    assert!(tokens.abs_diff(18_000) < 400, "{report}");
}

#[test]
fn an_open_loop_sends_every_request_and_prints_a_table() {
    let output = loadtest(
        &["--rate", "500", "--requests", "10", "--max-tokens", "3"],
        0,
    );
    assert!(output.status.success(), "{output:?}");
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(
        table.contains("10 requests complete, 0 failed, in "),
        "{table}"
    );
    assert!(table.contains("time to first token"), "{table}");
}

#[test]
fn a_report_says_what_was_measured() {
    let flags = ["--requests", "2", "--max-tokens", "3", "--turns", "2"];
    let output = loadtest(&flags, 0);
    let table = String::from_utf8(output.stdout).unwrap();
    let line = |name: &str| {
        let found = table.lines().find_map(|line| line.strip_prefix(name));
        found
            .unwrap_or_else(|| panic!("{name}: {table}"))
            .trim()
            .to_owned()
    };
    assert_eq!(line("model"), "canned");
    assert_eq!(line("server version"), "7.1");
    assert_eq!(line("  page_size"), "16");
    let workload = "prompts of 64 tokens ± 50 %, answers of 3 tokens, 2 turns";
    assert_eq!(line("workload"), workload);
    assert!(line("command").starts_with("sterna-loadtest --requests 2 --max-tokens 3"));
    assert!(line("date").ends_with('Z'), "{table}");
    assert!(
        line("machine of the load test").contains(" cores, "),
        "{table}"
    );
    let report = json(&loadtest(&[&flags[..], &["--json"]].concat(), 0));
    assert_eq!(report["facts"]["server_version"], "7.1", "{report}");
    assert_eq!(report["facts"]["server_settings"]["page_size"], "16");
    assert_eq!(report["facts"]["workload"], workload);
}

#[test]
fn requests_of_the_warm_up_are_sent_but_do_not_count() {
    let flags = ["--requests", "10", "--warm-up", "5", "--max-tokens", "3"];
    let more = ["--json", "--clients", "3", "--turns", "2"];
    let output = loadtest(&[&flags[..], &more].concat(), 0);
    assert!(output.status.success(), "{output:?}");
    let report = json(&output);
    assert_eq!(report["complete"], 10);
    assert_eq!(report["output_tokens"], 30);
    assert_eq!(report["warm_up"], 5);
}

#[test]
fn each_tenant_has_its_key_its_rate_and_its_line() {
    let path = std::env::temp_dir().join(format!("sterna-rates-{}", std::process::id()));
    std::fs::write(&path, "small=k0\nlarge=k1\n").unwrap();
    let flags = ["--tenant-rates", "500,4500", "--requests", "400"];
    let more = ["--arrivals", "bursts:3", "--max-tokens", "2", "--json"];
    let keys = ["--keys", path.to_str().unwrap()];
    let output = loadtest(&[&flags[..], &more, &keys].concat(), 0);
    std::fs::remove_file(&path).unwrap();
    assert!(output.status.success(), "{output:?}");
    let report = json(&output);
    let small = &report["tenants"][0];
    assert_eq!(small["tenant"], "small", "{report}");
    let complete = small["complete"].as_u64().unwrap();
    assert!((20..60).contains(&complete), "{report}");
    assert_eq!(report["tenants"][1]["complete"], 400 - complete);
    assert_eq!(report["load"], "5000 sessions/s");
}

#[test]
fn a_run_of_seconds_ends_by_the_clock() {
    let flags = ["--duration", "0.2", "--clients", "2", "--json"];
    let report = json(&loadtest(&flags, 0));
    assert!(report["complete"].as_u64().unwrap() > 2, "{report}");
    assert!(report["seconds"].as_f64().unwrap() >= 0.1, "{report}");
}

#[test]
fn a_named_workload_runs_whole_sessions() {
    let flags = [
        "drive",
        "--workload",
        "edges",
        "--requests",
        "40",
        "--clients",
        "3",
        "--ignore-eos",
        "--json",
    ];
    let report = json(&loadtest(&flags, 0));
    assert_eq!(report["complete"], 40, "{report}");
    let latencies = &report["classes"]["chat"]["first_token_seconds"];
    assert_eq!(latencies["count"], 40, "{report}");
    // The system prompt has 14 words. The turn's 1 to 3 tokens are fewer than the template's, so
    // the user's message has one word.
    let min = 40 * (14 + 1 + TEMPLATE_TOKENS as u64);
    let tokens = report["prompt_tokens"].as_u64().unwrap();
    assert!((min..=min + 40).contains(&tokens), "{report}");
}

#[test]
fn the_csv_file_has_a_line_for_each_request() {
    let path = std::env::temp_dir().join(format!("sterna-requests-{}.csv", std::process::id()));
    let flags = ["--requests", "20", "--csv", path.to_str().unwrap()];
    let output = loadtest(&flags, 2);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("request,session,turn,class,tenant,slow,start_seconds,"));
    assert_eq!(lines.len(), 21, "{text}");
    let failed = lines
        .iter()
        .filter(|line| line.contains(",failed,status 503: engine_overloaded,,,,,,"));
    let complete = lines.iter().filter(|line| line.contains(",complete,,"));
    assert_eq!(failed.count() + complete.count(), 20, "{text}");
}

#[test]
fn the_page_has_all_plots_and_needs_no_other_file() {
    let id = std::process::id();
    let page = std::env::temp_dir().join(format!("sterna-page-{id}.html"));
    let keys = std::env::temp_dir().join(format!("sterna-page-keys-{id}"));
    std::fs::write(&keys, "a<b>&c=k0\n").unwrap();
    let flags = ["--requests", "20", "--html", page.to_str().unwrap()];
    let output = loadtest(
        &[&flags[..], &["--keys", keys.to_str().unwrap()]].concat(),
        2,
    );
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = std::fs::read_to_string(&page).unwrap();
    std::fs::remove_file(&page).unwrap();
    std::fs::remove_file(&keys).unwrap();
    // The two plots over time have a second drawing for narrow screens.
    assert_eq!(text.matches("<svg ").count(), 5 + 2, "{text}");
    assert!(text.contains("@media (max-width: 640px)"), "{text}");
    for fact in [
        "canned",
        "7.1",
        "server&#x27;s page_size",
        "sterna-loadtest --requests 20",
    ] {
        assert!(text.contains(fact), "{fact}: {text}");
    }
    assert!(text.contains("status 503: engine_overloaded"), "{text}");
    assert!(
        text.contains("a&lt;b&gt;&amp;c"),
        "names are escaped: {text}"
    );
    assert!(
        text.contains("@media (prefers-color-scheme: dark)"),
        "{text}"
    );
    for external in ["src=", "href=", "url(", "@import", "NaN"] {
        assert!(!text.contains(external), "{external}");
    }
}

#[test]
fn a_trace_file_is_sent_and_simulated() {
    let path = std::env::temp_dir().join(format!("sterna-trace-{}.csv", std::process::id()));
    let file = path.to_str().unwrap();
    let lines = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.0000000,100,44",
        "2023-11-16 18:16:16.0000000,5000,6",
    ];
    std::fs::write(&path, lines.join("\n")).unwrap();
    let flags = ["--trace", file, "--speed", "1000", "--ignore-eos", "--json"];
    let report = json(&loadtest(&flags, 0));
    assert_eq!(report["complete"], 2, "{report}");
    assert_eq!(report["output_tokens"], 50);
    let prompts = report["prompt_tokens"].as_u64().unwrap();
    assert!(prompts.abs_diff(5100) < 100, "{prompts}");

    let simulated = Command::new(env!("CARGO_BIN_EXE_sterna-loadtest"))
        .args(["simulate", "--trace", file, "--speed", "2", "--json"])
        .output()
        .unwrap();
    std::fs::remove_file(&path).unwrap();
    let report = json(&simulated);
    assert_eq!(report["ends"]["complete"], 2, "{report}");
    assert_eq!(report["output_tokens"], 50);
    assert!(report["seconds"].as_f64().unwrap() > 15.0, "{report}");
}

#[test]
fn a_sweep_ends_at_the_first_load_if_no_load_meets_the_objective() {
    let path = std::env::temp_dir().join(format!("sterna-sweep-{}.html", std::process::id()));
    let flags = ["sweep", "--seconds", "0.05", "--max-tokens", "2", "--json"];
    let page = ["--html", path.to_str().unwrap()];
    let output = loadtest(&[&flags[..], &page].concat(), 1); // The server rejects every request.
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let report = json(&output);
    assert_eq!(report["highest"], Value::Null, "{report}");
    let steps = report["steps"].as_array().unwrap();
    let repeated: Vec<&Value> = steps.iter().map(|step| &step["is_repeated"]).collect();
    assert_eq!(repeated, [false, true], "{report}");
    assert_eq!(steps[0]["good_share"], 0.0);
    assert_eq!(report["facts"]["model"], "canned", "{report}");
    let page = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(page.contains("within the objective: none"), "{page}");
    assert!(!page.contains("NaN") && !page.contains("inf"), "{page}");
}

#[test]
fn a_comparison_sends_the_same_requests_to_every_server() {
    let urls = [server(0), server(0)];
    let output = Command::new(env!("CARGO_BIN_EXE_sterna-loadtest"))
        .args(["compare", "--url", &urls[0], "--url", &urls[1], "--json"])
        .args(["--requests", "10", "--rounds", "2", "--max-tokens", "3"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let report = json(&output);
    for (server, url) in report["servers"].as_array().unwrap().iter().zip(&urls) {
        assert_eq!(
            (&server["url"], &server["failed"]),
            (&url[..].into(), &0.into())
        );
        let ratio = &server["figures"]["output tokens/s"]["ratio"];
        assert!(ratio.as_f64().unwrap() > 0.0, "{report}");
    }
    assert_eq!(
        report["servers"][0]["figures"]["end-to-end latency p50, ms"]["ratio"],
        1.0
    );
}

#[test]
fn a_failed_request_fails_the_run() {
    let output = loadtest(&["--requests", "20", "--json"], 2);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let report = json(&output);
    let failed = report["failed"].as_u64().unwrap();
    assert!((1..20).contains(&failed), "{report}");
    assert_eq!(report["failures"]["status 503: engine_overloaded"], failed);
    assert_eq!(report["complete"], 20 - failed);
}

#[test]
fn disconnecting_on_purpose_is_not_a_failure() {
    let output = loadtest(
        &["--requests", "16", "--disconnect-fraction", "1", "--json"],
        0,
    );
    assert!(output.status.success(), "{output:?}");
    let report = json(&output);
    assert_eq!(
        report["left"].as_u64().unwrap() + report["complete"].as_u64().unwrap(),
        16
    );
}

#[test]
fn every_tenant_needs_a_key() {
    let path = std::env::temp_dir().join(format!("sterna-keys-{}", std::process::id()));
    std::fs::write(&path, "flood=k0\n").unwrap();
    let flags = ["--workload", "flooder", "--keys", path.to_str().unwrap()];
    let output = loadtest(&flags, 0);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(
        message.contains("2 tenants, but the file has 1 keys"),
        "{message}"
    );
}

#[test]
fn an_unreachable_server_is_an_error_that_names_its_address() {
    let address = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let command = Command::new(env!("CARGO_BIN_EXE_sterna-loadtest"))
        .args(["--url", &format!("http://{address}")])
        .output();
    let output = command.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(
        message.contains(&address.to_string()) && message.contains("connection"),
        "{message}"
    );
}

#[test]
fn the_simulation_reads_the_step_costs_that_the_load_test_wrote() {
    let path = std::env::temp_dir().join(format!("sterna-costs-{}.json", std::process::id()));
    let file = path.to_str().unwrap();
    let output = loadtest(&["--requests", "3", "--costs", file], 0);
    assert!(output.status.success(), "{output:?}");
    let costs: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(costs["rows"], serde_json::json!(vec![3_000_000; 10]));
    assert_eq!(costs["logit"], 3_000_000);

    let simulated = Command::new(env!("CARGO_BIN_EXE_sterna-loadtest"))
        .args(["simulate", "--requests", "50", "--rate", "0.25", "--json"])
        .args(["--cost", file])
        .output()
        .unwrap();
    std::fs::remove_file(&path).unwrap();
    let report = json(&simulated);
    assert_eq!(report["sessions_per_second"], 0.25);
}
