//! Hyperparameters of a checkpoint, from the JSON files beside its weights.
//!
//! Always true of a [`ModelConfig`]: its sizes agree with each other, and every setting is one that this
//! engine computes. A setting that it does not compute is an error that names the key; nothing is
//! guessed.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value;

use super::load::{LoadError, Source};

/// What the attention kernels divide a head into.
const HEAD_LANES: usize = 16;

/// The family of transformer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// `BitNetForCausalLM`: a norm before each output projection ("sub-norms").
    BitNet,
    /// `LlamaForCausalLM` with ternary linears.
    Llama,
}

/// The function of the gate in the feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Activation {
    /// max(x, 0)².
    #[serde(rename = "relu2")]
    Relu2,
    /// x · sigmoid(x).
    #[serde(rename = "silu", alias = "swish")]
    Silu,
}

/// What a stored `weight_scale` does to a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleDirection {
    /// `linear_class: autobitlinear`: y = (W·q / s) · weight_scale.
    Multiply,
    /// `linear_class: bitlinear`, the default: y = W·q / (s · weight_scale).
    Divide,
}

/// How the linears were made ternary.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantization {
    /// What a stored scale does.
    pub scale: ScaleDirection,
    /// The checkpoint holds float masters, to be made ternary when loaded.
    pub online: bool,
    /// The epsilon of the norm on the input of every ternary linear, where there is one (`use_rms_norm`).
    pub input_norm_eps: Option<f32>,
    /// Modules that stay float: prefixes that end at a dot, or suffixes. The output head where the
    /// checkpoint does not say.
    pub float_modules: Vec<String>,
}

/// The hyperparameters of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Token ids, and values of a row of logits.
    pub vocab: usize,
    /// Values of a hidden state.
    pub hidden: usize,
    /// Values between the halves of a feed-forward part.
    pub intermediate: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Values of a head, a multiple of 16.
    pub head_dim: usize,
    /// Positions that the model was made for.
    pub max_position: usize,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// Epsilon of the norms.
    pub norm_eps: f32,
    /// The gate's function.
    pub activation: Activation,
    /// The output head is the embedding.
    pub tied: bool,
    /// How the linears were made ternary.
    pub quantization: Quantization,
    /// Tokens that end an answer: the union over `config.json`, `generation_config.json` and the
    /// tokenizer. Ascending.
    pub eos_tokens: Vec<u32>,
    /// The token that begins a text.
    pub bos_token: Option<u32>,
}

impl ModelConfig {
    /// Reads the configuration of a checkpoint.
    ///
    /// # Errors
    /// If `config.json` is missing, malformed or contradictory, or asks for something that this engine
    /// does not compute.
    pub fn read(source: &Source) -> Result<ModelConfig, LoadError> {
        let text = source
            .read("config.json")?
            .ok_or_else(|| LoadError::missing_file(source, "config.json"))?;
        let raw: RawConfig = parse("config.json", &text)?;
        let mut config = raw.check()?;
        config.eos_tokens = eos_tokens(source, &raw, config.vocab)?;
        Ok(config)
    }

    /// Query heads that share a key and value head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Whether the linear `module` (as `model.layers.0.mlp.up_proj`) stays float.
    #[must_use]
    pub fn is_float(&self, module: &str) -> bool {
        self.quantization.float_modules.iter().any(|pattern| {
            let prefix = module.strip_prefix(pattern.as_str());
            let to_boundary = prefix.is_some_and(|rest| {
                rest.is_empty() || rest.starts_with('.') || pattern.ends_with('.')
            });
            to_boundary || module.ends_with(pattern.as_str())
        })
    }
}

/// `config.json`, both generations of keys.
#[derive(Deserialize)]
struct RawConfig {
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
    rms_norm_eps: Option<f32>,
    hidden_act: Option<Activation>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
    partial_rotary_factor: Option<f64>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    quantization_config: Option<RawQuantization>,
    eos_token_id: Option<TokenIds>,
    bos_token_id: Option<TokenIds>,
}

#[derive(Deserialize)]
struct RawRope {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
    /// The older name of `rope_type`; some writers store both.
    #[serde(rename = "type")]
    legacy_type: Option<String>,
    partial_rotary_factor: Option<f64>,
    /// What the other types need; the default type, when it is named, passes over it.
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

impl RawRope {
    /// Python takes an object without keys for none.
    fn is_empty(&self) -> bool {
        self.rope_theta.is_none()
            && self.rope_type.is_none()
            && self.legacy_type.is_none()
            && self.partial_rotary_factor.is_none()
    }

    fn kind(&self) -> &str {
        let kind = self.rope_type.as_deref().or(self.legacy_type.as_deref());
        kind.unwrap_or("default")
    }
}

#[derive(Deserialize)]
struct RawQuantization {
    quant_method: Option<String>,
    linear_class: Option<String>,
    quantization_mode: Option<String>,
    use_rms_norm: Option<bool>,
    rms_norm_eps: Option<f32>,
    modules_to_not_convert: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl TokenIds {
    fn as_slice(&self) -> &[u32] {
        match self {
            TokenIds::One(id) => std::slice::from_ref(id),
            TokenIds::Many(ids) => ids,
        }
    }
}

impl RawConfig {
    fn check(&self) -> Result<ModelConfig, LoadError> {
        let architecture = self.architecture()?;
        let head_dim = match self.head_dim {
            Some(head_dim) => head_dim,
            None if self.num_attention_heads > 0
                && self.hidden_size.is_multiple_of(self.num_attention_heads) =>
            {
                self.hidden_size / self.num_attention_heads
            }
            None => {
                return Err(unsupported(
                    "hidden_size",
                    "not a multiple of num_attention_heads",
                ));
            }
        };
        let config = ModelConfig {
            architecture,
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_dim,
            max_position: self.max_position_embeddings.unwrap_or(2048),
            rope_theta: self.rope_theta()?,
            norm_eps: self.rms_norm_eps.unwrap_or(match architecture {
                Architecture::BitNet => 1e-5,
                Architecture::Llama => 1e-6,
            }),
            activation: self.hidden_act.unwrap_or(match architecture {
                Architecture::BitNet => Activation::Relu2,
                Architecture::Llama => Activation::Silu,
            }),
            tied: self.tie_word_embeddings.unwrap_or(false),
            quantization: self.quantization()?,
            eos_tokens: Vec::new(),
            bos_token: self
                .bos_token_id
                .as_ref()
                .and_then(|ids| ids.as_slice().first().copied()),
        };
        self.refuse_biases(architecture)?;
        config.check_epsilons()?;
        config.check_sizes()?;
        Ok(config)
    }

    fn architecture(&self) -> Result<Architecture, LoadError> {
        let Some(architectures) = &self.architectures else {
            return match self.model_type.as_deref() {
                Some("bitnet") => Ok(Architecture::BitNet),
                Some("llama") => Ok(Architecture::Llama),
                other => Err(unsupported(
                    "architectures",
                    &format!(
                        "missing, and model_type is {other:?}; supported are bitnet and llama"
                    ),
                )),
            };
        };
        match architectures
            .iter()
            .map(String::as_str)
            .collect::<Vec<_>>()
            .as_slice()
        {
            ["BitNetForCausalLM"] => Ok(Architecture::BitNet),
            ["LlamaForCausalLM"] => Ok(Architecture::Llama),
            other => Err(unsupported(
                "architectures",
                &format!(
                    "{other:?}; supported are BitNetForCausalLM, and LlamaForCausalLM with quant_method bitnet"
                ),
            )),
        }
    }

    /// BitNet has no `mlp_bias`: the key is nothing to it.
    fn refuse_biases(&self, architecture: Architecture) -> Result<(), LoadError> {
        let mlp = architecture == Architecture::Llama && self.mlp_bias == Some(true);
        if self.attention_bias == Some(true) || mlp {
            return Err(unsupported(
                "attention_bias / mlp_bias",
                "linears with a bias are not supported",
            ));
        }
        Ok(())
    }

    /// Both generations: `rope_theta` with `rope_scaling`, or all in `rope_parameters`.
    fn rope_theta(&self) -> Result<f64, LoadError> {
        for (key, rope) in [
            ("rope_scaling", &self.rope_scaling),
            ("rope_parameters", &self.rope_parameters),
        ] {
            let Some(rope) = rope else { continue };
            let partial = rope.partial_rotary_factor.or(self.partial_rotary_factor);
            let untyped = rope.rope_type.is_none() && rope.legacy_type.is_none();
            if let Some(other) = rope.others.keys().next().filter(|_| untyped) {
                return Err(unsupported(key, &format!("{other:?} without a rope_type")));
            }
            if rope.kind() != "default" {
                return Err(unsupported(
                    key,
                    &format!("rope_type {:?}; only \"default\" is supported", rope.kind()),
                ));
            }
            if partial.is_some_and(|factor| factor != 1.0) {
                return Err(unsupported(key, "partial_rotary_factor is not supported"));
            }
        }
        if self
            .partial_rotary_factor
            .is_some_and(|factor| factor != 1.0)
        {
            return Err(unsupported("partial_rotary_factor", "not supported"));
        }
        match self.stored_theta() {
            // The frequencies are computed in f32, where a smaller or larger base makes them NaN.
            Some(theta) if theta > 0.0 && (theta as f32).is_normal() => Ok(theta),
            Some(theta) => Err(unsupported(
                "rope_theta",
                &format!("{theta} is no base of frequencies"),
            )),
            None => Err(unsupported(
                "rope_theta",
                "neither it nor one in rope_scaling or rope_parameters is there",
            )),
        }
    }

    /// Of the two objects the one counts that is there and not empty, `rope_scaling` first; a base inside
    /// it counts more than the one beside it.
    fn stored_theta(&self) -> Option<f64> {
        let scaling = self.rope_scaling.as_ref().filter(|rope| !rope.is_empty());
        scaling
            .or(self.rope_parameters.as_ref())
            .and_then(|rope| rope.rope_theta)
            .or(self.rope_theta)
    }

    fn quantization(&self) -> Result<Quantization, LoadError> {
        let Some(raw) = &self.quantization_config else {
            return Err(unsupported(
                "quantization_config",
                "missing: the linears of this checkpoint are not ternary",
            ));
        };
        if raw.quant_method.as_deref() != Some("bitnet") {
            return Err(unsupported(
                "quant_method",
                &format!("{:?}; only \"bitnet\" is supported", raw.quant_method),
            ));
        }
        let scale = match raw.linear_class.as_deref() {
            Some("autobitlinear") => ScaleDirection::Multiply,
            Some("bitlinear") | None => ScaleDirection::Divide,
            Some(other) => return Err(unsupported("linear_class", other)),
        };
        let online = match raw.quantization_mode.as_deref() {
            Some("online") => true,
            Some("offline") | None => false,
            Some(other) => return Err(unsupported("quantization_mode", other)),
        };
        let float_modules = raw
            .modules_to_not_convert
            .clone()
            .unwrap_or_else(|| vec!["lm_head".to_owned()]);
        if let Some(pattern) = float_modules
            .iter()
            .find(|p| p.is_empty() || p.contains(|c| r"*+?()[]{}|^$\".contains(c)))
        {
            return Err(unsupported(
                "modules_to_not_convert",
                &format!("{pattern:?} is not the name of a module"),
            ));
        }
        let input_norm_eps = raw
            .use_rms_norm
            .unwrap_or(false)
            .then(|| raw.rms_norm_eps.unwrap_or(1e-6));
        Ok(Quantization {
            scale,
            online,
            input_norm_eps,
            float_modules,
        })
    }
}

impl ModelConfig {
    /// With a negative or infinite epsilon, a norm makes every value NaN or zero.
    fn check_epsilons(&self) -> Result<(), LoadError> {
        let of_inputs = self.quantization.input_norm_eps;
        for (key, eps) in [
            ("rms_norm_eps", Some(self.norm_eps)),
            ("quantization_config.rms_norm_eps", of_inputs),
        ] {
            if let Some(eps) = eps.filter(|eps| !eps.is_finite() || *eps < 0.0) {
                return Err(unsupported(
                    key,
                    &format!("{eps} is no epsilon; it must be finite and not negative"),
                ));
            }
        }
        Ok(())
    }

    fn check_sizes(&self) -> Result<(), LoadError> {
        let sizes = [
            ("vocab_size", self.vocab),
            ("hidden_size", self.hidden),
            ("intermediate_size", self.intermediate),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position),
        ];
        for (key, size) in sizes {
            // The cap keeps every product of two sizes far from overflow; what is really read is bounded
            // by the file.
            if !(1..=1 << 24).contains(&size) {
                return Err(unsupported(key, &format!("{size} is out of range")));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(unsupported(
                "num_key_value_heads",
                "does not divide num_attention_heads",
            ));
        }
        if !self.head_dim.is_multiple_of(HEAD_LANES) {
            return Err(unsupported(
                "head_dim",
                &format!("{} is not a multiple of {HEAD_LANES}", self.head_dim),
            ));
        }
        if self.head_dim > sterna_kernels::MAX_HEAD_DIM {
            return Err(unsupported(
                "head_dim",
                &format!("more than {} values", sterna_kernels::MAX_HEAD_DIM),
            ));
        }
        if self.architecture == Architecture::BitNet && self.heads * self.head_dim != self.hidden {
            // The norm before the output projection has hidden_size weights.
            return Err(unsupported(
                "head_dim",
                "num_attention_heads * head_dim is not hidden_size",
            ));
        }
        if self
            .hidden
            .max(self.intermediate)
            .max(self.heads * self.head_dim)
            > sterna_kernels::MAX_COLUMNS
        {
            return Err(unsupported(
                "intermediate_size",
                &format!("more than {} columns", sterna_kernels::MAX_COLUMNS),
            ));
        }
        if self.tied && !self.is_float("lm_head") {
            return Err(unsupported(
                "modules_to_not_convert",
                "lm_head is tied to the embedding, so it must be listed",
            ));
        }
        Ok(())
    }
}

/// Every place that says how an answer ends.
fn eos_tokens(source: &Source, raw: &RawConfig, vocab: usize) -> Result<Vec<u32>, LoadError> {
    #[derive(Deserialize)]
    struct Generation {
        eos_token_id: Option<TokenIds>,
    }
    let mut tokens = BTreeSet::new();
    tokens.extend(raw.eos_token_id.iter().flat_map(TokenIds::as_slice));
    if let Some(text) = source.read("generation_config.json")? {
        let generation: Generation = parse("generation_config.json", &text)?;
        tokens.extend(generation.eos_token_id.iter().flat_map(TokenIds::as_slice));
    }
    tokens.extend(tokenizer_eos(source)?);
    for token in tokens.iter().filter(|&&token| token as usize >= vocab) {
        tracing::warn!(
            token,
            vocab,
            "an end-of-sequence token is outside the vocabulary and can never occur"
        );
    }
    Ok(tokens
        .into_iter()
        .filter(|&token| (token as usize) < vocab)
        .collect())
}

/// The id of the tokenizer's `eos_token`.
fn tokenizer_eos(source: &Source) -> Result<Option<u32>, LoadError> {
    let name = "tokenizer_config.json";
    let Some(text) = source.read(name)? else {
        return Ok(None);
    };
    let config: Value = parse(name, &text)?;
    let eos = &config["eos_token"];
    let Some(eos) = eos.as_str().or_else(|| eos["content"].as_str()) else {
        return Ok(None);
    };
    if let Some(added) = config["added_tokens_decoder"].as_object() {
        let id = added
            .iter()
            .find(|(_, token)| token["content"] == eos)
            .and_then(|(id, _)| id.parse().ok());
        if id.is_some() {
            return Ok(id);
        }
    }
    let Some(text) = source.read("tokenizer.json")? else {
        return Ok(None);
    };
    match token_id(eos, &text)? {
        Some(id) => Ok(Some(id)),
        None => Err(unsupported(
            "eos_token",
            &format!("{eos:?} is not a token of tokenizer.json"),
        )),
    }
}

/// The id of `token` in a `tokenizer.json`. Its vocabulary is large, so it is only read if the added tokens lack the token.
fn token_id(token: &str, tokenizer: &[u8]) -> Result<Option<u32>, LoadError> {
    #[derive(Deserialize)]
    struct Added {
        #[serde(default)]
        added_tokens: Value,
    }
    let Added { added_tokens } = parse("tokenizer.json", tokenizer)?;
    let added = added_tokens
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    let id = match added.iter().find(|added| added["content"] == token) {
        Some(added) => added["id"].as_u64(),
        None => {
            let whole: Value = parse("tokenizer.json", tokenizer)?;
            whole["model"]["vocab"][token].as_u64()
        }
    };
    Ok(id.and_then(|id| u32::try_from(id).ok()))
}

fn parse<'a, T: Deserialize<'a>>(file: &str, text: &'a [u8]) -> Result<T, LoadError> {
    serde_json::from_slice(text).map_err(|error| LoadError::File {
        file: file.to_owned(),
        problem: error.to_string(),
    })
}

fn unsupported(key: &str, problem: &str) -> LoadError {
    LoadError::Config {
        key: key.to_owned(),
        problem: problem.to_owned(),
    }
}

#[cfg(test)]
mod tests;
