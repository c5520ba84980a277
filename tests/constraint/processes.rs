//! Grammars that break, starve or end their workers: each ends its own answers with an error that
//! says why, and nobody else notices.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use serde_json::{Map, Value, json};
use sterna::constraint::{GrammarError, GrammarSource, Grammars};
use tokio::runtime::Builder;
use tokio::time::timeout;

use super::grammars::options;
use super::lab::{END, Lab};

/// Checks that the answers of a neighbour stay the same while a grammar does its worst.
async fn beside_a_neighbour(worst: impl AsyncFn(&Lab)) {
    let lab = Lab::new(512, 0);
    let source = GrammarSource::regex("([a-z]{2,8} ){5,30}").unwrap();
    let grammar = lab.grammars.compile(2, source).await.unwrap();
    let request = || lab.request(3, Some(grammar.clone()));
    let alone = lab.answer(request()).await;
    let neighbour = async {
        for _ in 0..4 {
            assert_eq!(lab.answer(request()).await, alone);
        }
    };
    tokio::join!(worst(&lab), neighbour);
    assert_eq!(lab.answer(request()).await, alone);
}

#[tokio::test]
async fn a_worker_that_fails_ends_the_answers_of_its_grammar_only() {
    let faults = [
        ("abort", "it made the library fail"),
        ("wrong mask", "it made the library fail"),
        ("allocate", "more than 256 MiB of memory"),
        ("recurse", "more than 16 MiB of stack"),
        ("loop", "more than 3 seconds of processor time"),
    ];
    beside_a_neighbour(async |lab| {
        for (fault, limit) in faults {
            let source = format!("start: /[a-z]+/\n// fault: {fault}\n");
            let source = GrammarSource::grammar(&source).unwrap();
            let grammar = lab.grammars.compile(1, source.clone()).await.unwrap();
            let request = || lab.request(1, Some(grammar.clone()));
            let (answer, other) = tokio::join!(lab.answer(request()), lab.answer(request()));
            // Beside much other work, 3 seconds of processor time take longer than 10 seconds.
            let meets_limit = |why: &str| {
                why.contains(limit) || fault == "loop" && why.contains("more than 10 seconds")
            };
            for answer in [answer, other] {
                let why = answer.dead_end.expect(fault);
                assert!(meets_limit(&why), "{fault}: {why}");
            }
            let refused = lab.grammars.compile(1, source.clone()).await;
            assert!(
                matches!(&refused, Err(GrammarError::TooCostly(why)) if meets_limit(why)),
                "{fault}: {refused:?}"
            );
            assert!(
                lab.grammars.compile(3, source).await.is_ok(),
                "another tenant"
            );
        }
    })
    .await;
}

/// Returns a grammar that takes more time than a worker has.
fn conjunction() -> GrammarSource {
    let all: Vec<String> = (1..=300).map(|n| format!("/.*b{{{n}}}.*/")).collect();
    GrammarSource::grammar(&format!("start: A\nA: {}\n", all.join(" & "))).unwrap()
}

/// One derivative of such an expression is exponential, and the library reads its budget only
/// after it.
#[tokio::test]
async fn a_conjunction_of_expressions_meets_the_limits_of_its_worker() {
    let patterns: Vec<_> = (1..=100)
        .map(|gap| json!({"pattern": format!("^.*a.{{{gap}}}b$")}))
        .collect();
    let schema = json!({"type": "string", "allOf": patterns});
    let sources = [GrammarSource::json_schema(&schema).unwrap(), conjunction()];
    beside_a_neighbour(async |lab| {
        for source in &sources {
            let refused = lab.grammars.compile(1, source.clone()).await;
            if refused == Err(GrammarError::TooSlow) {
                continue; // Other work fills the machine, so the wall time is over first.
            }
            assert!(
                matches!(refused, Err(GrammarError::TooCostly(_))),
                "{refused:?}"
            );
            let again = lab.grammars.compile(1, source.clone()).now_or_never();
            assert_eq!(again, Some(refused), "it is not compiled again");
        }
    })
    .await;
}

#[test]
fn a_grammar_that_waits_for_its_tenants_part_is_not_refused_for_good() {
    let tokenizer = Arc::clone(&Lab::new(16, 0).tokenizer);
    let is_busy = Arc::new(AtomicBool::new(false));
    let busy = Arc::clone(&is_busy);
    let is_busy_now = move || busy.load(Ordering::Relaxed);
    let grammars = Grammars::start(tokenizer, &options(&[END]), is_busy_now, |_, _| ());
    let wide = |number: usize| {
        let property = |name: usize| (format!("p{name}_{number}"), json!({"type": "integer"}));
        let properties: Map<String, Value> = (0..400).map(property).collect();
        let required: Vec<&String> = properties.keys().collect();
        let schema = json!({"type": "object", "required": required, "properties": properties});
        GrammarSource::json_schema(&schema).unwrap()
    };
    let compilation_time = || {
        let times = grammars.usage().times;
        let own = times.iter().find(|(tenant, _)| *tenant == 1);
        own.map_or(0, |(_, [compilations, _])| compilations.as_millis())
    };
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    let mut numbers = 0..;
    while compilation_time() < 1000 {
        let source = wide(numbers.next().unwrap());
        runtime.block_on(grammars.compile(1, source)).unwrap();
    }
    is_busy.store(true, Ordering::Relaxed); // The tenant has used its part of several seconds.
    // In this runtime every wait is over at once. The worker's time is that of the clock.
    let hurried = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let source = wide(numbers.next().unwrap());
    let waiting = hurried.block_on(grammars.compile(1, source));
    assert_eq!(waiting.err(), Some(GrammarError::Busy));
}

/// Before, a tenant whose worker ended or was given up paid for the pauses too.
#[tokio::test]
async fn a_compilation_that_is_given_up_costs_what_ran_of_it() {
    let tokenizer = Arc::clone(&Lab::new(16, 0).tokenizer);
    let (sender, charges) = mpsc::channel();
    let charge = move |tenant, time| {
        let _ = sender.send((tenant, time)); // The test may have ended.
    };
    let grammars = Grammars::start(tokenizer, &options(&[END]), || true, charge);
    let source = conjunction();
    let left = timeout(Duration::from_secs(3), grammars.compile(1, source)).await;
    assert!(left.is_err(), "it takes longer");
    let (tenant, time) = charges.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(tenant, 1);
    // The first 100 ms are not paused, and then a fortieth of the time runs.
    let ran = Duration::from_millis(50)..Duration::from_millis(1000);
    assert!(ran.contains(&time), "{time:?}");
}

/// Before, the thread of each grammar held the grammar, so no worker ever ended.
#[tokio::test]
async fn a_grammar_that_nobody_has_any_more_ends_its_worker() {
    let tokenizer = Arc::clone(&Lab::new(16, 0).tokenizer);
    let held = Arc::new(());
    let own = Arc::clone(&held);
    let is_busy = move || Arc::strong_count(&own) == 0;
    let grammars = Grammars::start(tokenizer, &options(&[END]), is_busy, |_, _| ());
    for number in 0..24 {
        let source = GrammarSource::regex(&format!("[a-z]{{3}}{number}")).unwrap();
        drop(grammars.compile(1, source).await.unwrap());
    }
    let patience = Instant::now() + Duration::from_secs(60);
    while grammars.usage().workers > 16 {
        assert!(Instant::now() < patience, "only 16 are cached");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(grammars);
    while Arc::strong_count(&held) > 1 {
        assert!(Instant::now() < patience, "a thread keeps the grammars");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
