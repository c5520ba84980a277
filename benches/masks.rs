//! Measures what the process of a grammar adds to the time of a mask.
//!
//! `cargo bench --bench masks` prints, for each grammar, the median time from a drawn token until
//! its next mask is there, beside the worker's own processor time for this mask. The difference is
//! what the mask waits for on its way: two threads that wake, and two messages. A server that
//! called the library in a thread of its own would still wait for one of these threads.
//! `-- --model=DIR` takes the vocabulary of this checkpoint instead of the demo's. The program
//! exits with 1 if a median difference is beyond its limit.
//! Without `--bench`, as in `cargo test --benches`, everything runs once and prints nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna::constraint::{
    ConstrainedOutput, GrammarOptions, GrammarSource, Grammars, MaskState, TokenMasks,
};
use sterna::text::{TextFiles, Tokenizer};
use sterna_random::Random;

const DEMO: &[u8] = include_bytes!("../src/demo/tokenizer.json");
const MASKS: usize = 200;
const MAX_EXTRA: Duration = Duration::from_micros(50);
const END: u32 = 0;
const TENANT: u32 = 1;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let smoke = !arguments.iter().any(|argument| argument == "--bench");
    let model = arguments
        .iter()
        .find_map(|argument| argument.strip_prefix("--model="));
    let (tokenizer, vocabulary) = tokenizer(model);
    let options = GrammarOptions {
        program: &PathBuf::from(env!("CARGO_BIN_EXE_sterna")),
        end_tokens: &[END],
        masks_at_once: 1,
        compilations_at_once: 1,
    };
    let grammars = Grammars::start(tokenizer, &options, || false, |_, _| ());
    let mut missed = 0;
    for (name, source) in sources() {
        let grammar = grammars.compile(TENANT, source).await;
        let grammar = grammar.expect("the grammar is valid");
        let mut times = Vec::new();
        let mut random = Random::new(7);
        while times.len() < if smoke { 1 } else { MASKS } {
            let output = grammar.begin(&[END]);
            times.extend(follow(&output, &grammars, vocabulary, &mut random));
        }
        let [took, own, extra] = medians(&times);
        if !smoke {
            println!(
                "{name}: {took:?} until the mask is there, {own:?} of the worker, {extra:?} more \
                 (at most {MAX_EXTRA:?}); {} masks",
                times.len()
            );
            missed += usize::from(extra > MAX_EXTRA);
        }
    }
    ExitCode::from(u8::from(missed > 0))
}

/// Returns the tokenizer of a model, or of the demo, and the number of its tokens.
fn tokenizer(model: Option<&str>) -> (Arc<Tokenizer>, u32) {
    let json = model.map_or(DEMO.to_vec(), |folder| {
        let path = Path::new(folder).join("tokenizer.json");
        fs::read(path).expect("the model has a tokenizer")
    });
    let parsed: Value = serde_json::from_slice(&json).expect("it is JSON");
    let words = parsed["model"]["vocab"].as_object();
    let ids = words.into_iter().flat_map(|words| words.values());
    let added = parsed["added_tokens"].as_array().into_iter().flatten();
    let ids = ids.chain(added.map(|token| &token["id"]));
    let last = ids.filter_map(Value::as_u64).max().expect("it has tokens");
    let vocabulary = last as u32 + 1;
    let files = TextFiles {
        tokenizer: &json,
        config: None,
        chat_template: None,
        tool_template: None,
    };
    let loaded = files.load(vocabulary).expect("the tokenizer is valid");
    (Arc::new(loaded.0), vocabulary)
}

fn sources() -> [(&'static str, GrammarSource); 3] {
    let list = json!({"type": "array", "minItems": 20, "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["name", "count"],
    }});
    [
        ("schema", GrammarSource::json_schema(&list)),
        ("expression", GrammarSource::regex("([a-z]{2,8} ){50,90}")),
        ("letters", GrammarSource::regex("[a-c]{300}")),
    ]
    .map(|(name, source)| (name, source.expect("it is within the budgets")))
}

/// Draws allowed tokens at random until the grammar ends. Returns the time of each mask until it is
/// there, and the worker's processor time for it.
fn follow(
    output: &ConstrainedOutput,
    grammars: &Grammars,
    vocabulary: u32,
    random: &mut Random,
) -> Vec<(Duration, Duration)> {
    let mut times = Vec::new();
    for place in 0..300 {
        let Some(token) = allowed(output.masks(), place, vocabulary, random) else {
            break;
        };
        let (began, before) = (Instant::now(), of_masks(grammars));
        output.drawn(token);
        while !output.is_ready() {
            std::thread::yield_now();
        }
        let took = began.elapsed();
        let own = of_masks(grammars) - before;
        // A mask after a forced token was known before.
        if !own.is_zero() {
            times.push((took, own));
        }
    }
    times
}

/// Returns one of the tokens that the mask of a place allows, except the end.
fn allowed(masks: &TokenMasks, place: usize, vocabulary: u32, random: &mut Random) -> Option<u32> {
    let MaskState::Ready(mask) = masks.at(place) else {
        return None;
    };
    let mut logits = vec![0.0_f32; vocabulary as usize];
    mask.apply(&mut logits);
    let tokens = (0..vocabulary).filter(|token| *token != END && logits[*token as usize] == 0.0);
    let tokens: Vec<u32> = tokens.collect();
    (!tokens.is_empty()).then(|| random.pick(&tokens))
}

/// Returns the processor time of all masks so far.
fn of_masks(grammars: &Grammars) -> Duration {
    let times = grammars.usage().times;
    let own = times.iter().find(|(tenant, _)| *tenant == TENANT);
    own.map_or(Duration::ZERO, |(_, [_, masks])| *masks)
}

/// Returns the medians of the times, of the worker's times and of the differences.
fn medians(times: &[(Duration, Duration)]) -> [Duration; 3] {
    let median = |mut all: Vec<Duration>| {
        all.sort_unstable();
        all[all.len() / 2]
    };
    [
        median(times.iter().map(|(took, _)| *took).collect()),
        median(times.iter().map(|(_, own)| *own).collect()),
        median(
            times
                .iter()
                .map(|(took, own)| took.saturating_sub(*own))
                .collect(),
        ),
    ]
}
