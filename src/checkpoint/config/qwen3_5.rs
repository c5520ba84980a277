//! What is particular to the `config.json` and the metadata of Qwen 3.5: recurrent layers, a gate
//! after attention, and rotary positions for a part of each head.
//!
//! Sources: `Qwen3_5TextConfig` of `transformers`; the keys of llama.cpp's converter.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::hyperparameters::ModelConfig;
use super::recurrent::RecurrentLayers;
use super::rope_json::RopeJson;
use crate::checkpoint::{
    LoadError, LoadResult, Metadata, MetadataValue, QWEN3_5, parse_json, require,
};

/// Each fourth layer attends if a configuration does not say it.
const INTERVAL: usize = 4;

/// The types of layers in `layer_types`.
const RECURRENT: &str = "linear_attention";
const ATTENTION: &str = "full_attention";

/// The bases and the rotated part of a head if `config.json` does not state them.
const ROPE_THETA: f64 = 10_000_000.0;
const ROTATED_PART: f64 = 0.25;

/// The class of a checkpoint with images, of which this engine computes the text part.
const WITH_IMAGES: &str = "Qwen3_5ForConditionalGeneration";

/// The tensors of layers that predict several tokens, and of images.
const UNUSED_PARTS: [&str; 2] = ["mtp.", "model.visual."];

#[derive(Deserialize)]
struct RecurrentJson {
    layer_types: Option<Vec<String>>,
    full_attention_interval: Option<usize>,
    linear_num_key_heads: usize,
    linear_num_value_heads: usize,
    linear_key_head_dim: usize,
    linear_value_head_dim: usize,
    linear_conv_kernel_dim: usize,
    attn_output_gate: Option<bool>,
    mamba_ssm_dtype: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<RopeJson>,
}

/// Returns the configuration of the text part if `text` is that of a checkpoint with images.
/// Otherwise returns `text`.
pub(crate) fn text_part(name: &str, text: Vec<u8>) -> LoadResult<Vec<u8>> {
    let mut json: Value = parse_json(name, &text)?;
    if json["architectures"] != json!([WITH_IMAGES]) {
        return Ok(text);
    }
    let tied = json["tie_word_embeddings"].take();
    let mut part = json["text_config"].take();
    require(part.is_object(), "text_config", "must be an object")?;
    part["architectures"] = json!([QWEN3_5.class]);
    if part["tie_word_embeddings"].is_null() {
        part["tie_word_embeddings"] = tied;
    }
    Ok(part.to_string().into_bytes())
}

/// Reads what `config.json` says beside the fields that all architectures have. The sizes in
/// `config` are checked.
pub(super) fn apply(config: &mut ModelConfig, name: &str, text: &[u8]) -> LoadResult<()> {
    let json: RecurrentJson = parse_json(name, text)?;
    let problem = "must be true; attention without a gate is not supported";
    require(
        json.attn_output_gate != Some(false),
        "attn_output_gate",
        problem,
    )?;
    let dtype = json.mamba_ssm_dtype.as_deref().unwrap_or("float32");
    let problem = format_args!("must be float32; got {dtype:?}");
    require(dtype == "float32", "mamba_ssm_dtype", problem)?;
    let is_scaled = json.rope_scaling.is_some_and(|scaling| !scaling.is_null());
    let problem = "must be missing; use rope_parameters";
    require(!is_scaled, "rope_scaling", problem)?;
    let rope = json.rope_parameters.as_ref();
    let kind = rope.and_then(RopeJson::rope_type).unwrap_or("default");
    let problem = format_args!("rope_type must be default; got {kind:?}");
    require(kind == "default", "rope_parameters", problem)?;
    let theta = rope.and_then(|rope| rope.rope_theta).or(json.rope_theta);
    config.rope_theta = theta.unwrap_or(ROPE_THETA);
    let part = rope.and_then(RopeJson::partial_rotary_factor);
    let part = part.or(json.partial_rotary_factor).unwrap_or(ROTATED_PART);
    let problem = format_args!("must be above 0 and at most 1; got {part}");
    require(part > 0.0 && part <= 1.0, "partial_rotary_factor", problem)?;
    config.rotary_dim = (config.head_dim as f64 * part) as usize;
    let is_recurrent = match json.layer_types {
        Some(types) => recurrent_layers(&types, config.layers)?,
        None => by_interval(
            "full_attention_interval",
            json.full_attention_interval,
            config.layers,
        )?,
    };
    config.unused_parts = UNUSED_PARTS.map(str::to_owned).to_vec();
    config.recurrent = Some(RecurrentLayers {
        is_recurrent,
        key_heads: json.linear_num_key_heads,
        value_heads: json.linear_num_value_heads,
        key_dim: json.linear_key_head_dim,
        value_dim: json.linear_value_head_dim,
        taps: json.linear_conv_kernel_dim,
    });
    Ok(())
}

/// Reads what the metadata of a GGUF file says beside the keys that all architectures have. `name`
/// is the architecture's.
pub(super) fn apply_to_gguf(
    config: &mut ModelConfig,
    metadata: &Metadata,
    name: &str,
) -> LoadResult<()> {
    let key = |key: &str| format!("{name}.{key}");
    let size = |name: &str| metadata.require_size(&key(name));
    let predicted = metadata.size(&key("nextn_predict_layers"))?.unwrap_or(0);
    let layers = config
        .layers
        .checked_sub(predicted)
        .filter(|left| *left > 0);
    let layers = layers.ok_or_else(|| {
        let problem = format!("must be below block_count; got {predicted}");
        metadata.error(&key("nextn_predict_layers"), problem)
    })?;
    let predicting = layers..config.layers;
    config.unused_parts = predicting.map(|layer| format!("blk.{layer}.")).collect();
    config.layers = layers;
    let rotated = metadata.size(&key("rope.dimension_count"))?;
    config.rotary_dim = rotated.unwrap_or(config.head_dim);
    let value_heads = size("ssm.time_step_rank")?;
    let inner = size("ssm.inner_size")?;
    if value_heads == 0 || !inner.is_multiple_of(value_heads) {
        let problem = format!("must be a multiple of ssm.time_step_rank; got {inner}");
        return Err(metadata.error(&key("ssm.inner_size"), problem));
    }
    let interval = key("full_attention_interval");
    let flags = key("attention.recurrent_layers");
    let is_recurrent = match metadata.numbers(&flags)? {
        Some(flags) if flags.len() >= config.layers => flags[..config.layers]
            .iter()
            .map(|flag| *flag != 0.0)
            .collect(),
        Some(other) => {
            let problem = format!(
                "must name all {} layers; got {}",
                config.layers,
                other.len()
            );
            return Err(metadata.error(&flags, problem));
        }
        None => by_interval(&interval, metadata.size(&interval)?, config.layers)?,
    };
    config.recurrent = Some(RecurrentLayers {
        is_recurrent,
        key_heads: size("ssm.group_count")?,
        value_heads,
        key_dim: size("ssm.state_size")?,
        value_dim: inner / value_heads,
        taps: size("ssm.conv_kernel")?,
    });
    Ok(())
}

/// Returns the fields of `config.json` that other architectures lack.
pub(super) fn fields(recurrent: &RecurrentLayers) -> Map<String, Value> {
    let kind = |is_recurrent: &bool| if *is_recurrent { RECURRENT } else { ATTENTION };
    let types: Vec<&str> = recurrent.is_recurrent.iter().map(kind).collect();
    let fields = [
        ("layer_types", json!(types)),
        ("linear_num_key_heads", json!(recurrent.key_heads)),
        ("linear_num_value_heads", json!(recurrent.value_heads)),
        ("linear_key_head_dim", json!(recurrent.key_dim)),
        ("linear_value_head_dim", json!(recurrent.value_dim)),
        ("linear_conv_kernel_dim", json!(recurrent.taps)),
        ("attn_output_gate", json!(true)),
        ("mamba_ssm_dtype", json!("float32")),
    ];
    let fields = fields.into_iter();
    fields.map(|(key, value)| (key.to_owned(), value)).collect()
}

/// Returns the `partial_rotary_factor` that means the rotated values of a head.
pub(super) fn rotated_part(config: &ModelConfig) -> f64 {
    let part = config.rotary_dim as f64 / config.head_dim as f64;
    // The product of the nearest number may fall below, and it is rounded down when it is read.
    if ((config.head_dim as f64 * part) as usize) < config.rotary_dim {
        return part.next_up();
    }
    part
}

/// Returns the metadata of a GGUF file that other architectures lack: keys after the name of the
/// architecture, with their values.
pub(super) fn metadata(recurrent: &RecurrentLayers) -> Vec<(&'static str, MetadataValue)> {
    let size = |size: usize| MetadataValue::Size(size as u32);
    let flags = &recurrent.is_recurrent;
    let interval = 1 + flags.iter().take_while(|is| **is).count();
    let has_interval = |(layer, is): (usize, &bool)| *is != (layer + 1).is_multiple_of(interval);
    let layers = if flags.iter().enumerate().all(has_interval) {
        ("full_attention_interval", size(interval))
    } else {
        (
            "attention.recurrent_layers",
            MetadataValue::Bools(flags.clone()),
        )
    };
    vec![
        layers,
        ("ssm.conv_kernel", size(recurrent.taps)),
        ("ssm.state_size", size(recurrent.key_dim)),
        ("ssm.group_count", size(recurrent.key_heads)),
        ("ssm.time_step_rank", size(recurrent.value_heads)),
        ("ssm.inner_size", size(recurrent.values())),
    ]
}

fn by_interval(field: &str, interval: Option<usize>, layers: usize) -> LoadResult<Vec<bool>> {
    let interval = interval.unwrap_or(INTERVAL);
    require(interval > 0, field, "must be at least 1; got 0")?;
    Ok((0..layers)
        .map(|layer| !(layer + 1).is_multiple_of(interval))
        .collect())
}

fn recurrent_layers(types: &[String], layers: usize) -> LoadResult<Vec<bool>> {
    let problem = format_args!("must name {layers} layers; got {}", types.len());
    require(types.len() == layers, "layer_types", problem)?;
    let is_recurrent = |kind: &String| match kind.as_str() {
        RECURRENT => Ok(true),
        ATTENTION => Ok(false),
        other => {
            let problem = format!("must be {RECURRENT} or {ATTENTION}; got {other:?}");
            Err(LoadError::config("layer_types", problem))
        }
    };
    types.iter().map(is_recurrent).collect()
}
