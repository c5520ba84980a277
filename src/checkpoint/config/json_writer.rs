//! Writes `config.json` and `generation_config.json` for a model whose file has neither.

use serde_json::{Value, json};

use super::hyperparameters::ModelConfig;
use super::qwen3_5;
use super::rope::RopeScaling;
use crate::checkpoint::architecture::ScaleDirection;
use crate::checkpoint::{LoadError, LoadResult};

/// Returns the `config.json` of a model with packed weights, whose scales multiply. `dtype` is the
/// type of its embedding, as `transformers` calls it.
///
/// # Errors
/// If the rotary frequencies are scaled in a way that only `config.json` itself can describe.
pub(crate) fn config_json(config: &ModelConfig, dtype: &str) -> LoadResult<Value> {
    // The shortest decimal number that is the same in single precision.
    let eps: f64 = config.norm_eps.to_string().parse().unwrap_or_default();
    let mut json = json!({
        "architectures": [config.architecture.class_of(config.has_head)],
        "model_type": config.architecture.model_type,
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "max_position_embeddings": config.max_position,
        "rope_parameters": rope_json(config)?,
        "rms_norm_eps": eps,
        "tie_word_embeddings": config.tied,
        "attention_bias": false,
        "mlp_bias": false,
        "bos_token_id": config.bos_token,
        "eos_token_id": config.eos_tokens,
        "dtype": dtype,
        "quantization_config": quantization_json(config),
    });
    if let (Some(fields), Some(recurrent)) = (json.as_object_mut(), &config.recurrent) {
        fields.extend(qwen3_5::fields(recurrent));
    }
    if let (Some(fields), Some(blocks)) = (json.as_object_mut(), config.masked_blocks) {
        fields.extend(blocks.fields());
    }
    Ok(json)
}

/// Returns the `quantization_config` of packed weights, whose scales multiply.
pub(crate) fn quantization_json(config: &ModelConfig) -> Value {
    let mut floats = vec!["lm_head"];
    if let Some(modules) = config.architecture.layer.recurrent {
        floats.extend([modules.strength, modules.step]);
    }
    json!({
        "quant_method": "bitnet",
        "linear_class": ScaleDirection::Multiply.linear_class(),
        "quantization_mode": "offline",
        "modules_to_not_convert": floats,
    })
}

/// Returns the `generation_config.json` of a model.
pub(crate) fn generation_json(config: &ModelConfig) -> Value {
    json!({"bos_token_id": config.bos_token, "eos_token_id": config.eos_tokens})
}

fn rope_json(config: &ModelConfig) -> LoadResult<Value> {
    let theta = config.rope_theta;
    Ok(match &config.rope_scaling {
        RopeScaling::None if config.recurrent.is_some() => json!({
            "rope_type": "default", "rope_theta": theta, "mrope_interleaved": true,
            "partial_rotary_factor": qwen3_5::rotated_part(config),
        }),
        RopeScaling::None => json!({"rope_type": "default", "rope_theta": theta}),
        _ if config.recurrent.is_some() => {
            let problem = "config.json of this architecture has no fields for a scaling";
            return Err(LoadError::config("rope_scaling", problem));
        }
        RopeScaling::Linear { factor } => {
            json!({"rope_type": "linear", "rope_theta": theta, "factor": factor})
        }
        RopeScaling::Yarn {
            factor,
            original,
            beta_fast,
            beta_slow,
            attention_factor,
        } => json!({
            "rope_type": "yarn", "rope_theta": theta, "factor": factor,
            "original_max_position_embeddings": *original as u64, "beta_fast": beta_fast,
            "beta_slow": beta_slow, "attention_factor": attention_factor,
        }),
        RopeScaling::Llama3 { .. } | RopeScaling::LongRope { .. } => {
            let problem = "no container but a Hugging Face directory states this scaling";
            return Err(LoadError::config("rope_scaling", problem));
        }
    })
}
