//! Tests of the report's figures.

use std::time::{Duration, Instant};

use super::*;
use crate::drive::facts::ServerAnswers;
use crate::drive::outcome::{ChatOutcome, CompleteAnswer, Failure, Timing, TokenUsage};
use crate::drive::record::{EndedRequest, RequestIdentity};

const OBJECTIVE: LatencyObjective = LatencyObjective {
    first_token_seconds: 0.1,
    per_output_token_seconds: 0.02,
};

fn complete(first_ms: u64, gaps_ms: &[u64]) -> ChatOutcome {
    let millis = Duration::from_millis;
    let usage = concat!(
        r#"{"prompt_tokens":10,"completion_tokens":3,"#,
        r#""prompt_tokens_details":{"cached_tokens":4}}"#
    );
    ChatOutcome::Complete(CompleteAnswer {
        text: String::new(),
        timing: Timing {
            first_text: Some(millis(first_ms)),
            gaps: gaps_ms.iter().map(|gap| millis(*gap)).collect(),
            total: millis(first_ms + gaps_ms.iter().sum::<u64>()),
        },
        usage: serde_json::from_str::<TokenUsage>(usage).unwrap(),
    })
}

/// Returns the record of requests that all start at once and end after `seconds`. Tenants take
/// turns, and every request with `is_slow` of its number is slow.
fn record(outcomes: Vec<ChatOutcome>, seconds: u64, is_slow: fn(u64) -> bool) -> RunRecord {
    let start = Instant::now();
    let mut record = RunRecord::new(start, 0);
    for (number, outcome) in (0..).zip(outcomes) {
        record.add(EndedRequest {
            identity: RequestIdentity {
                number,
                session: number,
                turn: 0,
                class: "chat",
                tenant: number as u32 % 2,
                is_slow: is_slow(number),
            },
            intended: start,
            sent: start,
            ended: start + Duration::from_secs(seconds),
            outcome,
        });
    }
    record
}

fn report_of(record: &RunRecord) -> LiveReport {
    LiveReport::new(RunHeader::default(), record, &["a".into()], OBJECTIVE)
}

fn report(outcomes: Vec<ChatOutcome>, seconds: u64) -> LiveReport {
    report_of(&record(outcomes, seconds, |_| false))
}

fn near(value: f64, expected: f64) -> bool {
    (value - expected).abs() <= expected * 1e-3
}

#[test]
fn percentiles_of_a_hundred_latencies() {
    let outcomes = (1..=100).rev().map(|ms| complete(ms, &[5])).collect();
    let found = report(outcomes, 10).total.time_to_first_token_seconds;
    let found = found.unwrap();
    assert_eq!(found.count, 100);
    assert!(
        near(found.p50, 0.050) && near(found.p90, 0.090),
        "{found:?}"
    );
    assert!(
        near(found.p99, 0.099) && near(found.max, 0.100),
        "{found:?}"
    );
}

#[test]
fn rates_are_over_the_whole_run() {
    let report = report(vec![complete(10, &[1, 30]), complete(10, &[2, 2])], 4);
    let total = &report.total;
    assert_eq!((total.output_tokens, total.cached_tokens), (6, 8));
    assert!(near(total.output_tokens_per_second, 1.5));
    assert!(near(total.tokens_per_second, 6.5));
    assert!(near(total.cache_hit_rate, 0.4));
    assert!(near(report.requests_per_second, 0.5));
    let gaps = report.inter_token_seconds.unwrap();
    assert!(near(gaps.max, 0.030), "the longest gap");
    // Three tokens in two pieces of time: 31 ms and 4 ms over two tokens.
    let per_token = total.time_per_output_token_seconds.unwrap();
    assert!(near(per_token.max, 0.0155) && near(per_token.p50, 0.002));
}

#[test]
fn goodput_counts_requests_within_the_objective() {
    let outcomes = vec![
        complete(100, &[20, 20]),
        complete(101, &[20, 20]),
        complete(100, &[20, 21]),
        ChatOutcome::Failed(Failure::CutOff),
    ];
    let total = report(outcomes, 2).total;
    assert_eq!((total.good, total.complete), (1, 3));
    assert!(near(total.goodput, 0.5));
}

#[test]
fn failures_are_counted_by_reason_and_have_no_latencies() {
    let outcomes = vec![
        ChatOutcome::Failed(Failure::CutOff),
        ChatOutcome::Failed(Failure::Status(503, "draining".into())),
        ChatOutcome::Failed(Failure::CutOff),
        ChatOutcome::Disconnected,
    ];
    let report = report(outcomes, 1);
    let total = &report.total;
    assert_eq!((total.complete, total.left, total.failed), (0, 1, 3));
    assert_eq!(total.refused, 1);
    assert_eq!(report.failures["stream ended without [DONE]"], 2);
    assert_eq!(report.failures["status 503: draining"], 1);
    assert_eq!(total.end_to_end_seconds, None);
    let table = report.to_string();
    let expected = "0 requests complete, 3 failed (1 of them refused), 1 disconnected on purpose";
    assert!(table.contains(expected), "{table}");
}

#[test]
fn each_tenant_has_its_own_figures() {
    let outcomes = (1..=10).map(|ms| complete(ms * 10, &[5, 5])).collect();
    let report = report(outcomes, 1);
    let [first, second] = &report.tenants[..] else {
        panic!("{report}")
    };
    assert_eq!((&first.tenant[..], &second.tenant[..]), ("a", "1"));
    assert_eq!((first.figures.complete, second.figures.complete), (5, 5));
    let p50 = |tenant: &TenantReport| tenant.figures.time_to_first_token_seconds.unwrap().p50;
    assert!(near(p50(first), 0.050) && near(p50(second), 0.060));
    assert!(
        report
            .to_string()
            .contains("\na                     5       0"),
        "{report}"
    );
}

#[test]
fn slow_readers_count_but_have_no_latencies() {
    let outcomes = (1..=10).map(|ms| complete(ms * 10, &[5, 5])).collect();
    let report = report_of(&record(outcomes, 1, |number| number >= 8));
    assert_eq!((report.total.complete, report.slow_readers), (10, 2));
    assert_eq!(report.total.output_tokens, 30);
    let first = report.total.time_to_first_token_seconds.unwrap();
    assert_eq!(first.count, 8);
    assert!(near(first.max, 0.080));
    assert_eq!(report.inter_token_seconds.unwrap().count, 16);
}

#[test]
fn requests_of_the_warm_up_are_not_recorded() {
    let mut record = RunRecord::new(Instant::now(), 3);
    let ten = self::record((1..=10).map(|ms| complete(ms, &[])).collect(), 1, |_| false);
    let start = Instant::now();
    for request in ten.requests {
        record.add(EndedRequest {
            identity: request.identity,
            intended: start,
            sent: start,
            ended: start,
            outcome: complete(10, &[5]),
        });
    }
    assert_eq!(record.requests.len(), 7);
    assert_eq!(report_of(&record).inter_token_seconds.unwrap().count, 7);
}

#[test]
fn a_sweep_shows_the_repetitions_beside_the_search() {
    let step = |size: f64, is_met: bool, is_repeated: bool| {
        let mut report = report(vec![complete(50, &[5, 5])], 1);
        report.header.load = format!("{size} clients");
        SweepStep {
            size,
            good_share: 1.0,
            is_met,
            is_repeated,
            report,
        }
    };
    let sweep = SweepReport {
        facts: RunFacts::now("m", "w".into(), &ServerAnswers::default()),
        slo_share: 0.99,
        highest: Some(8.0),
        steps: vec![
            step(8.0, true, false),
            step(8.0, false, true),
            step(9.0, false, false),
            step(9.0, false, true),
        ],
    };
    let text = sweep.to_string();
    let marked: Vec<&str> = text.lines().filter(|line| line.ends_with('*')).collect();
    assert!(
        marked.len() == 1 && marked[0].starts_with("8 clients  "),
        "{text}"
    );
    assert!(
        text.contains("\n8 clients again ") && text.contains("\n9 clients again "),
        "{text}"
    );
    let result = "8 clients, 3.0 output tokens/s (again: 3.0, missed)\n";
    assert!(text.contains(result), "{text}");
    assert!(text.contains("\nworkload                  w\n"), "{text}");
}
