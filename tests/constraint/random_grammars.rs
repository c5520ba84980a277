//! Random schemas and regular expressions: every answer is valid, says another implementation.
//!
//! `STERNA_GRAMMARS=500` tries as many of each.

use std::sync::Arc;

use serde_json::{Map, Value, json};
use sterna::constraint::GrammarSource;
use sterna::engine::FinishReason;
use sterna_random::Random;
use tokio::task::JoinSet;

use super::lab::Lab;

/// The number of schemas, and of expressions.
fn count() -> u64 {
    let count = std::env::var("STERNA_GRAMMARS").ok();
    count.map_or(50, |count| count.parse().expect("a whole number"))
}

fn word(random: &mut Random) -> String {
    let letters = [
        "a", "b", "name", "é", " ", "\"", "\\", "/", "你", "-", "1", "is_",
    ];
    let count = random.between(1, 3);
    (0..count).map(|_| random.pick(&letters)).collect()
}

fn schema(random: &mut Random, depth: u32) -> Value {
    let kinds = if depth == 0 { 8 } else { 12 };
    match random.below(kinds) {
        0 => json!({"type": "null"}),
        1 => json!({"type": "boolean"}),
        2 => {
            let low = random.between(0, 2000) as i64 - 1000;
            let high = low + random.below(5000) as i64;
            json!({"type": "integer", "minimum": low, "maximum": high})
        }
        3 => {
            let low = random.between(0, 20);
            json!({"type": "string", "minLength": low / 4, "maxLength": low})
        }
        4 => {
            let words: Vec<Value> = (0..random.between(1, 4))
                .map(|number| match number % 3 {
                    0 => json!(word(random)),
                    1 => json!(number),
                    _ => json!({"a": [number, null]}),
                })
                .collect();
            json!({"enum": words})
        }
        5 => json!({"const": word(random)}),
        6 => {
            let patterns = ["^[a-z]{1,5}$", "^(ab|cd){1,3}x?$", "^[0-9]{3}-[0-9]{2}$"];
            json!({"type": "string", "pattern": random.pick(&patterns)})
        }
        7 => {
            let formats = ["date", "ipv4", "uuid"];
            json!({"type": "string", "format": random.pick(&formats)})
        }
        8 | 9 => object(random, depth - 1),
        10 => {
            let low = random.below(3);
            json!({
                "type": "array",
                "items": schema(random, depth - 1),
                "minItems": low,
                "maxItems": low + random.below(3),
            })
        }
        _ => {
            let any = (0..random.between(1, 3)).map(|_| schema(random, depth - 1));
            json!({"anyOf": any.collect::<Vec<_>>()})
        }
    }
}

fn object(random: &mut Random, depth: u32) -> Value {
    let mut properties = Map::new();
    let mut required = Vec::new();
    for _ in 0..random.below(5) {
        let name = word(random);
        properties.insert(name.clone(), schema(random, depth));
        if random.percent(60) && !required.contains(&name) {
            required.push(name);
        }
    }
    json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    })
}

fn pattern(random: &mut Random, depth: u32) -> String {
    let kinds = if depth == 0 { 5 } else { 9 };
    match random.below(kinds) {
        0 => random
            .pick(&["a", "bc", "é", "你好", r"\.", r"\n", r"\\", "/"])
            .to_owned(),
        1 => random
            .pick(&["[a-z]", "[^a-y\n]", r"\d", r"\w", "[α-ω]"])
            .to_owned(),
        2 => r"[0-9A-F]{2}".to_owned(),
        3 => ".".to_owned(),
        4 => "(x|yz)".to_owned(),
        5 | 6 => pattern(random, depth - 1) + &pattern(random, depth - 1),
        7 => {
            let (one, other) = (pattern(random, depth - 1), pattern(random, depth - 1));
            format!("({one}|{other})")
        }
        _ => {
            let (low, more) = (random.below(3), random.between(1, 3));
            let inner = pattern(random, depth - 1);
            format!("({inner}){{{low},{}}}", low + more)
        }
    }
}

/// Runs one request for each source, some of them at the same time.
async fn answers(lab: Arc<Lab>, sources: Vec<GrammarSource>) -> Vec<String> {
    let mut texts = Vec::new();
    for (number, sources) in (0..).step_by(16).zip(sources.chunks(16)) {
        let mut running = JoinSet::new();
        for (number, source) in (number..).zip(sources.to_vec()) {
            let lab = Arc::clone(&lab);
            running.spawn(async move {
                let grammar = lab.compile(source.clone()).await;
                let grammar = grammar.unwrap_or_else(|error| panic!("{source:?}: {error}"));
                let answer = lab.answer(lab.request(number, Some(grammar))).await;
                let has_stopped = answer.reason == Some(FinishReason::Stop);
                assert!(has_stopped, "{source:?}: {answer:?}");
                (number, answer.text)
            });
        }
        let mut done = running.join_all().await;
        done.sort();
        texts.extend(done.into_iter().map(|(_, text)| text));
    }
    texts
}

#[tokio::test]
async fn answers_to_random_schemas_are_valid() {
    let mut random = Random::from_env();
    let schemas: Vec<Value> = (0..count()).map(|_| schema(&mut random, 3)).collect();
    let sources = schemas
        .iter()
        .map(|schema| GrammarSource::json_schema(schema).unwrap());
    let texts = answers(Arc::new(Lab::new(1024, 6)), sources.collect()).await;
    for (schema, text) in schemas.iter().zip(texts) {
        let value: Value = serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("{schema}: {text:?}: {error}"));
        let options = jsonschema::options().should_validate_formats(true);
        let validator = options.build(schema).unwrap();
        assert!(validator.is_valid(&value), "{schema}: {text}");
    }
}

#[tokio::test]
async fn answers_to_random_expressions_match() {
    let mut random = Random::from_env();
    let patterns: Vec<String> = (0..count()).map(|_| pattern(&mut random, 4)).collect();
    let sources = patterns
        .iter()
        .map(|pattern| GrammarSource::regex(pattern).unwrap());
    let texts = answers(Arc::new(Lab::new(1024, 6)), sources.collect()).await;
    for (pattern, text) in patterns.iter().zip(texts) {
        let whole = regex::Regex::new(&format!(r"\A(?:{pattern})\z")).unwrap();
        assert!(whole.is_match(&text), "{pattern}: {text:?}");
    }
}
