//! Llama with ternary linears, as in the Falcon3 and Llama3-8B-1.58 checkpoints.

use super::description::{Activation, Architecture, LayerModules, ScaleDirection};

/// `LlamaForCausalLM`.
pub const LLAMA: Architecture = Architecture {
    class: "LlamaForCausalLM",
    model_type: "llama",
    layer: LayerModules {
        attention_norm: "input_layernorm",
        query: "self_attn.q_proj",
        key: "self_attn.k_proj",
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
};
