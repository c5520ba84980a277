//! What is particular to the `config.json` and the metadata of Gemma 3: layers that attend to near
//! tokens only, with rotary frequencies of their own, and the scale of attention.
//!
//! Source: `Gemma3TextConfig` of `transformers`.

use serde::Deserialize;
use serde_json::Value;

use super::hyperparameters::{LocalLayers, ModelConfig};
use super::rope_json::{Positions, RopeJson};
use crate::checkpoint::architecture::Activation;
use crate::checkpoint::{LoadError, LoadResult, parse_json, require};

/// The bases of rotary frequencies if a configuration does not state them.
const ROPE_THETA: f64 = 1_000_000.0;
const LOCAL_ROPE_THETA: f64 = 10_000.0;

/// The width and the window of the published model of 270 million parameters.
const PUBLISHED_WIDTH: usize = 640;
const PUBLISHED_WINDOW: usize = 512;

/// Each sixth layer attends to all tokens if a configuration does not say it.
const PATTERN: usize = 6;

/// The default of `query_pre_attn_scalar`.
const QUERY_SCALAR: f64 = 256.0;

#[derive(Deserialize)]
struct Gemma3Json {
    hidden_activation: Option<Activation>,
    layer_types: Option<Vec<String>>,
    #[serde(alias = "_sliding_window_pattern")]
    sliding_window_pattern: Option<usize>,
    sliding_window: Option<usize>,
    rope_theta: Option<f64>,
    rope_local_base_freq: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<Value>,
    query_pre_attn_scalar: Option<f64>,
    use_bidirectional_attention: Option<bool>,
    attn_logit_softcapping: Option<f64>,
    final_logit_softcapping: Option<f64>,
}

/// Reads what `config.json` says beside the fields that all architectures have. The sizes in
/// `config` are checked.
pub(super) fn apply(config: &mut ModelConfig, name: &str, text: &[u8]) -> LoadResult<()> {
    let json: Gemma3Json = parse_json(name, text)?;
    json.refuse_unsupported()?;
    if let Some(activation) = json.hidden_activation {
        config.activation = activation;
    }
    set_query_factor(config, json.query_pre_attn_scalar.unwrap_or(QUERY_SCALAR))?;
    let pattern = json.sliding_window_pattern.unwrap_or(PATTERN).max(1);
    let is_local = match &json.layer_types {
        Some(types) => typed_layers(types, config.layers)?,
        None => by_pattern(config.layers, pattern),
    };
    let rope = |layers: &str, theta: Option<f64>, default: f64| -> LoadResult<_> {
        let object = json.rope_parameters.as_ref().map(|rope| &rope[layers]);
        let object = object.filter(|object| object.is_object());
        let object = object.or(json.rope_scaling.as_ref().filter(|_| layers == FULL));
        let object = object.filter(|object| !object.is_null()).cloned();
        let error = |error| LoadError::config("rope_parameters", error);
        let object: Option<RopeJson> = object
            .map(serde_json::from_value)
            .transpose()
            .map_err(error)?;
        let stated = object.as_ref().and_then(|rope| rope.rope_theta);
        Ok((stated.or(theta).unwrap_or(default), object))
    };
    let (theta, scaling) = rope(FULL, json.rope_theta, ROPE_THETA)?;
    config.rope_theta = theta;
    if let Some(scaling) = scaling {
        let positions = Positions {
            max: config.max_position as f64,
            original: config.max_position as f64,
        };
        scaling.check("rope_parameters", None)?;
        config.rope_scaling = scaling.scaling("rope_parameters", positions, config.head_dim / 2)?;
    }
    let (rope_theta, scaling) = rope(LOCAL, json.rope_local_base_freq, LOCAL_ROPE_THETA)?;
    let is_scaled =
        scaling.is_some_and(|rope| rope.rope_type().is_some_and(|kind| kind != "default"));
    let problem = "the frequencies of sliding_attention must not be scaled";
    require(!is_scaled, "rope_parameters", problem)?;
    let window = json.sliding_window;
    require(
        window != Some(0),
        "sliding_window",
        "must be at least 1; got 0",
    )?;
    set_local_layers(config, is_local, (rope_theta, false), window);
    Ok(())
}

/// Sets what the metadata of a GGUF file says of the window, of the base of the frequencies of
/// local layers, and of the scale of attention. Microsoft's converter for BitNet-embedding states
/// none of them. Without a window, the model must have the width of the published one.
///
/// # Errors
/// If the file states no window and is not of the published model.
pub(super) fn apply_to_gguf(
    config: &mut ModelConfig,
    window: Option<usize>,
    theta: Option<f64>,
    query_scalar: Option<f64>,
) -> LoadResult<()> {
    set_query_factor(config, query_scalar.unwrap_or(config.head_dim as f64))?;
    let published = (config.hidden == PUBLISHED_WIDTH).then_some(PUBLISHED_WINDOW);
    let missing = || LoadError::config("sliding_window", "missing".to_owned());
    let window = window.or(published).ok_or_else(missing)?;
    let is_local = by_pattern(config.layers, PATTERN);
    let theta = theta.unwrap_or(LOCAL_ROPE_THETA);
    if window > 0 {
        set_local_layers(config, is_local, (theta, false), Some(window));
    }
    Ok(())
}

fn set_query_factor(config: &mut ModelConfig, scalar: f64) -> LoadResult<()> {
    let problem = format_args!("must be positive; got {scalar}");
    let is_usable = scalar > 0.0 && scalar.is_finite();
    require(is_usable, "query_pre_attn_scalar", problem)?;
    config.query_factor = (config.head_dim as f64 / scalar).sqrt() as f32;
    Ok(())
}

/// The keys of `rope_parameters` and the values of `layer_types`.
const FULL: &str = "full_attention";
const LOCAL: &str = "sliding_attention";

/// Sets which layers attend to near tokens, the base of their frequencies, and whether they alone
/// rotate.
pub(super) fn set_local_layers(
    config: &mut ModelConfig,
    is_local: Vec<bool>,
    (rope_theta, rotates_alone): (f64, bool),
    window: Option<usize>,
) {
    if !is_local.contains(&true) {
        return;
    }
    config.local = Some(LocalLayers {
        is_local,
        rope_theta,
        window: window.unwrap_or(usize::MAX).min(config.max_position),
        rotates_alone,
    });
}

fn by_pattern(layers: usize, pattern: usize) -> Vec<bool> {
    (1..=layers)
        .map(|number| !number.is_multiple_of(pattern))
        .collect()
}

/// Returns which layers attend to near tokens, by their types.
pub(super) fn typed_layers(types: &[String], layers: usize) -> LoadResult<Vec<bool>> {
    let field = "layer_types";
    let count = types.len();
    let problem = format_args!("must have an entry for each of {layers} layers; got {count}");
    require(count == layers, field, problem)?;
    let is_local = types.iter().map(|kind| match kind.as_str() {
        FULL => Ok(false),
        LOCAL => Ok(true),
        other => {
            let problem = format!("must be {FULL} or {LOCAL}; got {other:?}");
            Err(LoadError::config(field, problem))
        }
    });
    is_local.collect()
}

impl Gemma3Json {
    fn refuse_unsupported(&self) -> LoadResult<()> {
        let is_bidirectional = self.use_bidirectional_attention == Some(true);
        let problem = "must be false; attention to later tokens is not supported";
        require(!is_bidirectional, "use_bidirectional_attention", problem)?;
        for (field, value) in [
            ("attn_logit_softcapping", self.attn_logit_softcapping),
            ("final_logit_softcapping", self.final_logit_softcapping),
        ] {
            require(
                value.is_none(),
                field,
                "must be null; caps are not supported",
            )?;
        }
        Ok(())
    }
}
