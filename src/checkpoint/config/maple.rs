//! What is particular to the `config.json` and the metadata of Maple: layers that attend to near
//! tokens, which alone know positions, and limits of the gates of experts.
//!
//! Sources: the configuration of deepgrove/maple-preview; the keys of llama.cpp's converter.

use serde::Deserialize;
use serde_json::Value;

use super::gemma3::{set_local_layers, typed_layers};
use super::hyperparameters::ModelConfig;
use super::rope::RopeScaling;
use super::rope_json::RopeJson;
use crate::checkpoint::architecture::MAPLE;
use crate::checkpoint::{LoadResult, Metadata, MetadataValue, parse_json, require};

/// The base, the rotated part of a head and the window if a configuration does not state them.
const ROPE_THETA: f64 = 10_000.0;
const ROTATED_PART: f64 = 0.5;
const WINDOW: usize = 512;

#[derive(Deserialize)]
struct MapleJson {
    layer_types: Vec<String>,
    sliding_window: Option<usize>,
    nope_on_global_attention: Option<bool>,
    partial_rotary_factor: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<RopeJson>,
    use_bias: Option<bool>,
    use_qk_norm: Option<bool>,
    num_shared_experts: Option<usize>,
    moe_router_enable_expert_bias: Option<bool>,
}

/// Reads what `config.json` says beside the fields that all architectures have. The sizes in
/// `config` are checked.
pub(super) fn apply(config: &mut ModelConfig, name: &str, text: &[u8]) -> LoadResult<()> {
    let json: MapleJson = parse_json(name, text)?;
    for (field, is_other) in [
        ("use_bias", json.use_bias == Some(true)),
        ("use_qk_norm", json.use_qk_norm == Some(false)),
        (
            "num_shared_experts",
            json.num_shared_experts.unwrap_or(0) > 0,
        ),
        (
            "moe_router_enable_expert_bias",
            json.moe_router_enable_expert_bias == Some(true),
        ),
        (
            "rope_scaling",
            json.rope_scaling.is_some_and(|scaling| !scaling.is_null()),
        ),
    ] {
        let problem = "is other than in maple-preview, which is not supported";
        require(!is_other, field, problem)?;
    }
    let rope = json.rope_parameters.as_ref();
    let kind = rope.and_then(RopeJson::rope_type).unwrap_or("default");
    let problem = format_args!("rope_type must be default; got {kind:?}");
    require(kind == "default", "rope_parameters", problem)?;
    if let Some(rope) = rope {
        rope.refuse_other_parameters("rope_parameters")?;
    }
    let theta = rope.and_then(|rope| rope.rope_theta).or(json.rope_theta);
    config.rope_theta = theta.unwrap_or(ROPE_THETA);
    let part = rope.and_then(RopeJson::partial_rotary_factor);
    let part = part.or(json.partial_rotary_factor).unwrap_or(ROTATED_PART);
    let problem = format_args!("must be above 0 and at most 1; got {part}");
    require(part > 0.0 && part <= 1.0, "partial_rotary_factor", problem)?;
    config.rotary_dim = (config.head_dim as f64 * part) as usize;
    let is_local = typed_layers(&json.layer_types, config.layers)?;
    let problem = "must have a layer of sliding_attention, since the others know no positions";
    require(is_local.contains(&true), "layer_types", problem)?;
    let window = json.sliding_window.unwrap_or(WINDOW);
    require(window > 0, "sliding_window", "must be at least 1; got 0")?;
    let rotates_alone = json.nope_on_global_attention.unwrap_or(true);
    let theta = config.rope_theta;
    set_local_layers(config, is_local, (theta, rotates_alone), Some(window));
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
    let rotated = metadata.size(&key("rope.dimension_count"))?;
    config.rotary_dim = rotated.unwrap_or(config.head_dim / 2);
    if config.rope_scaling != RopeScaling::None {
        let problem = "scaled positions are not supported in local layers";
        return Err(metadata.error(&key("rope.scaling.type"), problem));
    }
    // Local layers alone know positions.
    if let Some(theta) = metadata.float(&key("rope.freq_base_swa"))? {
        config.rope_theta = theta;
    }
    let window = metadata.require_size(&key("attention.sliding_window"))?;
    let pattern = key("attention.sliding_window_pattern");
    let types = metadata.numbers(&pattern)?.unwrap_or_default();
    if types.len() != config.layers || window == 0 {
        let (layers, count) = (config.layers, types.len());
        let problem = format!("must have an entry for each of {layers} layers; got {count}");
        return Err(metadata.error(&pattern, problem));
    }
    let is_local: Vec<bool> = types.iter().map(|kind| *kind != 0.0).collect();
    if !is_local.contains(&true) {
        let problem = "must have a layer with a window, since the others know no positions";
        return Err(metadata.error(&pattern, problem));
    }
    set_local_layers(config, is_local, (config.rope_theta, true), Some(window));
    Ok(())
}

/// Returns the keys of a GGUF file, without the name of the architecture.
///
/// # Errors
/// If the other layers know positions, which such files cannot say.
pub(super) fn metadata(config: &ModelConfig) -> LoadResult<Vec<(&'static str, MetadataValue)>> {
    let (Some(local), true) = (&config.local, *config.architecture == MAPLE) else {
        return Ok(Vec::new());
    };
    let problem = "is false, which GGUF cannot say";
    require(local.rotates_alone, "nope_on_global_attention", problem)?;
    let limits = config
        .experts
        .iter()
        .filter_map(|experts| experts.gate_limit);
    let limits = limits
        .flat_map(|limit| vec![limit; config.layers])
        .collect();
    // No context is longer than such a number.
    let window = u32::try_from(local.window).unwrap_or(u32::MAX);
    Ok(vec![
        ("attention.sliding_window", MetadataValue::Size(window)),
        (
            "attention.sliding_window_pattern",
            MetadataValue::Bools(local.is_local.clone()),
        ),
        ("swiglu_clamp_exp", MetadataValue::Floats(limits)),
    ])
}
