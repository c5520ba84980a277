//! `config.json`: which fields it may have, and what they mean.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::gguf;
use super::hyperparameters::{ModelConfig, Quantization, StoredWeights};
use super::rope::{RopeScaling, longrope_attention_factor, yarn_attention_factor};
use super::stop_tokens::{self, TokenIds};
use crate::model::architecture::{self, Activation, Architecture, ScaleDirection};
use crate::model::checkpoint::{LoadError, LoadResult, Source, parse_json, require};

/// The default of `max_position_embeddings` in `transformers`.
const DEFAULT_MAX_POSITION: usize = 2048;

impl ModelConfig {
    /// Reads the configuration of a checkpoint.
    ///
    /// # Errors
    /// If `config.json` is missing, malformed or contradictory, or asks for something that this
    /// engine does not compute. The error names the field.
    pub fn read(source: &Source) -> LoadResult<ModelConfig> {
        if let Some(gguf) = source.gguf() {
            let config = gguf::read(gguf)?;
            config.check()?;
            return Ok(config);
        }
        let name = "config.json";
        let text = source.read(name)?;
        let text = text.ok_or_else(|| source.missing_file(name))?;
        let json: ConfigJson = parse_json(name, &text)?;
        let mut config = json.to_config(source.bin().is_some())?;
        config.check()?;
        config.eos_tokens = stop_tokens::read(source, json.eos_token_id.as_ref(), config.vocab)?;
        Ok(config)
    }
}

/// Returns the stop tokens of a checkpoint, whether or not this engine computes it. `vocab` is the
/// number of token ids.
///
/// # Errors
/// If a file that may name them is malformed.
pub(in crate::model) fn stop_tokens(source: &Source, vocab: usize) -> LoadResult<Vec<u32>> {
    #[derive(Deserialize)]
    struct StopJson {
        eos_token_id: Option<TokenIds>,
    }
    if let Some(gguf) = source.gguf() {
        return gguf::end_tokens(gguf.metadata(), vocab);
    }
    let name = "config.json";
    let text = source.read(name)?;
    let text = text.ok_or_else(|| source.missing_file(name))?;
    let json: StopJson = parse_json(name, &text)?;
    stop_tokens::read(source, json.eos_token_id.as_ref(), vocab)
}

/// The fields of `config.json`, as `transformers` 4 and 5 write them.
#[derive(Deserialize)]
struct ConfigJson {
    architectures: Option<Vec<String>>,
    model_type: Option<String>,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: Option<usize>,
    original_max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f32>,
    hidden_act: Option<Activation>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeJson>,
    rope_parameters: Option<RopeJson>,
    partial_rotary_factor: Option<f64>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    use_sliding_window: Option<bool>,
    quantization_config: Option<QuantizationJson>,
    eos_token_id: Option<TokenIds>,
    bos_token_id: Option<TokenIds>,
}

impl ConfigJson {
    /// `is_packed_file` says that the file has packed weights whatever the configuration says.
    fn to_config(&self, is_packed_file: bool) -> LoadResult<ModelConfig> {
        let architecture = self.architecture()?;
        self.refuse_biases(architecture)?;
        let slides = self.use_sliding_window == Some(true);
        let problem = "must be false; attention over a window is not supported";
        require(!slides, "use_sliding_window", problem)?;
        let bos = self.bos_token_id.as_ref();
        let (rope_theta, rope_scaling) = self.rope()?;
        Ok(ModelConfig {
            architecture,
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_dim: self.head_dim()?,
            max_position: self.max_position_embeddings.unwrap_or(DEFAULT_MAX_POSITION),
            rope_theta,
            rope_scaling,
            norm_eps: self.rms_norm_eps.unwrap_or(architecture.norm_eps),
            activation: self.hidden_act.unwrap_or(architecture.activation),
            tied: self.tie_word_embeddings.unwrap_or(false),
            quantization: self.quantization(architecture, is_packed_file)?,
            eos_tokens: Vec::new(),
            bos_token: bos.and_then(|ids| ids.as_slice().first().copied()),
        })
    }

    /// Returns the architecture that `architectures` names. If that field is missing, `model_type`
    /// decides.
    fn architecture(&self) -> LoadResult<&'static Architecture> {
        let is_named = |known: &&Architecture| match (&self.architectures, &self.model_type) {
            (Some(classes), _) => classes[..] == [known.class],
            (None, Some(model_type)) => model_type == known.model_type,
            (None, None) => false,
        };
        architecture::ALL.into_iter().find(is_named).ok_or_else(|| {
            let classes = architecture::ALL.map(|known| known.class).join(" or ");
            let problem = match (&self.architectures, &self.model_type) {
                (Some(given), _) => format!("must be {classes}; got {given:?}"),
                (None, given) => format!("missing, and model_type is {given:?}; use {classes}"),
            };
            LoadError::config("architectures", problem)
        })
    }

    fn quantization(
        &self,
        architecture: &Architecture,
        is_packed_file: bool,
    ) -> LoadResult<Quantization> {
        match &self.quantization_config {
            Some(quantization) => {
                let mut quantization = quantization.to_quantization()?;
                if is_packed_file && quantization.stored == StoredWeights::Masters {
                    // The converter made the masters ternary. Its scale is their mean magnitude.
                    quantization.scale = ScaleDirection::Multiply;
                }
                Ok(quantization)
            }
            None if is_packed_file => Ok(Quantization::packed_file()),
            None if architecture.may_be_unpacked => Ok(Quantization::UNPACKED),
            None => {
                let problem = "missing, so the linears of this checkpoint are not ternary";
                Err(LoadError::config("quantization_config", problem))
            }
        }
    }

    /// # Errors
    /// If a field is set that adds biases in this architecture. Other bias fields mean nothing to
    /// it.
    fn refuse_biases(&self, architecture: &Architecture) -> LoadResult<()> {
        let fields = [
            ("attention_bias", self.attention_bias),
            ("mlp_bias", self.mlp_bias),
        ];
        for (field, value) in fields {
            let adds_biases = value == Some(true) && architecture.bias_fields.contains(&field);
            let problem = "must be false; linears with a bias are not supported";
            require(!adds_biases, field, problem)?;
        }
        Ok(())
    }

    /// Reads the base of the frequencies of the rotary embedding, and how they are scaled.
    /// `transformers` 4 writes `rope_theta` and `rope_scaling`; version 5 writes all in
    /// `rope_parameters`.
    fn rope(&self) -> LoadResult<(f64, RopeScaling)> {
        for (field, rope) in [
            ("rope_scaling", &self.rope_scaling),
            ("rope_parameters", &self.rope_parameters),
        ] {
            if let Some(rope) = rope {
                rope.check(field, self.partial_rotary_factor)?;
            }
        }
        check_partial("partial_rotary_factor", self.partial_rotary_factor)?;
        // The first object that is not empty counts. A base inside it overrides the one beside it.
        let scaling = self.rope_scaling.as_ref().filter(|rope| !rope.is_empty());
        let field = if scaling.is_some() {
            "rope_scaling"
        } else {
            "rope_parameters"
        };
        let rope = scaling.or(self.rope_parameters.as_ref());
        let theta = rope.and_then(|rope| rope.rope_theta).or(self.rope_theta);
        let theta = theta.ok_or_else(|| {
            let problem = "missing, also in rope_scaling and rope_parameters";
            LoadError::config("rope_theta", problem)
        })?;
        let max_position = self.max_position_embeddings.unwrap_or(DEFAULT_MAX_POSITION);
        let original = self
            .original_max_position_embeddings
            .unwrap_or(max_position);
        let positions = Positions {
            max: max_position as f64,
            original: original as f64,
        };
        let pairs = self.head_dim()? / 2;
        let scaling = rope.map(|rope| rope.scaling(field, positions, pairs));
        Ok((theta, scaling.transpose()?.unwrap_or_default()))
    }

    fn head_dim(&self) -> LoadResult<usize> {
        let (hidden, heads) = (self.hidden_size, self.num_attention_heads);
        if let Some(head_dim) = self.head_dim {
            return Ok(head_dim);
        }
        require(
            heads > 0 && hidden.is_multiple_of(heads),
            "hidden_size",
            format_args!(
                "must be a multiple of num_attention_heads ({heads}) if head_dim is missing; got \
                 {hidden}"
            ),
        )?;
        Ok(hidden / heads)
    }
}

/// The values of `rope_type` that this engine computes.
const ROPE_TYPES: [&str; 5] = ["default", "linear", "yarn", "llama3", "longrope"];

/// The positions of a model.
#[derive(Clone, Copy)]
struct Positions {
    max: f64,
    /// Those of the first training.
    original: f64,
}

#[derive(Deserialize)]
struct RopeJson {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
    /// The older name of `rope_type`. Some writers store both.
    #[serde(rename = "type")]
    legacy_type: Option<String>,
    partial_rotary_factor: Option<f64>,
    /// The parameters of other types. The default type ignores them if it is named.
    #[serde(flatten)]
    other_parameters: BTreeMap<String, Value>,
}

impl RopeJson {
    /// Returns whether Python would take the object for none: it has no known key.
    fn is_empty(&self) -> bool {
        self.rope_theta.is_none()
            && self.rope_type().is_none()
            && self.partial_rotary_factor.is_none()
    }

    fn rope_type(&self) -> Option<&str> {
        self.rope_type.as_deref().or(self.legacy_type.as_deref())
    }

    /// Returns how the object scales frequencies. `field` is its name.
    fn scaling(&self, field: &str, positions: Positions, pairs: usize) -> LoadResult<RopeScaling> {
        let number = |key: &str| self.number(field, key);
        let require = |key: &str| {
            let missing = || LoadError::config(field, format!("{key} is missing"));
            self.number(field, key)?.ok_or_else(missing)
        };
        let original = number("original_max_position_embeddings")?;
        let original = original.unwrap_or(positions.original);
        Ok(match self.rope_type().unwrap_or("default") {
            "linear" => RopeScaling::Linear {
                factor: require("factor")?,
            },
            "yarn" => {
                let unsupported = ["mscale", "mscale_all_dim", "truncate"];
                self.refuse_parameters(field, &unsupported)?;
                let factor = require("factor")?;
                let attention_factor = number("attention_factor")?;
                RopeScaling::Yarn {
                    factor,
                    original,
                    beta_fast: number("beta_fast")?.unwrap_or(32.0),
                    beta_slow: number("beta_slow")?.unwrap_or(1.0),
                    attention_factor: attention_factor
                        .unwrap_or_else(|| yarn_attention_factor(factor)),
                }
            }
            "llama3" => RopeScaling::Llama3 {
                factor: require("factor")?,
                original,
                low: require("low_freq_factor")?,
                high: require("high_freq_factor")?,
            },
            "longrope" => {
                let is_long = positions.max > original;
                let key = if is_long {
                    "long_factor"
                } else {
                    "short_factor"
                };
                let factor = number("factor")?.unwrap_or(positions.max / original);
                let attention_factor = number("attention_factor")?;
                RopeScaling::LongRope {
                    divisors: self.divisors(field, key, pairs)?,
                    attention_factor: attention_factor
                        .unwrap_or_else(|| longrope_attention_factor(factor, original)),
                }
            }
            _ => RopeScaling::None,
        })
    }

    /// Returns a parameter that must be a positive number.
    fn number(&self, field: &str, key: &str) -> LoadResult<Option<f64>> {
        let value = self
            .other_parameters
            .get(key)
            .filter(|value| !value.is_null());
        let number = value.map(|value| {
            let number = value
                .as_f64()
                .filter(|number| number.is_finite() && *number > 0.0);
            let problem = || format!("{key} must be a positive number; got {value}");
            number.ok_or_else(|| LoadError::config(field, problem()))
        });
        number.transpose()
    }

    fn divisors(&self, field: &str, key: &str, pairs: usize) -> LoadResult<Vec<f64>> {
        let list = self.other_parameters.get(key).and_then(Value::as_array);
        let positive = |value: &Value| value.as_f64().filter(|number| *number > 0.0);
        let divisors = list.and_then(|list| list.iter().map(positive).collect());
        let divisors: Option<Vec<f64>> = divisors.filter(|list: &Vec<f64>| list.len() == pairs);
        let problem = || format!("{key} must be a list of {pairs} positive numbers");
        divisors.ok_or_else(|| LoadError::config(field, problem()))
    }

    fn refuse_parameters(&self, field: &str, keys: &[&str]) -> LoadResult<()> {
        let is_set = |key: &&&str| {
            self.other_parameters
                .get(**key)
                .is_some_and(|v| !v.is_null())
        };
        match keys.iter().find(is_set) {
            Some(key) => Err(LoadError::config(field, format!("{key} is not supported"))),
            None => Ok(()),
        }
    }

    /// # Errors
    /// If the object asks for a type that is not known. `field` is its name, and `partial` is the
    /// factor beside it.
    fn check(&self, field: &str, partial: Option<f64>) -> LoadResult<()> {
        let rope_type = self.rope_type();
        if let (None, Some(parameter)) = (rope_type, self.other_parameters.keys().next()) {
            let problem = format!("has {parameter:?}, but no rope_type");
            return Err(LoadError::config(field, problem));
        }
        let rope_type = rope_type.unwrap_or("default");
        let known = ROPE_TYPES.join(", ");
        let problem = format_args!("rope_type must be one of {known}; got {rope_type:?}");
        require(ROPE_TYPES.contains(&rope_type), field, problem)?;
        check_partial(field, self.partial_rotary_factor.or(partial))
    }
}

fn check_partial(field: &str, factor: Option<f64>) -> LoadResult<()> {
    let factor = factor.unwrap_or(1.0);
    let problem = format_args!("partial_rotary_factor must be 1; got {factor}");
    require(factor == 1.0, field, problem)
}

#[derive(Deserialize)]
struct QuantizationJson {
    quant_method: Option<String>,
    linear_class: Option<String>,
    quantization_mode: Option<String>,
    use_rms_norm: Option<bool>,
    rms_norm_eps: Option<f32>,
    modules_to_not_convert: Option<Vec<String>>,
}

impl QuantizationJson {
    fn to_quantization(&self) -> LoadResult<Quantization> {
        let method = self.quant_method.as_deref();
        let problem = format_args!("must be \"bitnet\"; got {method:?}");
        require(method == Some("bitnet"), "quant_method", problem)?;
        let online = match self.quantization_mode.as_deref() {
            Some("online") => true,
            Some("offline") | None => false,
            Some(other) => {
                let problem = format!("must be \"online\" or \"offline\"; got {other:?}");
                return Err(LoadError::config("quantization_mode", problem));
            }
        };
        let uses_norm = self.use_rms_norm.unwrap_or(false);
        Ok(Quantization {
            scale: self.scale_direction()?,
            stored: if online {
                StoredWeights::Masters
            } else {
                StoredWeights::Packed
            },
            input_norm_eps: uses_norm.then(|| self.rms_norm_eps.unwrap_or(1e-6)),
            float_modules: self.float_modules()?,
        })
    }

    fn scale_direction(&self) -> LoadResult<ScaleDirection> {
        let Some(class) = self.linear_class.as_deref() else {
            return Ok(ScaleDirection::Divide);
        };
        let mut directions = ScaleDirection::ALL.into_iter();
        let found = directions.find(|direction| direction.linear_class() == class);
        found.ok_or_else(|| {
            let classes = ScaleDirection::ALL.map(ScaleDirection::linear_class);
            let problem = format!("must be {}; got {class:?}", classes.join(" or "));
            LoadError::config("linear_class", problem)
        })
    }

    fn float_modules(&self) -> LoadResult<Vec<String>> {
        let Some(modules) = self.modules_to_not_convert.clone() else {
            return Ok(vec!["lm_head".to_owned()]);
        };
        let is_pattern = |module: &&String| {
            module.is_empty() || module.contains(|c| r"*+?()[]{}|^$\".contains(c))
        };
        match modules.iter().find(is_pattern) {
            Some(pattern) => Err(LoadError::config(
                "modules_to_not_convert",
                format!("must list names of modules, without patterns; got {pattern:?}"),
            )),
            None => Ok(modules),
        }
    }
}
