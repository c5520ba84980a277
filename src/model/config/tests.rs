//! Tests of reading `config.json` and its companions.

use serde_json::{Value, json};

use super::stop_tokens::token_id;
use super::{ModelConfig, RopeScaling, StoredWeights};
use crate::model::architecture::{Activation, BITNET, LLAMA, ScaleDirection};
use crate::model::checkpoint::{LoadError, Source};

/// Reads the relevant part of the published configuration of 2B-4T, with `changes` applied to it.
/// A null removes a field.
fn read(changes: &Value) -> Result<ModelConfig, LoadError> {
    let mut config = json!({
        "architectures": ["BitNetForCausalLM"], "bos_token_id": 128_000, "eos_token_id": 128_001,
        "hidden_act": "relu2", "hidden_size": 2560, "intermediate_size": 6912,
        "max_position_embeddings": 4096, "num_attention_heads": 20, "num_hidden_layers": 30,
        "num_key_value_heads": 5, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "tie_word_embeddings": true, "vocab_size": 128_256,
        "quantization_config": {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
        },
    });
    for (key, value) in changes.as_object().unwrap() {
        config.as_object_mut().unwrap().shift_remove(key);
        if !value.is_null() {
            config[key] = value.clone();
        }
    }
    let files = [
        ("config.json", config),
        (
            "generation_config.json",
            json!({"eos_token_id": [128_001, 128_008]}),
        ),
        (
            "tokenizer_config.json",
            json!({
                "eos_token": "<|eot_id|>",
                "added_tokens_decoder": {"128009": {"content": "<|eot_id|>"}},
            }),
        ),
    ];
    ModelConfig::read(&Source::in_memory(
        files.map(|(name, json)| (name.to_owned(), json.to_string().into_bytes())),
    ))
}

fn check_refused(changes: &Value, named: &str) {
    let error = read(changes).expect_err(named).to_string();
    assert!(error.contains(named), "{changes}: {error}");
}

#[test]
fn the_published_configuration_is_understood() {
    let config = read(&json!({})).unwrap();
    assert_eq!(
        (config.head_dim, config.group(), config.rope_theta),
        (128, 4, 500_000.0)
    );
    assert_eq!(config.quantization.scale, ScaleDirection::Multiply);
    assert!(
        config.tied
            && config.quantization.stored == StoredWeights::Packed
            && config.is_float("lm_head")
    );
    assert!(!config.is_float("model.layers.0.mlp.up_proj"));
    assert_eq!(
        config.eos_tokens,
        [128_001, 128_008, 128_009],
        "the union of three files"
    );
}

#[test]
fn a_token_is_looked_up_in_the_added_tokens_then_in_the_vocabulary() {
    let id = |token, json: Value| token_id(token, json.to_string().as_bytes()).unwrap();
    let both =
        json!({"added_tokens": [{"id": 7, "content": "a"}], "model": {"vocab": {"a": 1, "b": 2}}});
    assert_eq!(id("a", both.clone()), Some(7));
    assert_eq!(id("b", both.clone()), Some(2));
    assert_eq!(id("c", both), None);
    assert_eq!(
        id(
            "b",
            json!({"added_tokens": null, "model": {"vocab": {"b": 2}}})
        ),
        Some(2)
    );
    assert_eq!(id("b", json!({"model": {"vocab": [["b", -1.5]]}})), None);
    assert!(token_id("a", b"{\"added_tokens\": [], ").is_err());
}

#[test]
fn the_rope_fields_of_both_transformers_versions_are_understood() {
    let rope = json!({"rope_theta": 10_000.0, "rope_type": "default"});
    let new = json!({"rope_theta": null, "rope_parameters": rope});
    assert_eq!(read(&new).unwrap().rope_theta, 10_000.0);
    assert_eq!(
        read(&json!({"rope_scaling": {"type": "default"}}))
            .unwrap()
            .rope_theta,
        500_000.0
    );
}

#[test]
fn a_rope_object_may_name_its_type_twice() {
    let both = json!({"rope_scaling": {"type": "default", "rope_type": "default"}});
    assert_eq!(read(&both).unwrap().rope_theta, 500_000.0);
    check_refused(
        &json!({"rope_scaling": {"type": "default", "rope_type": "dynamic"}}),
        "dynamic",
    );
    check_refused(&json!({"rope_scaling": {"type": "linear"}}), "factor");
}

#[test]
fn scaled_rotations_are_read_with_their_defaults() {
    let scaling = |changes: &Value| {
        read(&json!({"rope_scaling": changes}))
            .unwrap()
            .rope_scaling
    };
    let linear = json!({"type": "linear", "factor": 2.0});
    assert_eq!(scaling(&linear), RopeScaling::Linear { factor: 2.0 });
    let yarn = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
    });
    let expected = RopeScaling::Yarn {
        factor: 4.0,
        original: 1024.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 0.1 * 4_f64.ln() + 1.0,
    };
    assert_eq!(scaling(&yarn), expected);
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    });
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        original: 4096.0,
        low: 1.0,
        high: 4.0,
    };
    assert_eq!(scaling(&llama3), expected);
    let factor = |yarn: &Value| json!({"rope_scaling": yarn});
    for wrong in [json!(0), json!(-1), json!("x")] {
        let yarn = json!({"rope_type": "yarn", "factor": wrong});
        check_refused(&factor(&yarn), "factor must be a positive number");
    }
    let yarn = json!({"rope_type": "yarn", "factor": 2, "mscale": 1});
    check_refused(&factor(&yarn), "mscale");
    let short = json!({"rope_type": "longrope", "short_factor": [1.0]});
    check_refused(&factor(&short), "short_factor must be a list of 64");
}

#[test]
fn a_base_inside_the_rope_object_overrides_the_one_beside_it() {
    let theta = |changes: &Value| read(changes).unwrap().rope_theta;
    let inside = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
    assert_eq!(theta(&json!({"rope_scaling": inside(1e4)})), 1e4);
    let both = json!({"rope_scaling": inside(1e4), "rope_parameters": inside(2e4)});
    assert_eq!(theta(&both), 1e4, "rope_scaling comes first");
    let other = json!({"rope_scaling": {"rope_type": "default"}, "rope_parameters": inside(2e4)});
    assert_eq!(theta(&other), 500_000.0, "only one object counts");
    let empty = json!({"rope_scaling": {}, "rope_parameters": inside(2e4)});
    assert_eq!(theta(&empty), 2e4);
}

#[test]
fn a_family_may_be_named_by_its_model_type() {
    let family = |model_type: &str| {
        let changes = json!({"architectures": null, "model_type": model_type});
        read(&changes).unwrap().architecture
    };
    assert_eq!(family("bitnet"), &BITNET);
    assert_eq!(family("llama"), &LLAMA);
    check_refused(
        &json!({"architectures": null, "model_type": "mistral"}),
        "mistral",
    );
    check_refused(&json!({"architectures": null}), "architectures");
}

#[test]
fn swish_is_silu_and_only_llama_has_feed_forward_biases() {
    let swish = read(&json!({"hidden_act": "swish"})).unwrap();
    assert_eq!(swish.activation, Activation::Silu);
    assert!(read(&json!({"mlp_bias": true})).is_ok());
    check_refused(
        &json!({"architectures": ["LlamaForCausalLM"], "mlp_bias": true}),
        "mlp_bias",
    );
}

#[test]
fn values_that_would_make_every_activation_nan_are_refused() {
    for eps in [-1e-5, 1e300] {
        check_refused(&json!({"rms_norm_eps": eps}), "rms_norm_eps");
        let quantization =
            json!({"quant_method": "bitnet", "use_rms_norm": true, "rms_norm_eps": eps});
        check_refused(
            &json!({"tie_word_embeddings": false, "quantization_config": quantization}),
            "quantization_config.rms_norm_eps",
        );
    }
    assert!(read(&json!({"rms_norm_eps": 0.0})).is_ok());
    for theta in [-1e4, 0.0, 1e-320, 1e-40, 1e39] {
        check_refused(&json!({"rope_theta": theta}), "rope_theta");
    }
}

#[test]
fn unsupported_settings_are_refused_by_field() {
    check_refused(&json!({"rope_theta": null}), "rope_theta");
    check_refused(
        &json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
        "rope_scaling",
    );
    check_refused(&json!({"rope_scaling": {"factor": 8.0}}), "rope_scaling");
    check_refused(
        &json!({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}),
        "rope_parameters",
    );
    check_refused(
        &json!({"architectures": ["MistralForCausalLM"]}),
        "architectures",
    );
    check_refused(&json!({"attention_bias": true}), "attention_bias");
    check_refused(&json!({"hidden_act": "gelu"}), "gelu");
    check_refused(&json!({"quantization_config": null}), "quantization_config");
    check_refused(
        &json!({"quantization_config": {"quant_method": "awq"}}),
        "quant_method",
    );
    check_refused(&json!({"num_key_value_heads": 3}), "num_key_value_heads");
    check_refused(&json!({"head_dim": 64}), "head_dim");
    check_refused(&json!({"head_dim": 512}), "at most 256; got 512");
    check_refused(&json!({"vocab_size": null}), "vocab_size");
    check_refused(&json!({"hidden_size": 0, "head_dim": 128}), "hidden_size");
}

#[test]
fn modules_that_stay_float_are_matched_at_boundaries() {
    let modules = json!({
        "quant_method": "bitnet",
        "modules_to_not_convert": ["model.layers.1", "down_proj", "lm_head"],
    });
    let config = read(&json!({"quantization_config": modules})).unwrap();
    assert!(config.is_float("model.layers.1.mlp.up_proj"));
    assert!(!config.is_float("model.layers.11.mlp.up_proj"));
    assert!(config.is_float("model.layers.11.mlp.down_proj"));
    assert_eq!(
        config.quantization.scale,
        ScaleDirection::Divide,
        "the default"
    );
}

#[test]
fn a_ternary_head_cannot_be_tied() {
    let quantization = json!({"quant_method": "bitnet", "modules_to_not_convert": []});
    check_refused(&json!({"quantization_config": quantization}), "lm_head");
}
