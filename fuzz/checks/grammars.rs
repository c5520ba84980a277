//! Compiles a grammar and follows it. The first byte chooses its kind.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use sterna::constraint::{Grammar, GrammarError, GrammarSource, Grammars, MaskState};

use super::SERVER;
use crate::harness::{VOCABULARY, grammars};

/// The longest time for a grammar and its answer. The limits of a worker are far below.
const PATIENCE: Duration = Duration::from_secs(60);
/// The tokens of the answer that follows the grammar.
const TOKENS: usize = 12;
/// The token that ends the answer.
const END: u32 = 4;

static GRAMMARS: LazyLock<Grammars> =
    LazyLock::new(|| grammars::start(&SERVER.1.tokenizer, &[END]));

/// A grammar that is compiled and followed after each other grammar.
static SOUND: LazyLock<GrammarSource> =
    LazyLock::new(|| GrammarSource::regex("[a-c]{3}").expect("the expression is valid"));

/// Checks that a grammar is compiled or refused, and ends nobody but itself.
pub fn check(data: &[u8]) {
    let Some((&kind, text)) = data.split_first() else {
        return;
    };
    let Ok(text) = std::str::from_utf8(text) else {
        return;
    };
    let source = match kind % 3 {
        0 => GrammarSource::grammar(text),
        1 => GrammarSource::regex(text),
        _ => match serde_json::from_str(text) {
            Ok(schema) => GrammarSource::json_schema(&schema),
            Err(_) => return,
        },
    };
    if let Ok(source) = source {
        match compile(1, source) {
            Ok(grammar) => drop(follow(&grammar, text.len())),
            Err(GrammarError::Busy | GrammarError::NoProcess(_)) => panic!("nothing else runs"),
            Err(_) => {}
        }
    }
    let sound = compile(2, SOUND.clone());
    let ended = follow(&sound.expect("other grammars are compiled"), 0);
    assert!(ended.is_none(), "another answer ended: {ended:?}");
}

fn compile(tenant: u32, source: GrammarSource) -> Result<Grammar, GrammarError> {
    SERVER.0.block_on(GRAMMARS.compile(tenant, source))
}

/// Draws some tokens that the grammar allows. Returns why the answer ended early, if it did.
fn follow(grammar: &Grammar, mut choice: usize) -> Option<String> {
    let output = grammar.begin(&[END]);
    let began = Instant::now();
    for place in 0..TOKENS {
        while !output.is_ready() {
            assert!(began.elapsed() < PATIENCE, "a mask never comes");
            std::thread::yield_now();
        }
        let MaskState::Ready(mask) = output.masks().at(place) else {
            let why = output.masks().failure().expect("a dead end has a reason");
            return Some(why.to_owned());
        };
        let mut logits = vec![0.0; VOCABULARY as usize];
        mask.apply(&mut logits);
        let allowed: Vec<u32> = (0..)
            .zip(&logits)
            .filter(|(_, logit)| **logit == 0.0)
            .map(|(token, _)| token)
            .collect();
        let token = *allowed.get(choice % allowed.len().max(1))?;
        choice = choice.wrapping_mul(31).wrapping_add(7);
        if token == END {
            return None;
        }
        output.drawn(token);
    }
    None
}
