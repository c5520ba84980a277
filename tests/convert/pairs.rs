//! Every pair of containers: the converted model computes the same bits and speaks the same tokens.

use std::collections::BTreeMap;
use std::path::Path;

use sterna::checkpoint::{ModelConfig, Source};
use sterna::text::Message;

use super::inputs::{demo, ones, ternary_masters};
use super::{CONTAINERS, Scratch, computed_bits, converted, fixture, out_name, text_of};

const TEXTS: [&str; 4] = [
    "The capital of France is Paris.",
    "Numbers: 1, 22, 333, 4444 and 55555; it's we'll DON'T",
    "  two spaces\n\n\tand a tab, Grüße aus Köln! 你好，世界。 e\u{301}",
    "<|eot_id|> is no control token here",
];

/// Inputs, and the containers that can hold them.
const PAIRS: [(&str, &[&str]); 24] = [
    ("bitnet-blocks", &["hf", "bin", "i2_s", "q2_0", "pq2_0"]),
    (
        "bitnet-blocks/bitnet-blocks-i2_s.gguf",
        &["hf", "bin", "i2_s", "q2_0", "pq2_0"],
    ),
    (
        "bitnet-blocks/bitnet-blocks-q2_0.gguf",
        &["hf", "bin", "i2_s", "q2_0", "pq2_0"],
    ),
    (
        "bitnet-blocks/bitnet-blocks-a.bin",
        &["hf", "bin", "i2_s", "q2_0", "pq2_0"],
    ),
    ("bitnet-blocks/bitnet-blocks-b-head.bin", &["bin"]),
    (
        "bitnet-masters-bf16/bitnet-masters-bf16-b.bin",
        &["hf", "bin"],
    ),
    ("llama-blocks/llama-blocks-b.bin", &["hf", "bin", "q2_0"]),
    (
        "embedding-qwen3/embedding-qwen3-i2_s.gguf",
        &["hf", "bin", "i2_s", "q2_0", "pq2_0"],
    ),
    ("bitnet-packed", &["hf", "bin"]),
    ("bitnet-packed-long", &["hf", "bin"]),
    ("llama-blocks", &["hf", "bin", "q2_0"]),
    (
        "llama-blocks/llama-blocks-iq2_bn.gguf",
        &["hf", "bin", "q2_0"],
    ),
    ("llama-float-modules", &["hf", "bin"]),
    ("llama-packed", &["hf", "bin"]),
    ("llama-packed-rms-norm", &["hf", "bin"]),
    ("llama-sharded", &["hf", "bin"]),
    ("qwen2-group64", &["q2_0"]),
    ("qwen2-group64/qwen2-group64-q2_0.gguf", &["q2_0"]),
    ("qwen3-group64-yarn", &["q2_0"]),
    (
        "qwen3-group128-untied/qwen3-group128-untied-ptq1_0.gguf",
        &["pq2_0"],
    ),
    ("qwen3-moe-group64", &["q2_0"]),
    ("mixtral-group64", &["q2_0"]),
    ("mixtral-group64/mixtral-group64-q2_0.gguf", &["q2_0"]),
    ("maple-row/maple-row-q2_0.gguf", &["q2_0"]),
];

/// Checks that two checkpoints are the same model.
pub(crate) fn assert_same(expected: &Path, found: &Path) {
    let shown = format!("{} and {}", expected.display(), found.display());
    let (expected, found) = (
        Source::open(expected).unwrap(),
        Source::open(found).unwrap(),
    );
    let is_stated = found.stated_i2s_order().is_some();
    assert_eq!(is_stated, found.has_i2s(), "{shown}: the order is stated");
    assert!(computed_bits(&expected) == computed_bits(&found), "{shown}");
    let stops = |source: &Source| ModelConfig::read(source).unwrap().eos_tokens;
    assert_eq!(stops(&expected), stops(&found), "{shown}");
    let ((one, template), (other, other_template)) = (text_of(&expected), text_of(&found));
    assert_eq!(template.is_some(), other_template.is_some(), "{shown}");
    for text in TEXTS {
        let tokens = one.encode_prompt(text).unwrap();
        assert_eq!(
            tokens,
            other.encode_prompt(text).unwrap(),
            "{shown}: {text:?}"
        );
        let messages = ["user", "assistant", "user"].map(|role| Message {
            role: role.into(),
            content: text.into(),
            ..Message::default()
        });
        if let (Some(template), Some(other_template)) = (&template, &other_template) {
            let tokens = template.prompt(&one, &messages, &BTreeMap::new()).unwrap();
            let others = other_template
                .prompt(&other, &messages, &BTreeMap::new())
                .unwrap();
            assert_eq!(tokens, others, "{shown}: {text:?}");
        }
    }
}

/// Converts to every container, and checks that exactly these succeed.
fn check(input: &Path, possible: &[&str]) {
    for container in CONTAINERS {
        let scratch = Scratch::new();
        let out = scratch.path(out_name(container));
        let result = converted(input, &out, container);
        let shown = format!("{} to {container}", input.display());
        match result {
            Ok(()) => {
                assert!(possible.contains(&container), "{shown} is not possible");
                assert_same(input, &out);
                let names = scratch.names();
                let expected = if container == "bin" { 2 } else { 1 };
                assert_eq!(names.len(), expected, "{shown}: {names:?}");
            }
            Err(error) => {
                assert!(!possible.contains(&container), "{shown}: {error}");
                let error = error.to_string();
                let is_named = error.contains("tensor ") || error.contains("to GGUF files only");
                assert!(is_named, "{shown}: {error}");
                assert!(scratch.names().is_empty(), "{shown}: {:?}", scratch.names());
            }
        }
    }
}

#[test]
fn a_converted_model_is_the_same_model_or_is_refused_by_a_tensor_s_name() {
    for (input, possible) in PAIRS {
        check(&fixture(input), possible);
    }
}

/// Its widths fill blocks of every layout.
#[test]
fn the_demo_is_the_same_model_in_every_container() {
    let scratch = Scratch::new();
    check(&demo(&scratch), &CONTAINERS);
}

#[test]
fn the_way_through_every_container_and_back_is_the_same_model() {
    let scratch = Scratch::new();
    let first = demo(&scratch);
    let mut last = first.clone();
    for container in ["tq1_0", "bin", "i2_s", "tq2_0", "q2_0", "pq2_0", "hf"] {
        let next = scratch.path(container);
        std::fs::create_dir(&next).unwrap();
        let next = next.join(out_name(container));
        converted(&last, &next, container).unwrap();
        last = next;
    }
    assert_same(&first, &last);
}

#[test]
fn floats_that_are_ternary_already_are_packed() {
    let scratch = Scratch::new();
    for input in [ternary_masters(&scratch), ones(&scratch)] {
        check(&input, &["hf", "bin", "i2_s", "q2_0", "pq2_0"]);
    }
}

#[test]
fn the_template_of_conversations_with_tools_is_kept() {
    let scratch = Scratch::new();
    let first = demo(&scratch);
    let folder = first.join("additional_chat_templates");
    std::fs::create_dir(&folder).unwrap();
    let template = "{% for message in messages %}{{ message.content }}{{ tools }}{% endfor %}";
    std::fs::write(folder.join("tool_use.jinja"), template).unwrap();
    for (container, next) in [("i2_s", "q2_0"), ("hf", "i2_s"), ("q2_0", "hf")] {
        let scratch = Scratch::new();
        let mut last = first.clone();
        for container in [container, next] {
            let folder = scratch.path(container);
            std::fs::create_dir(&folder).unwrap();
            let out = folder.join(out_name(container));
            converted(&last, &out, container).unwrap();
            let chat_template = text_of(&Source::open(&out).unwrap()).1.unwrap();
            assert_eq!(chat_template.tool_source(), Some(template), "{container}");
            assert_ne!(chat_template.source(), template, "{container}");
            last = out;
        }
    }
}
