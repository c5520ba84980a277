//! Mistakes that let a user's text become a control token. The tests of `src/text` must find them.

use super::copies::{Copy, Mutant};

/// The features are the same as in the workspace's manifest.
const MANIFEST: &str = r#"
[package]
name = "sterna-text"
version = "0.0.0"
edition = "2024"
[profile.dev]
debug = false
[dependencies]
aho-corasick = "1"
chrono = { version = "0.4", default-features = false, features = ["alloc"] }
minijinja = { version = "3", default-features = false, features = [
    "adjacent_loop_items", "builtins", "fuel", "json", "loop_controls", "macros", "multi_template",
    "preserve_order", "serde", "std_collections",
] }
minijinja-contrib = { version = "3", default-features = false, features = ["pycompat"] }
serde = { version = "1", features = ["derive"] }
serde_json = { version = "1", features = ["float_roundtrip", "preserve_order", "raw_value"] }
tokenizers = { version = "0.23", default-features = false, features = ["fancy-regex"] }
"#;

const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "model-makes-control-tokens",
        file: "text/tokenizer/split.rs",
        original: "        if clean {",
        mistake: "        if clean || true {",
    },
    Mutant {
        name: "no-split-after-the-first-cut",
        file: "text/tokenizer/split.rs",
        original: ".filter(|index| self.is_forbidden(text, &encoding, *index))",
        mistake: ".filter(|at| cuts_left == MAX_CUTS && self.is_forbidden(text, &encoding, *at))",
    },
    Mutant {
        name: "messages-not-hidden",
        file: "text/chat_template/mod.rs",
        original: "content: hide(&self.content),",
        mistake: "content: self.content.clone(),",
    },
    Mutant {
        name: "tools-not-hidden",
        file: "text/chat_template/placeholders.rs",
        original: "Value::String(text) => self.hide(text).into(),",
        mistake: "Value::String(_) => value.clone(),",
    },
    Mutant {
        name: "names-in-tools-not-hidden",
        file: "text/chat_template/placeholders.rs",
        original: "self.hide(key)",
        mistake: "key.clone()",
    },
    Mutant {
        name: "calls-not-hidden",
        file: "text/chat_template/mod.rs",
        original: "tool_calls: calls.map(|call| placeholders.hide_json(call)).collect(),",
        mistake: "tool_calls: calls.cloned().collect(),",
    },
    Mutant {
        name: "template-text-not-compared",
        file: "text/chat_template/mod.rs",
        original: "        if only_the_templates_own {",
        mistake: "        if only_the_templates_own || true {",
    },
    Mutant {
        name: "control-tokens-in-arguments",
        file: "text/chat_template/mod.rs",
        original: "if controls.occur_in(text)) {",
        mistake: "if false && controls.occur_in(text)) {",
    },
    Mutant {
        name: "only-special-tokens",
        file: "text/control_tokens/mod.rs",
        original: "token.special || has_control_form(text) || (is_bracketed(text) && written())",
        mistake: "token.special || (is_bracketed(text) && written() && has_control_form(\"\"))",
    },
    Mutant {
        name: "named-tokens-forgotten",
        file: "text/tokenizer/mod.rs",
        original: ".zip(texts).chain(named)",
        mistake: ".zip(texts).chain(named.into_iter().take(0))",
    },
];

const COPY: Copy = Copy {
    name: "text",
    folders: &[("src/text", "src/text"), ("tests/jinja", "tests/jinja")],
    root: Some("pub mod text;\n"),
    manifest: MANIFEST,
    tests: &["--lib", "--"],
    filters: &["control", "argument"],
    variables: &[],
};

#[test]
fn every_mutant_of_text_has_its_place() {
    COPY.has_the_place_of_each(MUTANTS);
}

#[test]
fn the_tests_of_text_catch_the_chosen_mutants() {
    let mutants = COPY.chosen(MUTANTS);
    if mutants.is_empty() {
        return;
    }
    COPY.passes_without_mistakes();
    for mutant in mutants {
        COPY.report_of_failure(mutant);
    }
}
