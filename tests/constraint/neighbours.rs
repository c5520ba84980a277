//! Requests beside each other: a grammar changes its own answer only, and nothing changes that one.

use sterna::constraint::{Grammar, GrammarSource};
use sterna::engine::{GenerationRequest, TenantId, TenantPolicy};
use tokio::task::JoinSet;

use serde_json::json;

use super::lab::{Answer, END, Lab};

async fn grammars(lab: &Lab) -> Vec<Option<Grammar>> {
    let list = json!({
        "type": "array",
        "minItems": 2,
        "maxItems": 12,
        "items": {
            "type": "object",
            "properties": {
                "identifier": {"type": "string", "maxLength": 12},
                "is_valid": {"type": "boolean"},
            },
            "required": ["identifier", "is_valid"],
            "additionalProperties": false,
        },
    });
    let sources = [
        GrammarSource::json_schema(&list).unwrap(),
        GrammarSource::regex("([a-z]{2,8} ){5,30}").unwrap(),
        GrammarSource::choice(&["a long forced text without end".to_owned()]).unwrap(),
    ];
    let mut grammars = vec![None];
    for source in sources {
        grammars.push(Some(lab.compile(source).await.unwrap()));
    }
    grammars
}

/// Returns requests of which every fourth is free and the others follow a grammar.
async fn requests(lab: &Lab) -> Vec<GenerationRequest> {
    let others = [1, 2].map(|id| (TenantId(id), TenantPolicy::default()));
    lab.handle.set_tenants(others.to_vec()).await.unwrap();
    let grammars = grammars(lab).await;
    let request = |number: usize| {
        let mut request = lab.request(number as u64, grammars[number % 4].clone());
        request.max_new_tokens = 300;
        request.tenant = TenantId(number as u32 % 3);
        request.sampling.top_k = if number.is_multiple_of(5) { 20 } else { 0 };
        request.sampling.temperature = if number.is_multiple_of(3) { 0.0 } else { 1.0 };
        request
    };
    (0..32).map(request).collect()
}

/// Runs all requests at the same time.
async fn together(lab: Lab) -> Vec<Answer> {
    let requests = requests(&lab).await;
    let lab = std::sync::Arc::new(lab);
    let mut running = JoinSet::new();
    for (index, request) in requests.into_iter().enumerate() {
        let lab = std::sync::Arc::clone(&lab);
        let stream = lab.handle.submit(request).unwrap();
        running.spawn(async move { (index, lab.read(stream).await) });
    }
    let mut answers = running.join_all().await;
    answers.sort_by_key(|(index, _)| *index);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

#[tokio::test]
async fn an_answer_is_the_same_alone_and_in_any_company() {
    let lab = Lab::new(512, 0);
    let mut alone = Vec::new();
    for request in requests(&lab).await {
        alone.push(lab.answer(request).await);
    }
    // Few pages make the scheduler preempt; drafts make it draw several tokens in a step.
    for (pages, max_draft) in [(512, 0), (512, 6), (60, 0), (60, 6)] {
        let company = together(Lab::new(pages, max_draft)).await;
        for (index, (alone, company)) in alone.iter().zip(&company).enumerate() {
            assert_eq!(
                alone, company,
                "request {index}, {pages} pages, {max_draft} drafts"
            );
        }
    }
}

#[tokio::test]
async fn a_compiled_grammar_belongs_to_its_tenant() {
    let lab = Lab::new(64, 0);
    let source = || GrammarSource::regex("[a-z]{3}").unwrap();
    let first = lab.grammars.compile(1, source()).await.unwrap();
    let again = lab.grammars.compile(1, source()).await.unwrap();
    let other = lab.grammars.compile(2, source()).await.unwrap();
    assert_eq!(
        first, again,
        "the second request finds the compiled grammar"
    );
    assert_ne!(first, other, "another tenant compiles its own");
    // A tenant keeps the 16 grammars that it used last.
    for number in 0..15 {
        let source = GrammarSource::regex(&format!("a{{{}}}", number + 1)).unwrap();
        lab.grammars.compile(1, source).await.unwrap();
    }
    assert_eq!(lab.grammars.compile(1, source()).await.unwrap(), first);
    for number in 0..16 {
        let source = GrammarSource::regex(&format!("b{{{}}}", number + 1)).unwrap();
        lab.grammars.compile(1, source).await.unwrap();
    }
    assert_ne!(lab.grammars.compile(1, source()).await.unwrap(), first);
    assert_eq!(lab.grammars.compile(2, source()).await.unwrap(), other);
}

/// A panic of a mask thread would end the answers of all tenants on that thread.
#[tokio::test]
async fn a_panic_beside_an_answer_does_not_change_it() {
    let lab = Lab::new(512, 0);
    let request = |lab: &Lab, grammar| lab.request(3, Some(grammar));
    let [_, _, _, Some(forced)] = &grammars(&lab).await[..] else {
        panic!("the fourth grammar forces its tokens");
    };
    let expected = lab.answer(request(&lab, forced.clone())).await;
    let source = GrammarSource::regex("[a-z]{20}").unwrap();
    let free = lab.compile(source).await.unwrap();
    let expected_free = lab.answer(request(&lab, free.clone())).await;
    // The engine never says that it drew another token than the forced one, so the thread panics.
    let broken: Vec<_> = (0..4).map(|_| forced.begin(&[END])).collect();
    for output in &broken {
        let place = output.forced().next().unwrap();
        output.drawn(place + 1);
    }
    for _ in 0..4 {
        assert_eq!(lab.answer(request(&lab, forced.clone())).await, expected);
        assert_eq!(lab.answer(request(&lab, free.clone())).await, expected_free);
    }
}
