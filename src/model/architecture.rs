//! Model families, as descriptions that the one transformer layer follows.
//!
//! To add a family: write its [`Architecture`] beside [`LLAMA`], and list it in [`ALL`]. If the
//! family computes something new, add a field to the description and let the layer follow that
//! field.

use serde::{Deserialize, Serialize};

/// All families that this engine computes.
pub(super) const ALL: [&Architecture; 3] = [&BITNET, &LLAMA, &QWEN3];

/// BitNet b1.58, as in Microsoft's 2B-4T: Llama with squared ReLU, and a norm before each output
/// projection ("sub-norm").
pub const BITNET: Architecture = Architecture {
    class: "BitNetForCausalLM",
    model_type: "bitnet",
    layer: LayerModules {
        attention_sub_norm: Some("self_attn.attn_sub_norm"),
        feed_forward_sub_norm: Some("mlp.ffn_sub_norm"),
        ..LLAMA.layer
    },
    activation: Activation::Relu2,
    norm_eps: 1e-5,
    bias_fields: &["attention_bias"],
    scale: ScaleDirection::Multiply,
    may_be_unpacked: false,
};

/// Llama with ternary linears, as in the Falcon3 and Llama3-8B-1.58 checkpoints.
pub const LLAMA: Architecture = Architecture {
    class: "LlamaForCausalLM",
    model_type: "llama",
    layer: LayerModules {
        attention_norm: "input_layernorm",
        query: "self_attn.q_proj",
        query_norm: None,
        key: "self_attn.k_proj",
        key_norm: None,
        value: "self_attn.v_proj",
        attention_sub_norm: None,
        attention_output: "self_attn.o_proj",
        feed_forward_norm: "post_attention_layernorm",
        gate: "mlp.gate_proj",
        up: "mlp.up_proj",
        feed_forward_sub_norm: None,
        down: "mlp.down_proj",
    },
    activation: Activation::Silu,
    norm_eps: 1e-6,
    bias_fields: &["attention_bias", "mlp_bias"],
    scale: ScaleDirection::Divide,
    may_be_unpacked: false,
};

/// Qwen 3 with ternary linears, as in the Bonsai checkpoints: Llama with a norm of each query and
/// key head.
pub const QWEN3: Architecture = Architecture {
    class: "Qwen3ForCausalLM",
    model_type: "qwen3",
    layer: LayerModules {
        query_norm: Some("self_attn.q_norm"),
        key_norm: Some("self_attn.k_norm"),
        ..LLAMA.layer
    },
    bias_fields: &["attention_bias"],
    scale: ScaleDirection::Multiply,
    may_be_unpacked: true,
    ..LLAMA
};

/// What distinguishes a model family. A field that `config.json` can override is a default here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Architecture {
    /// The name in `architectures` of `config.json`.
    pub class: &'static str,
    /// The name in `model_type` of `config.json`.
    pub model_type: &'static str,
    /// The modules of a layer. An optional norm that the family lacks is `None`.
    pub layer: LayerModules,
    /// The default function of the gate.
    pub activation: Activation,
    /// The default epsilon of the norms.
    pub norm_eps: f32,
    /// The fields of `config.json` that add biases to linears of this family. This engine computes
    /// no biases, so it refuses a checkpoint that sets one of them.
    pub bias_fields: &'static [&'static str],
    /// What stored scales do in the family's published checkpoints. `config.json` states it, so
    /// this is only for synthetic checkpoints.
    pub scale: ScaleDirection,
    /// Whether published checkpoints hold floats that are ternary already, without a
    /// `quantization_config`.
    pub may_be_unpacked: bool,
}

/// The names of a layer's modules, after the prefix `model.layers.N.`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerModules {
    /// The norm before query, key and value.
    pub attention_norm: &'static str,
    /// The query projection.
    pub query: &'static str,
    /// The norm of each query head before it is rotated.
    pub query_norm: Option<&'static str>,
    /// The key projection.
    pub key: &'static str,
    /// The norm of each key head before it is rotated.
    pub key_norm: Option<&'static str>,
    /// The value projection.
    pub value: &'static str,
    /// The norm before the output projection.
    pub attention_sub_norm: Option<&'static str>,
    /// The output projection.
    pub attention_output: &'static str,
    /// The norm before gate and up.
    pub feed_forward_norm: &'static str,
    /// The gate projection.
    pub gate: &'static str,
    /// The up projection.
    pub up: &'static str,
    /// The norm before the down projection.
    pub feed_forward_sub_norm: Option<&'static str>,
    /// The down projection.
    pub down: &'static str,
}

impl LayerModules {
    /// Returns the names of the modules that the family has.
    pub(super) fn names(&self) -> Vec<&'static str> {
        let always = [
            self.attention_norm,
            self.query,
            self.key,
            self.value,
            self.attention_output,
            self.feed_forward_norm,
            self.gate,
            self.up,
            self.down,
        ];
        let optional = [
            self.query_norm,
            self.key_norm,
            self.attention_sub_norm,
            self.feed_forward_sub_norm,
        ];
        let optional = optional.into_iter().flatten();
        always.into_iter().chain(optional).collect()
    }
}

/// The function of the gate in the feed-forward half of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    /// y = (W·q / s) · weight_scale.
    Multiply,
    /// y = W·q / (s · weight_scale).
    Divide,
}

impl ScaleDirection {
    /// Both directions.
    pub const ALL: [ScaleDirection; 2] = [ScaleDirection::Multiply, ScaleDirection::Divide];

    /// Returns the `linear_class` in `config.json` that means this direction.
    pub fn linear_class(self) -> &'static str {
        match self {
            ScaleDirection::Multiply => "autobitlinear",
            ScaleDirection::Divide => "bitlinear",
        }
    }
}
