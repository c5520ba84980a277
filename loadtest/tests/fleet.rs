//! Simulations of many machines behind a router.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::process::Command;

use serde_json::Value;

const ROUTERS: [&str; 5] = [
    "round-robin",
    "least-loaded",
    "consistent-hash",
    "cache-aware",
    "kv-events",
];

/// Runs `simulate` with these flags. Returns its JSON report.
fn simulate(flags: &str) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_sterna-loadtest"))
        .args(["simulate", "--json"])
        .args(flags.split_whitespace())
        .output()
        .unwrap();
    assert!(output.status.success(), "{flags}: {output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Removes what depends on the machine that simulates, and what only fleets have.
fn comparable(mut report: Value) -> Value {
    let fields = report.as_object_mut().unwrap();
    for name in ["wall_seconds", "plan_micros", "fleet", "machines", "router"] {
        fields.remove(name);
    }
    report
}

fn figure(report: &Value, at: &str) -> f64 {
    let found = report.pointer(at).and_then(Value::as_f64);
    found.unwrap_or_else(|| panic!("{at} is not a number in {report:#}"))
}

/// Returns the number of requests that ended, with any outcome.
fn ended(report: &Value) -> u64 {
    let outcomes = [&report["ends"], &report["refusals"]];
    let counts = outcomes.iter().flat_map(|list| list.as_object().unwrap());
    counts.map(|(_, count)| count.as_u64().unwrap()).sum()
}

#[test]
fn one_machine_behind_any_router_is_the_simulation_of_one_machine() {
    let workloads = [
        "cancel-storm",
        "deadlines --load 1.2",
        "fleet",
        "questions --clients 16 --cost 2b-2core-zen4",
    ];
    for workload in workloads {
        let flags = format!("--workload {workload} --requests 150");
        let alone = comparable(simulate(&flags));
        for router in ROUTERS {
            let flags = format!("{flags} --machines 1 --router {router}");
            assert_eq!(comparable(simulate(&flags)), alone, "{flags}");
        }
    }
}

#[test]
fn one_seed_is_one_simulation() {
    for router in ROUTERS {
        let run = |seed: u32| {
            let flags = "--workload fleet --machines 4 --requests 300 --mtbf-seconds 60";
            comparable(simulate(&format!(
                "{flags} --router {router} --seed {seed}"
            )))
        };
        let first = run(1);
        assert_eq!(run(1), first, "{router}");
        assert_ne!(run(2), first, "{router}");
    }
}

#[test]
fn routers_that_look_at_prompts_find_shared_prefixes() {
    let hits = |router: &str| {
        let flags = "--workload fleet --machines 8 --requests 1200";
        figure(
            &simulate(&format!("{flags} --router {router}")),
            "/prefix/hits",
        )
    };
    let round_robin = hits("round-robin");
    for router in ["cache-aware", "kv-events"] {
        let found = hits(router);
        assert!(
            found > round_robin + 0.1,
            "{router}: {found}, not {round_robin}"
        );
    }
    // A session stays on its machine, so its later turns find the conversation.
    let sessions = hits("consistent-hash");
    assert!(sessions > round_robin, "{sessions}, not {round_robin}");
}

#[test]
fn no_request_of_a_failed_machine_is_lost_silently() {
    for router in ROUTERS {
        let flags = "--workload questions --machines 4 --requests 400 --mtbf-seconds 60";
        let report = simulate(&format!("{flags} --down-seconds 10 --router {router}"));
        assert_eq!(ended(&report), 400, "{router}: {report:#}");
        for at in ["/fleet/failures", "/fleet/sent_again", "/ends/error"] {
            assert!(figure(&report, at) > 0.0, "{router}: {at}: {report:#}");
        }
    }
}

#[test]
fn requests_are_refused_while_all_machines_are_away() {
    let flags = "--workload questions --machines 1 --router least-loaded --requests 100";
    let report = simulate(&format!("{flags} --mtbf-seconds 30 --down-seconds 1000"));
    assert_eq!(ended(&report), 100, "{report:#}");
    assert!(figure(&report, "/refusals/no_machine") > 0.0, "{report:#}");
}

#[test]
fn a_steady_load_is_even_in_turns_and_uneven_by_hash() {
    let imbalance = |router: &str| {
        let flags = "--workload questions --machines 10 --requests 1000";
        let report = simulate(&format!("{flags} --router {router}"));
        assert_eq!(figure(&report, "/machines"), 10.0);
        figure(&report, "/fleet/token_imbalance")
    };
    assert!(imbalance("round-robin") < 1.01);
    assert!(imbalance("consistent-hash") > 1.1);
}

#[test]
fn a_key_of_hashes_needs_a_router_that_hashes() {
    let flags = "--machines 2 --router round-robin --hash-by tenant";
    let output = Command::new(env!("CARGO_BIN_EXE_sterna-loadtest"))
        .arg("simulate")
        .args(flags.split_whitespace())
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{error}");
    assert!(
        error.contains("--hash-by is for --router consistent-hash"),
        "{error}"
    );
}
