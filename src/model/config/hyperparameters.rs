//! The hyperparameters of a model.

use crate::model::architecture::{Activation, Architecture, Rotary, ScaleDirection};

/// The hyperparameters of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The model family.
    pub architecture: &'static Architecture,
    /// The number of token ids, and of logits in a row.
    pub vocab: usize,
    /// The number of values in a hidden state.
    pub hidden: usize,
    /// The number of values between gate and down in the feed-forward half.
    pub intermediate: usize,
    /// The number of layers.
    pub layers: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of key-value heads; divides `heads`.
    pub kv_heads: usize,
    /// The number of values in a head, a multiple of 16.
    pub head_dim: usize,
    /// The number of positions that the model was trained for.
    pub max_position: usize,
    /// The rotary embedding.
    pub rotary: Rotary,
    /// The epsilon of the norms.
    pub norm_eps: f32,
    /// The function of the gate.
    pub activation: Activation,
    /// Whether the output head is the embedding.
    pub tied: bool,
    /// How the linears were made ternary.
    pub quantization: Quantization,
    /// The stop tokens: the union over `config.json`, `generation_config.json` and the tokenizer,
    /// ascending.
    pub eos_tokens: Vec<u32>,
    /// The token that begins a text.
    pub bos_token: Option<u32>,
}

/// How the linears were made ternary.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantization {
    /// What a stored scale does.
    pub scale: ScaleDirection,
    /// Whether the checkpoint holds float master weights, which are made ternary on loading.
    pub online: bool,
    /// The epsilon of the norm on the input of every ternary linear, if there is one
    /// (`use_rms_norm`).
    pub input_norm_eps: Option<f32>,
    /// The modules that stay float: prefixes that end at a dot, or suffixes. If the checkpoint does
    /// not say, this is the output head.
    pub float_modules: Vec<String>,
}

impl ModelConfig {
    /// Returns the number of query heads that share a key-value head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns whether the linear `module` (such as `model.layers.0.mlp.up_proj`) stays float.
    #[must_use]
    pub fn is_float(&self, module: &str) -> bool {
        self.quantization.float_modules.iter().any(|pattern| {
            let rest = module.strip_prefix(pattern.as_str());
            let is_prefix = rest.is_some_and(|rest| {
                rest.is_empty() || rest.starts_with('.') || pattern.ends_with('.')
            });
            is_prefix || module.ends_with(pattern.as_str())
        })
    }
}
