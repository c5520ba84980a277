//! Hostile grammars: each is refused or served within its budget, and others are served meanwhile.

use std::sync::Arc;

use futures_util::FutureExt;
use serde_json::{Value, json};
use sterna::constraint::{GrammarError, GrammarOptions, GrammarSource, Grammars};
use sterna::engine::FinishReason;

use super::grammars::options;
use super::lab::{END, Lab};

/// Returns schemas and expressions that take as much work as their authors could think of.
fn hostile() -> Vec<GrammarSource> {
    let many: Vec<String> = (0..6000)
        .map(|number| format!("{:x}", number * 7919))
        .collect();
    let nested = (0..60).fold(
        json!({"type": "string"}),
        |inner, level| json!({"anyOf": [{"type": "array", "items": inner}, {"const": level}]}),
    );
    let wide: serde_json::Map<String, Value> = (0..900)
        .map(|number| {
            (
                format!("p{number}"),
                json!({"type": "string", "maxLength": 1000}),
            )
        })
        .collect();
    let crossed: Vec<Value> = (0..12)
        .map(|number| json!({"anyOf": [{"minLength": number}, {"maxLength": 90 - number}]}))
        .collect();
    let schemas = [
        json!({"enum": many}),
        nested,
        json!({"type": "object", "properties": wide}),
        json!({"type": "string", "minLength": 100_000, "maxLength": 1_000_000}),
        json!({"type": "array", "minItems": 100_000, "items": {"type": "integer"}}),
        json!({"type": "string", "allOf": crossed}),
        json!({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}},
               "$ref": "#/$defs/a"}),
        json!({"multipleOf": 0.000_000_1, "type": "number", "maximum": 1e300}),
    ];
    let patterns = [
        "(a|aa)+b".repeat(50),
        "((((a{1,100}){1,100}){1,100}){1,100}){1,100}".to_owned(),
        "(.*a.{60})".to_owned(),
        "([a-z]*[0-9]*){1000}x".to_owned(),
        format!(
            "({})",
            (0..2000)
                .map(|n| format!(".*{n}.*"))
                .collect::<Vec<_>>()
                .join("|")
        ),
        r"(\w{1,200}|\d{1,300}|\S{1,100}){50}".to_owned(),
    ];
    let larks = [
        format!("start: {}", "a ".repeat(2000)) + "\na: \"x\" | a a |",
        (0..2000).fold("start: r0\n".to_owned(), |all, n| {
            all + &format!("r{n}: r{} r{}\n", n + 1, n + 1)
        }) + "r2000: \"x\"",
    ];
    let schemas = schemas.iter().map(GrammarSource::json_schema);
    let patterns = patterns.iter().map(|pattern| GrammarSource::regex(pattern));
    let larks = larks.iter().map(|lark| GrammarSource::grammar(lark));
    schemas
        .chain(patterns)
        .chain(larks)
        .filter_map(Result::ok)
        .collect()
}

#[tokio::test]
async fn hostile_grammars_are_bounded_and_delay_nobody_else() {
    let lab = Lab::new(512, 0);
    let modest = GrammarSource::regex("[a-z]{3}").unwrap();
    for (number, source) in (0..).zip(hostile()) {
        let result = lab.grammars.compile(1, source.clone()).await;
        if let Ok(grammar) = result {
            let mut request = lab.request(number, Some(grammar));
            request.max_new_tokens = 30;
            let answer = lab.answer(request).await;
            let has_end = answer.reason.is_some() || answer.dead_end.is_some();
            assert!(has_end, "{source:?}");
        } else {
            assert!(!matches!(result, Err(GrammarError::Busy)), "{source:?}");
        }
        let grammar = lab.grammars.compile(2, modest.clone()).await.unwrap();
        let answer = lab.answer(lab.request(number, Some(grammar))).await;
        assert_eq!(answer.reason, Some(FinishReason::Stop));
    }
}

#[tokio::test]
async fn bytes_that_are_forced_without_an_end_reach_the_limit_of_time() {
    let lab = Lab::new(512, 0);
    let source = GrammarSource::grammar("start: T0 T0\nT0: /a{100}/+\n").unwrap();
    match lab.grammars.compile(1, source).await {
        Err(GrammarError::Invalid(why)) => assert!(why.contains("limit of 500 ms"), "{why}"),
        other => panic!("{other:?}"),
    }
    let source = "start: /[bc]/ A A\nA: /a{100}/+\n"; // The mask thread meets it.
    let source = GrammarSource::grammar(source).unwrap();
    let grammar = lab.grammars.compile(1, source).await.unwrap();
    let answer = lab.answer(lab.request(1, Some(grammar))).await;
    let why = answer.dead_end.unwrap();
    assert!(why.contains("limit of 500 ms"), "{why}");
}

#[tokio::test]
async fn equal_grammars_are_compiled_once() {
    let lab = Lab::new(16, 0);
    let source = GrammarSource::regex("[a-z]{3}").unwrap();
    let compile = || lab.grammars.compile(1, source.clone());
    let all = futures_util::future::join_all((0..12).map(|_| compile())).await;
    let first = all[0].clone().unwrap();
    assert!(all.into_iter().all(|grammar| grammar == Ok(first.clone())));
    let other = lab.grammars.compile(2, source.clone()).await.unwrap();
    assert!(other != first, "another tenant has its own");
}

#[tokio::test]
async fn many_waiting_grammars_of_others_leave_a_place_for_a_tenant() {
    let tokenizer = Arc::clone(&Lab::new(16, 0).tokenizer);
    let options = GrammarOptions {
        compilations_at_once: 0, // All wait.
        ..options(&[END])
    };
    let idle = Grammars::start(tokenizer, &options, || false, |_, _| ());
    let mut numbers = 0..;
    let mut begin = |tenant| {
        let number = numbers.next().unwrap();
        let source = GrammarSource::regex(&format!("[a-z]{{3}}{number}")).unwrap();
        let mut compiled = Box::pin(idle.compile(tenant, source));
        let answer = (&mut compiled).now_or_never();
        (compiled, answer.and_then(Result::err))
    };
    let mut floods = Vec::new();
    for tenant in 1..=4 {
        floods.extend((0..64).map(|_| begin(tenant)));
        let (_, error) = begin(tenant);
        assert_eq!(error, Some(GrammarError::Busy), "a quarter of the places");
    }
    assert!(floods.iter().all(|(_, error)| error.is_none()));
    let (late, error) = begin(5);
    assert_eq!(error, None);
    let answers = floods
        .into_iter()
        .map(|(compiled, _)| compiled.now_or_never());
    let lost: Vec<usize> = (0..)
        .zip(answers)
        .filter_map(|(index, answer)| match answer? {
            Err(GrammarError::Busy) => Some(index),
            _ => panic!("it is not compiled"),
        })
        .collect();
    assert_eq!(lost, [255], "the newest of a tenant with most");
    assert!(late.now_or_never().is_none());
}
