//! Tests of reading `config.json` and its companions.

use serde_json::{Value, json};

use super::stop_tokens::token_id;
use super::{CommittedAttention, MaskedBlocks, ModelConfig, Pooling, RopeScaling, StoredWeights};
use crate::checkpoint::architecture::{
    Activation, BITNET, BITNET_GEMMA3, LLAMA, QWEN3_5, ScaleDirection,
};
use crate::checkpoint::{LoadError, Source};

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
fn masked_blocks_are_read_as_far_as_they_are_stated() {
    let blocks = |size, token| {
        Some(MaskedBlocks {
            size: Some(size),
            mask_token: Some(token),
            committed_attention: CommittedAttention::Causal,
        })
    };
    let read_blocks = |json: Value| read(&json).unwrap().masked_blocks;
    assert_eq!(read_blocks(json!({})), None);
    assert_eq!(
        read_blocks(json!({"block_size": 1024})),
        None,
        "of another kind"
    );
    let whole = json!({"block_size": 32, "mask_token_id": 7, "committed_attention": "causal"});
    assert_eq!(read_blocks(whole.clone()), blocks(32, 7));
    for (field, value, problem) in [
        (
            "committed_attention",
            json!(null),
            "committed_attention: missing",
        ),
        (
            "committed_attention",
            json!("windowed"),
            "unknown variant `windowed`",
        ),
        ("block_size", json!(1), "block_size: must be between"),
        ("block_size", json!(257), "block_size: must be between"),
        (
            "mask_token_id",
            json!(128_256),
            "mask_token_id: must be one of the 128256",
        ),
    ] {
        let mut changed = whole.clone();
        changed[field] = value;
        check_refused(&changed, problem);
    }
}

#[test]
fn masked_blocks_of_fast_dllm_have_a_file_of_their_own() {
    let read_blocks = |files: &[(&str, Value)]| {
        let config = read_qwen3("Qwen3ForCausalLM", files);
        config.unwrap().masked_blocks.unwrap()
    };
    let file = json!({"bd_size": 8, "mask_token_id": 9, "committed_attention": "causal"});
    let expected = MaskedBlocks {
        size: Some(8),
        mask_token: Some(9),
        committed_attention: CommittedAttention::Causal,
    };
    assert_eq!(read_blocks(&[("dlm_config.json", file)]), expected);
    let published = [(
        "dlm_config.json",
        json!({"bd_size": 32, "mask_token_id": 9}),
    )];
    let attention = read_blocks(&published).committed_attention;
    assert_eq!(attention, CommittedAttention::BlockCausal);
    let partial = read_blocks(&[("dlm_config.json", json!({}))]);
    assert_eq!(
        (partial.size, partial.mask_token),
        (None, None),
        "flags say it"
    );
    // It would be computed as causal.
    let error = read_qwen3("Qwen3Model", &published).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("committed_attention: must be causal"),
        "{error}"
    );
    let added = json!({"<|im_end|>": 3, "|<MASK>|": 11});
    let files = [
        ("dlm_config.json", json!({"bd_size": 32})),
        ("added_tokens.json", added),
    ];
    assert_eq!(read_blocks(&files).mask_token, Some(11));
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

/// Returns the configuration of a checkpoint of Qwen 3 with further files.
fn read_qwen3(class: &str, files: &[(&str, Value)]) -> Result<ModelConfig, LoadError> {
    let config = json!({
        "architectures": [class], "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
        "max_position_embeddings": 32_768, "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rope_theta": 1e6, "tie_word_embeddings": true,
        "vocab_size": 151_936, "hidden_act": "silu",
    });
    let files = files.iter().cloned().chain([("config.json", config)]);
    ModelConfig::read(&Source::in_memory(
        files.map(|(name, json)| (name.to_owned(), json.to_string().into_bytes())),
    ))
}

#[test]
fn a_class_without_a_head_computes_embeddings() {
    let config = read_qwen3("Qwen3ForCausalLM", &[]).unwrap();
    assert_eq!(
        (config.has_head, config.pooling),
        (true, Pooling::LastToken)
    );
    let config = read_qwen3("Qwen3Model", &[]).unwrap();
    assert_eq!(
        (config.has_head, config.pooling),
        (false, Pooling::LastToken)
    );
    let error = read_qwen3("Qwen3ForTokens", &[]).unwrap_err().to_string();
    assert!(
        error.contains("Qwen3ForCausalLM or Qwen3Model or"),
        "{error}"
    );
}

#[test]
fn the_files_of_sentence_transformers_state_the_pooling() {
    let pooling = |mode: &str| {
        let statement =
            json!({"word_embedding_dimension": 1024, "include_prompt": true, mode: true});
        let statement = ("1_Pooling/config.json", statement);
        read_qwen3("Qwen3Model", &[statement]).map(|config| config.pooling)
    };
    assert_eq!(
        pooling("pooling_mode_lasttoken").unwrap(),
        Pooling::LastToken
    );
    assert_eq!(pooling("pooling_mode_mean_tokens").unwrap(), Pooling::Mean);
    let error = pooling("pooling_mode_cls_token").unwrap_err().to_string();
    assert!(
        error.contains("1_Pooling/config.json") && error.contains("got cls_token"),
        "{error}"
    );
    let module = |path: &str, kind: &str| {
        let kind = format!("sentence_transformers.models.{kind}");
        json!({"idx": 0, "name": "0", "path": path, "type": kind})
    };
    let known = [("", "Transformer"), ("pool", "Pooling"), ("2", "Normalize")];
    let known = known.map(|(path, kind)| module(path, kind));
    let mean = (
        "pool/config.json",
        json!({"pooling_mode_mean_tokens": true}),
    );
    let config = read_qwen3(
        "Qwen3Model",
        &[("modules.json", json!(known)), mean.clone()],
    );
    assert_eq!(config.unwrap().pooling, Pooling::Mean);
    let modules = json!([known[0], known[1], module("3", "Dense")]);
    let error = read_qwen3("Qwen3Model", &[("modules.json", modules), mean]).unwrap_err();
    assert!(error.to_string().contains("models.Dense"), "{error}");
}

/// Reads the relevant part of the configuration of a Gemma 3 model of 270 million parameters, with
/// `changes` applied to it. A null removes a field.
fn read_gemma3(changes: &Value) -> Result<ModelConfig, LoadError> {
    let mut config = json!({
        "architectures": ["Gemma3TextModel"], "hidden_size": 640, "intermediate_size": 2048,
        "head_dim": 256, "max_position_embeddings": 32_768, "num_attention_heads": 4,
        "num_hidden_layers": 18, "num_key_value_heads": 1, "vocab_size": 262_144,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6, "sliding_window": 512, "_sliding_window_pattern": 6,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "attn_logit_softcapping": null, "final_logit_softcapping": null,
        "use_bidirectional_attention": false,
    });
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    let file = ("config.json".to_owned(), config.to_string().into_bytes());
    ModelConfig::read(&Source::in_memory([file]))
}

#[test]
fn both_forms_of_the_configuration_of_gemma_are_understood() {
    let config = read_gemma3(&json!({})).unwrap();
    assert_eq!(*config.architecture, BITNET_GEMMA3);
    assert_eq!(config.activation, Activation::GeluTanh);
    assert_eq!((config.rope_theta, config.query_factor), (1e6, 1.0));
    assert!(!config.has_head && config.tied);
    let local = config.local.as_ref().unwrap();
    assert_eq!((local.rope_theta, local.window), (1e4, 512));
    let all: Vec<usize> = (0..18).filter(|layer| !local.is_local[*layer]).collect();
    assert_eq!(all, [5, 11, 17], "each sixth layer attends to all tokens");
    assert_eq!(config.max_position, 32_768);
    let older = json!({
        "rope_parameters": null, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "rope_scaling": null,
    });
    assert_eq!(read_gemma3(&older).unwrap(), config);
    let linear = json!({
        "rope_parameters": null, "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    });
    let linear = read_gemma3(&linear).unwrap();
    assert_eq!(linear.rope_scaling, RopeScaling::Linear { factor: 8.0 });
    let types = json!({"layer_types": vec!["full_attention"; 18], "query_pre_attn_scalar": 64});
    let config = read_gemma3(&types).unwrap();
    assert_eq!((config.local, config.max_position), (None, 32_768));
    assert_eq!(config.query_factor, 2.0);
}

#[test]
fn what_gemma_does_not_compute_here_is_refused_by_name() {
    for (changes, named) in [
        (
            json!({"use_bidirectional_attention": true}),
            "use_bidirectional_attention",
        ),
        (
            json!({"attn_logit_softcapping": 50.0}),
            "attn_logit_softcapping",
        ),
        (
            json!({"final_logit_softcapping": 30.0}),
            "final_logit_softcapping",
        ),
        (json!({"query_pre_attn_scalar": 0}), "query_pre_attn_scalar"),
        (json!({"sliding_window": 0}), "sliding_window"),
        (
            json!({"num_hidden_layers": 1_u64 << 60}),
            "num_hidden_layers",
        ),
        (json!({"layer_types": ["full_attention"]}), "layer_types"),
        (
            json!({"layer_types": vec!["chunked_attention"; 18]}),
            "chunked_attention",
        ),
        (json!({"hidden_activation": "gelu"}), "gelu"),
        (json!({"attention_bias": true}), "attention_bias"),
        (
            json!({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}}),
            "sliding_attention",
        ),
    ] {
        let error = read_gemma3(&changes).expect_err(named).to_string();
        assert!(error.contains(named), "{changes}: {error}");
    }
}

/// Reads the relevant part of the configuration of Qwen3.5-2B, with `changes` applied to it. A null
/// removes a field.
fn read_qwen3_5(changes: &Value) -> Result<ModelConfig, LoadError> {
    let mut config = json!({
        "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
        "head_dim": 256, "max_position_embeddings": 262_144, "num_attention_heads": 8,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "vocab_size": 248_320,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
        "attn_output_gate": true, "mamba_ssm_dtype": "float32", "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": true,
        },
    });
    for (key, value) in changes.as_object().unwrap() {
        config.as_object_mut().unwrap().shift_remove(key);
        if !value.is_null() {
            config[key] = value.clone();
        }
    }
    let file = ("config.json".to_owned(), config.to_string().into_bytes());
    ModelConfig::read(&Source::in_memory([file]))
}

#[test]
fn the_configuration_of_qwen_3_5_is_understood() {
    let config = read_qwen3_5(&json!({})).unwrap();
    assert_eq!(*config.architecture, QWEN3_5);
    assert_eq!((config.rope_theta, config.rotary_dim), (1e7, 64));
    assert_eq!(config.attention_layers(), 6);
    let recurrent = config.recurrent.as_ref().unwrap();
    let attention: Vec<usize> = (0..24)
        .filter(|layer| !recurrent.is_recurrent[*layer])
        .collect();
    assert_eq!(
        attention,
        [3, 7, 11, 15, 19, 23],
        "each fourth layer attends"
    );
    assert_eq!((recurrent.group(), recurrent.taps), (1, 4));
    assert_eq!(recurrent.state_bytes(), 18 * 16 * 128 * 128 * 4);
    let missing = json!({
        "full_attention_interval": null, "attn_output_gate": null, "mamba_ssm_dtype": null,
        "rope_parameters": null,
    });
    assert_eq!(
        read_qwen3_5(&missing).unwrap(),
        config,
        "the defaults are these"
    );
    let types: Vec<&str> = (1..=24)
        .map(|layer| {
            if layer % 4 == 0 {
                "full_attention"
            } else {
                "linear_attention"
            }
        })
        .collect();
    assert_eq!(
        read_qwen3_5(&json!({"layer_types": types})).unwrap(),
        config
    );
}

#[test]
fn sizes_of_recurrent_layers_are_refused_by_name() {
    for field in [
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    ] {
        for (value, named) in [
            (Value::Null, format!("missing field `{field}`")),
            (json!(0), format!("{field}: must be")),
            (json!(1_u64 << 40), format!("{field}: must be")),
        ] {
            let error = read_qwen3_5(&json!({field: value}))
                .expect_err(field)
                .to_string();
            assert!(error.contains(&named), "{field} {value}: {error}");
        }
    }
}

#[test]
fn rotary_positions_of_qwen_3_5_that_are_not_computed_are_refused_by_name() {
    for (rope, named) in [
        (
            json!({"rope_type": "yarn", "factor": 4.0}),
            "rope_parameters: rope_type",
        ),
        (
            json!({"partial_rotary_factor": 0.0}),
            "partial_rotary_factor: must be above 0",
        ),
        (
            json!({"partial_rotary_factor": 1.5}),
            "partial_rotary_factor: must be above 0",
        ),
        (
            json!({"partial_rotary_factor": 0.003}),
            "partial_rotary_factor: rotates 0",
        ),
        (
            json!({"partial_rotary_factor": 0.02}),
            "partial_rotary_factor: rotates 5",
        ),
    ] {
        let changes = json!({"rope_parameters": rope});
        let error = read_qwen3_5(&changes).expect_err(named).to_string();
        assert!(error.contains(named), "{changes}: {error}");
    }
    let scaling = json!({"rope_scaling": {"rope_type": "yarn"}});
    let error = read_qwen3_5(&scaling).unwrap_err().to_string();
    assert!(error.contains("rope_scaling: must be missing"), "{error}");
}

#[test]
fn layers_of_qwen_3_5_that_are_not_computed_are_refused_by_name() {
    let kinds = |kind: &str, count: usize| json!({"layer_types": vec![kind; count]});
    for (changes, named) in [
        (
            json!({"attn_output_gate": false}),
            "attn_output_gate: must be true",
        ),
        (
            json!({"mamba_ssm_dtype": "bfloat16"}),
            "mamba_ssm_dtype: must be float32",
        ),
        (
            json!({"attention_bias": true}),
            "attention_bias: must be false",
        ),
        (
            json!({"full_attention_interval": 0}),
            "full_attention_interval: must be at least 1",
        ),
        (
            json!({"full_attention_interval": 25}),
            "layer_types: must have a layer of full",
        ),
        (
            kinds("linear_attention", 24),
            "layer_types: must have a layer of full",
        ),
        (
            kinds("full_attention", 23),
            "layer_types: must name 24 layers; got 23",
        ),
        (
            kinds("sliding_attention", 24),
            "layer_types: must be linear_attention or",
        ),
        (
            json!({"linear_num_value_heads": 24}),
            "linear_num_value_heads: must be a multiple",
        ),
        (
            json!({"linear_value_head_dim": 100}),
            "linear_value_head_dim: must be a multiple",
        ),
        (
            json!({"linear_conv_kernel_dim": 17}),
            "linear_conv_kernel_dim: must be between",
        ),
    ] {
        let error = read_qwen3_5(&changes).expect_err(named).to_string();
        assert!(error.contains(named), "{changes}: {error}");
    }
    let images = json!({"architectures": ["Qwen3_5ForConditionalGeneration"]});
    let error = read_qwen3_5(&images).unwrap_err().to_string();
    assert!(error.contains("text_config: must be an object"), "{error}");
}

/// Reads the configuration of a small Maple model, with `changes` applied to it.
fn read_maple(changes: &Value) -> Result<ModelConfig, LoadError> {
    let mut config = json!({
        "architectures": ["MapleForCausalLM"], "hidden_act": "silu", "hidden_size": 64,
        "intermediate_size": 64, "max_position_embeddings": 512, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "vocab_size": 317,
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40,
        "rope_theta": 5e5,
    });
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    let file = ("config.json".to_owned(), config.to_string().into_bytes());
    ModelConfig::read(&Source::in_memory([file]))
}

#[test]
fn positions_of_maple_that_are_not_computed_are_refused_by_name() {
    let rope = |rope: Value| json!({"rope_parameters": rope});
    let stated = rope(json!({"rope_theta": 5e5, "rope_type": "default"}));
    assert_eq!(
        read_maple(&stated).unwrap(),
        read_maple(&json!({})).unwrap()
    );
    for (changes, named) in [
        (json!({"rope_scaling": {"factor": 2}}), "rope_scaling"),
        (rope(json!({"rope_type": "yarn"})), "yarn"),
        (rope(json!({"factor": 2})), "factor is not supported"),
        // Each kind of layer has an object of its own.
        (
            rope(json!({"sliding_attention": {"rope_theta": 1e4}})),
            "sliding_attention is not supported",
        ),
    ] {
        let error = read_maple(&changes).expect_err(named).to_string();
        assert!(error.contains(named), "{changes}: {error}");
    }
}
