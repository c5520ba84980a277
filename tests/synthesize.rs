//! All files of a synthesized checkpoint agree on the tokens.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::fs;
use std::process::Command;

use sterna::checkpoint::synthetic::SHAPES;
use sterna::checkpoint::{ModelConfig, Source};
use sterna::demo;
use sterna::synthesize::synthesize;
use sterna::text::{TextFiles, Tokenizer};

#[test]
fn special_tokens_are_those_of_the_demo() {
    let name = format!("sterna-synthesized-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    synthesize("tiny", 1, &directory).unwrap();
    let synthesized = Source::directory(&directory);
    let [(tokenizer, stops), (demos, demo_stops)] = [synthesized, demo::source()].map(text);
    fs::remove_dir_all(&directory).unwrap();

    assert_eq!(tokenizer.vocabulary(), 4096);
    assert_eq!(stops, demo_stops);
    for &stop in &stops {
        assert!(tokenizer.is_special(stop), "{stop} is a stop token");
        assert_eq!(tokenizer.token_bytes(stop), demos.token_bytes(stop));
    }
    let text = "Who are you?";
    let tokens = tokenizer.encode_prompt(text).unwrap();
    assert_eq!(tokens, demos.encode_prompt(text).unwrap());
    assert!(
        tokenizer.is_special(tokens[0]),
        "{tokens:?} begin with a special token"
    );
    assert_eq!(tokenizer.decode(&tokens, true), text);
}

#[test]
fn the_help_names_every_shape() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    let help = command.args(["synthesize", "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let names = SHAPES.map(|shape| shape.name).join(", ");
    assert!(
        help.contains(&format!("[possible values: {names}]")),
        "{help}"
    );
}

fn text(source: Source) -> (Tokenizer, Vec<u32>) {
    let config = ModelConfig::read(&source).unwrap();
    let [tokenizer, words] = ["tokenizer.json", "tokenizer_config.json"]
        .map(|name| source.read(name).unwrap().unwrap().to_vec());
    let files = TextFiles {
        tokenizer: &tokenizer,
        config: Some(&words),
        chat_template: None,
        tool_template: None,
    };
    let vocabulary = u32::try_from(config.vocab).unwrap();
    (files.load(vocabulary).unwrap().0, config.eos_tokens)
}
