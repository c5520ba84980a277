//! Golden tokens are the greedy answers of the input.

use std::fs;

use serde_json::Value;
use sterna::bench::DEMO_ANSWERS;
use sterna::checkpoint::Source;
use sterna::checkpoint::convert::Watch;
use sterna::convert::convert;
use sterna_scheduler::{Batch, PAGE_TOKENS, Page, SequenceId, TokenId};

use super::inputs::demo;
use super::{Scratch, flags, load};

fn tokens(value: &Value) -> Vec<TokenId> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Computes a greedy answer, the whole text again for each token.
fn greedy(source: &Source, prompt: &[TokenId], count: usize) -> Vec<TokenId> {
    let mut model = load(source).unwrap();
    let vocab = model.config().vocab;
    let mut text = prompt.to_vec();
    for _ in 0..count {
        let pages = (0..).map(Page::new).take(text.len().div_ceil(PAGE_TOKENS));
        let pages: Vec<Page> = pages.collect();
        let mut kv = model.new_kv_store(pages.len()).unwrap();
        let (mut batch, mut logits) = (Batch::new(), vec![0.0; vocab]);
        batch.push_row(SequenceId::new(0, 0), 0, &text, &pages, 1);
        model.forward(&batch, &mut kv).copy_row(0, &mut logits);
        let largest = logits.iter().copied().fold(f32::MIN, f32::max);
        let best = logits.iter().position(|logit| *logit == largest).unwrap();
        text.push(best as TokenId);
    }
    text.split_off(prompt.len())
}

#[test]
fn golden_tokens_are_the_greedy_answers_of_the_input() {
    let scratch = Scratch::new();
    let input = demo(&scratch);
    let source = Source::open(&input).unwrap();
    let prompts = scratch.path("prompts.txt");
    fs::write(&prompts, "User:\nWho are you?\n\n").unwrap();
    let given = format!("--golden={}", prompts.display());
    for (name, container, flag, cases) in [
        ("out", "hf", "--golden", 4),
        ("gguf/out.gguf", "tq2_0", given.as_str(), 2),
    ] {
        let out = scratch.path(name);
        fs::create_dir_all(out.parent().unwrap()).unwrap();
        convert(&flags(&input, &out, container, &[flag]), &Watch::hidden()).unwrap();
        let directory = if container == "hf" {
            &out
        } else {
            out.parent().unwrap()
        };
        let file = fs::read(directory.join("sterna_golden.json")).unwrap();
        let golden: Value = serde_json::from_slice(&file).unwrap();
        assert_eq!(golden["version"], 1);
        assert_eq!(golden["weights_sha256"].as_str().unwrap().len(), 64);
        let found = golden["cases"].as_array().unwrap();
        assert_eq!(found.len(), cases);
        for case in found {
            let (prompt, answer) = (tokens(&case["prompt_tokens"]), tokens(&case["tokens"]));
            assert_eq!(answer.len(), 16);
            assert_eq!(answer, greedy(&source, &prompt, answer.len()));
        }
    }
    // The greedy run of this test itself agrees with the reference.
    let (prompt, answer) = DEMO_ANSWERS[0];
    assert_eq!(greedy(&source, prompt, answer.len()), answer);
}

#[test]
fn golden_tokens_of_another_model_are_not_replaced_without_force() {
    let scratch = Scratch::new();
    let input = demo(&scratch);
    fs::write(scratch.path("sterna_golden.json"), "{}").unwrap();
    let flags = flags(&input, &scratch.path("out.gguf"), "tq2_0", &["--golden"]);
    let error = convert(&flags, &Watch::hidden()).unwrap_err();
    assert!(
        error.to_string().contains("sterna_golden.json: it exists"),
        "{error}"
    );
    assert_eq!(scratch.names(), ["demo", "sterna_golden.json"]);
}
