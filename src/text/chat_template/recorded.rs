//! Compares the templates of `tests/jinja/` with the answers of `transformers`.

use minijinja::value::{Serde, Value as JinjaValue};
use serde_json::Value;

use super::jinja::JinjaTemplate;

const RECORDED: &str = include_str!("../../../tests/jinja/recorded.json");
const VARIABLES: &str = include_str!("../../../tests/jinja/variables.json");

#[test]
fn every_construct_writes_what_transformers_writes() {
    let cases: Vec<Value> = serde_json::from_str(RECORDED).unwrap();
    let variables: Value = serde_json::from_str(VARIABLES).unwrap();
    let variables = JinjaValue::from(Serde(&variables));
    let mut different = Vec::new();
    for case in &cases {
        let template = case["template"].as_str().unwrap();
        let answer = JinjaTemplate::compile(template)
            .map_err(|error| format!("{error:#}"))
            .and_then(|one| {
                one.render(variables.clone())
                    .map_err(|error| error.to_string())
            });
        if answer.as_deref().ok() != case["answer"].as_str() {
            different.push(format!("{template}\n  {}\n  {answer:?}", case["answer"]));
        }
    }
    let count = different.len();
    assert!(count == 0, "{count} differ:\n{}", different.join("\n"));
}
