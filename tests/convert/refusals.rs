//! What is refused, and the reasons that the errors give.

use std::fs;

use super::inputs::demo;
use super::{Scratch, converted, fixture, out_name};

/// Returns the error of a conversion of a fixture.
fn refusal(input: &str, container: &str) -> String {
    let scratch = Scratch::new();
    let out = scratch.path(out_name(container));
    let result = converted(&fixture(input), &out, container);
    let error = result
        .expect_err("the container cannot hold it")
        .to_string();
    assert!(scratch.names().is_empty(), "{:?}", scratch.names());
    error
}

#[test]
fn a_container_that_would_lose_something_is_refused_with_the_reason() {
    for (input, container, named) in [
        (
            "bitnet-masters-bf16",
            "hf",
            "layers.0.self_attn.q_proj.weight: its values are not ternary",
        ),
        (
            "bitnet-masters-f32",
            "i2_s",
            "layers.0.self_attn.q_proj.weight: its values are not ternary",
        ),
        (
            "embedding-gemma3/embedding-gemma3-iq2_bn.gguf",
            "i2_s",
            "models of Gemma3TextModel are not converted",
        ),
        (
            "qwen3-group64-yarn",
            "bin",
            "embed_tokens.weight: it has a scale for each group of 64",
        ),
        (
            "qwen3-group64-yarn",
            "hf",
            "embed_tokens.weight: it has a scale for each group of 64",
        ),
        (
            "qwen3-group64-yarn",
            "i2_s",
            "embed_tokens.weight: it has a scale for each group of 64",
        ),
        (
            "qwen3-group128-untied",
            "q2_0",
            "a scale for each group of 128 columns, which Q2_0",
        ),
        (
            "llama-blocks",
            "i2_s",
            "rows of 64 weights are not whole blocks of 128",
        ),
        (
            "llama-float-modules",
            "q2_0",
            "lm_head.weight: the head is ternary with one scale",
        ),
        ("llama-packed-rms-norm", "i2_s", "a norm before a linear"),
        (
            "bitnet-low-rank",
            "hf",
            "layers.0.self_attn.q_proj.lrc_U: low-rank corrections cannot be converted",
        ),
        (
            "bitnet-low-rank",
            "bin",
            "layers.0.self_attn.q_proj.lrc_U: low-rank corrections cannot be converted",
        ),
        (
            "bitnet-low-rank/bitnet-low-rank-iq2_bn.gguf",
            "q2_0",
            "blk.0.attn_q.lrc_u: low-rank corrections cannot be converted",
        ),
    ] {
        let error = refusal(input, container);
        assert!(error.contains(named), "{input} to {container}: {error}");
    }
}

#[test]
fn text_that_another_model_s_files_would_replace_is_refused() {
    let scratch = Scratch::new();
    let input = demo(&scratch);
    fs::write(scratch.path("tokenizer_config.json"), "{}").unwrap();
    let error = converted(&input, &scratch.path("out.gguf"), "tq2_0").unwrap_err();
    assert!(
        error.to_string().contains("belongs to another model"),
        "{error}"
    );
    assert_eq!(scratch.names(), ["demo", "tokenizer_config.json"]);

    // Beside its own files it may lie.
    converted(&input, &input.join("out.gguf"), "tq2_0").unwrap();
}

#[test]
fn a_damaged_input_is_refused_and_leaves_nothing() {
    let scratch = Scratch::new();
    let input = demo(&scratch);
    let weights = input.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let before = bytes.len();
    bytes.truncate(before - 1);
    fs::write(&weights, &bytes).unwrap();
    let error = converted(&input, &scratch.path("out"), "hf").unwrap_err();
    assert!(error.to_string().contains("model.safetensors"), "{error}");
    assert_eq!(scratch.names(), ["demo"]);
}
