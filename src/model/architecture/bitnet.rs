//! BitNet b1.58, as in Microsoft's 2B-4T: Llama with squared ReLU, and a norm before each output
//! projection ("sub-norm").

use super::description::{Activation, Architecture, LayerModules, ScaleDirection};
use super::llama::LLAMA;

/// `BitNetForCausalLM`.
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
};
