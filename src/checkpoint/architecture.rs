//! Model families, as descriptions that the one transformer layer follows.
//!
//! To add a family: write its [`Architecture`] beside [`LLAMA`], and list it in [`ALL`]. If the
//! family computes something new, add a field to the description and let the layer follow that
//! field.

use serde::{Deserialize, Serialize};

/// All families that this engine computes. Two families may have the same class. The later family
/// in this list has norms that the earlier family lacks, so the tensors of a checkpoint tell the
/// families apart.
pub(crate) const ALL: [&Architecture; 11] = [
    &BITNET,
    &LLAMA,
    &QWEN2,
    &FAST_DLLM,
    &QWEN3,
    &BITNET_QWEN3,
    &BITNET_GEMMA3,
    &QWEN3_5,
    &MIXTRAL,
    &QWEN3_MOE,
    &MAPLE,
];

/// BitNet b1.58, as in Microsoft's 2B-4T: Llama with squared ReLU, and a norm before each output
/// projection ("sub-norm").
pub const BITNET: Architecture = Architecture {
    class: "BitNetForCausalLM",
    headless_class: "BitNetModel",
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
    ..LLAMA
};

/// Llama with ternary linears, as in the Falcon3 and Llama3-8B-1.58 checkpoints.
pub const LLAMA: Architecture = Architecture {
    class: "LlamaForCausalLM",
    headless_class: "LlamaModel",
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
        attention_post_norm: None,
        feed_forward_norm: "post_attention_layernorm",
        gate: "mlp.gate_proj",
        up: "mlp.up_proj",
        feed_forward_sub_norm: None,
        down: "mlp.down_proj",
        feed_forward_post_norm: None,
        input_norm: None,
        recurrent: None,
        experts: None,
    },
    norm_offset: 0.0,
    scales_embedding: false,
    is_tied: false,
    has_biases: false,
    is_block_causal: false,
    has_attention_gate: false,
    activation: Activation::Silu,
    norm_eps: 1e-6,
    bias_fields: &["attention_bias", "mlp_bias"],
    scale: ScaleDirection::Divide,
    may_be_unpacked: false,
};

/// Qwen 2 and 2.5 with ternary linears: Llama with biases of query, key and value.
pub const QWEN2: Architecture = Architecture {
    class: "Qwen2ForCausalLM",
    headless_class: "Qwen2Model",
    model_type: "qwen2",
    has_biases: true,
    bias_fields: &[],
    scale: ScaleDirection::Multiply,
    may_be_unpacked: true,
    ..LLAMA
};

/// Fast-dLLM v2: Qwen 2.5, trained to fill blocks of masked tokens by block-causal attention.
pub const FAST_DLLM: Architecture = Architecture {
    class: "Fast_dLLM_QwenForCausalLM",
    headless_class: "Fast_dLLM_QwenModel",
    model_type: "Fast_dLLM_Qwen",
    is_block_causal: true,
    ..QWEN2
};

/// Qwen 3 with ternary linears, as in the Bonsai checkpoints: Llama with a norm of each query and
/// key head.
pub const QWEN3: Architecture = Architecture {
    class: "Qwen3ForCausalLM",
    headless_class: "Qwen3Model",
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

/// Qwen 3 as in BitNet-embedding-0.6B: each linear of a layer has a norm on its input. Without a
/// `quantization_config` the weights are masters, as that model's own code has it.
pub const BITNET_QWEN3: Architecture = Architecture {
    layer: LayerModules {
        input_norm: Some("norm"),
        ..QWEN3.layer
    },
    may_be_unpacked: false,
    ..QWEN3
};

/// Gemma 3 as in BitNet-embedding-270M: norms after attention and after feed-forward, norm weights
/// that are stored less 1, and a norm on the input of each linear.
pub const BITNET_GEMMA3: Architecture = Architecture {
    class: "Gemma3ForCausalLM",
    headless_class: "Gemma3TextModel",
    model_type: "gemma3_text",
    layer: LayerModules {
        attention_post_norm: Some("post_attention_layernorm"),
        feed_forward_norm: "pre_feedforward_layernorm",
        feed_forward_post_norm: Some("post_feedforward_layernorm"),
        ..BITNET_QWEN3.layer
    },
    activation: Activation::GeluTanh,
    norm_offset: 1.0,
    scales_embedding: true,
    is_tied: true,
    ..BITNET_QWEN3
};

/// Qwen 3.5 with ternary linears, as in the Bonsai 2 checkpoints: Qwen 3 with recurrent layers
/// between those that attend, and a gate after attention.
pub const QWEN3_5: Architecture = Architecture {
    class: "Qwen3_5ForCausalLM",
    headless_class: "Qwen3_5TextModel",
    model_type: "qwen3_5_text",
    layer: LayerModules {
        recurrent: Some(RecurrentModules {
            qkv: "linear_attn.in_proj_qkv",
            gate: "linear_attn.in_proj_z",
            strength: "linear_attn.in_proj_b",
            step: "linear_attn.in_proj_a",
            convolution: "linear_attn.conv1d",
            step_bias: "linear_attn.dt_bias",
            decay: "linear_attn.A_log",
            norm: "linear_attn.norm",
            output: "linear_attn.out_proj",
        }),
        ..QWEN3.layer
    },
    norm_offset: 1.0,
    has_attention_gate: true,
    ..QWEN3
};

/// Mixtral with ternary experts: Llama with mixtures in place of the feed-forward halves.
pub const MIXTRAL: Architecture = Architecture {
    class: "MixtralForCausalLM",
    headless_class: "MixtralModel",
    model_type: "mixtral",
    layer: LayerModules {
        experts: Some(ExpertModules {
            router: "block_sparse_moe.gate",
            experts: "block_sparse_moe.experts",
            gate: "w1",
            up: "w3",
            down: "w2",
        }),
        ..LLAMA.layer
    },
    norm_eps: 1e-5,
    bias_fields: &["attention_bias"],
    scale: ScaleDirection::Multiply,
    may_be_unpacked: true,
    ..LLAMA
};

/// Qwen 3 MoE with ternary experts: Qwen 3 with mixtures in most layers.
pub const QWEN3_MOE: Architecture = Architecture {
    class: "Qwen3MoeForCausalLM",
    headless_class: "Qwen3MoeModel",
    model_type: "qwen3_moe",
    layer: LayerModules {
        experts: Some(ExpertModules {
            router: "mlp.gate",
            experts: "mlp.experts",
            gate: "gate_proj",
            up: "up_proj",
            down: "down_proj",
        }),
        ..QWEN3.layer
    },
    ..QWEN3
};

/// Maple: Qwen 3 MoE with layers that attend to near tokens. Those rotate a part of each head, and
/// the others rotate nothing.
pub const MAPLE: Architecture = Architecture {
    class: "MapleForCausalLM",
    headless_class: "MapleModel",
    model_type: "maple",
    bias_fields: &["attention_bias", "mlp_bias"],
    ..QWEN3_MOE
};

/// What distinguishes a model family. A field that `config.json` can override is a default here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Architecture {
    /// The name in `architectures` of `config.json`.
    pub class: &'static str,
    /// The name in `architectures` of checkpoints without an output head, which compute embeddings
    /// of texts.
    pub headless_class: &'static str,
    /// The name in `model_type` of `config.json`.
    pub model_type: &'static str,
    /// The modules of a layer. An optional norm that the family lacks is `None`.
    pub layer: LayerModules,
    /// The default function of the gate.
    pub activation: Activation,
    /// The default epsilon of the norms.
    pub norm_eps: f32,
    /// What Hugging Face files subtract from the weights of norms, except of input norms.
    pub norm_offset: f32,
    /// Whether the embeddings of tokens are multiplied by the root of the hidden size.
    pub scales_embedding: bool,
    /// The default of `tie_word_embeddings`.
    pub is_tied: bool,
    /// Whether query, key and value have biases.
    pub has_biases: bool,
    /// Whether the model was trained for block-causal attention: see
    /// [`CommittedAttention`](super::CommittedAttention).
    pub is_block_causal: bool,
    /// Whether the query projection also gives a gate for the output of attention, by head: the
    /// query, then the gate.
    pub has_attention_gate: bool,
    /// The fields of `config.json` that add other biases to linears of this family. This engine
    /// does not compute them, so it refuses a checkpoint that sets one of them.
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
    /// The norm after the output projection.
    pub attention_post_norm: Option<&'static str>,
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
    /// The norm after the down projection.
    pub feed_forward_post_norm: Option<&'static str>,
    /// The norm on the input of each linear, after the name of the linear.
    pub input_norm: Option<&'static str>,
    /// The modules of a recurrent layer in place of those of attention.
    pub recurrent: Option<RecurrentModules>,
    /// The modules of a mixture in place of gate, up and down.
    pub experts: Option<ExpertModules>,
}

/// The names of a mixture's modules, as in [`LayerModules`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertModules {
    /// The projection to a logit for each expert. Never ternary.
    pub router: &'static str,
    /// The prefix of the experts: `.N.` and the name of a linear follow.
    pub experts: &'static str,
    /// The gate projection of an expert.
    pub gate: &'static str,
    /// The up projection of an expert.
    pub up: &'static str,
    /// The down projection of an expert.
    pub down: &'static str,
}

/// The names of a recurrent layer's modules, as in [`LayerModules`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecurrentModules {
    /// The projection to the channels of the convolution: queries, keys, values.
    pub qkv: &'static str,
    /// The projection to the gate of the output.
    pub gate: &'static str,
    /// The projection to the strength of each value head's update. Never ternary.
    pub strength: &'static str,
    /// The projection to the step of each value head, which the decay follows. Never ternary.
    pub step: &'static str,
    /// The weights of the convolution, by channel.
    pub convolution: &'static str,
    /// What is added to the steps. A tensor without a part.
    pub step_bias: &'static str,
    /// The rate of decay of each value head. A tensor without a part.
    pub decay: &'static str,
    /// The norm of each value head before the gate. Its weights have no offset.
    pub norm: &'static str,
    /// The output projection.
    pub output: &'static str,
}

impl ExpertModules {
    fn has(&self, module: &str) -> bool {
        let of_expert = || {
            if self.merged(module).is_some() {
                return Some(true);
            }
            let rest = module.strip_prefix(self.experts)?.strip_prefix('.')?;
            let (expert, linear) = rest.split_once('.')?;
            expert.parse::<u32>().ok()?;
            Some([self.gate, self.up, self.down].contains(&linear))
        };
        module == self.router || of_expert().unwrap_or(false)
    }
}

impl RecurrentModules {
    fn names(&self) -> [&'static str; 9] {
        [
            self.qkv,
            self.gate,
            self.strength,
            self.step,
            self.convolution,
            self.step_bias,
            self.decay,
            self.norm,
            self.output,
        ]
    }
}

impl LayerModules {
    /// Returns the names of the modules that the family has.
    pub(crate) fn names(&self) -> Vec<&'static str> {
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
            self.attention_post_norm,
            self.feed_forward_sub_norm,
            self.feed_forward_post_norm,
        ];
        let optional = optional.into_iter().flatten();
        let recurrent = self.recurrent.iter().flat_map(RecurrentModules::names);
        always
            .into_iter()
            .chain(optional)
            .chain(recurrent)
            .collect()
    }

    /// Returns whether the family has a module of this name.
    pub(crate) fn has(&self, module: &str) -> bool {
        self.names().contains(&module) || self.experts.is_some_and(|experts| experts.has(module))
    }

    /// Returns the name of the norm on the input of a linear, if the family has such norms.
    pub(crate) fn input_norm_of(&self, linear: &str) -> Option<String> {
        self.input_norm.map(|norm| format!("{linear}.{norm}"))
    }
}

impl Architecture {
    /// Returns whether a module of a layer has a bias.
    pub(crate) fn has_bias(&self, module: &str) -> bool {
        let layer = &self.layer;
        let biased = [layer.query, layer.key, layer.value];
        self.has_biases && biased.iter().any(|biased| module.ends_with(biased))
    }

    /// Returns the family of the same class whose linears have input norms, if there is one.
    pub(crate) fn with_input_norms(&self) -> Option<&'static Architecture> {
        let mut all = ALL.into_iter();
        all.find(|other| other.class == self.class && other.layer.input_norm.is_some())
    }

    /// Returns the class of a checkpoint with or without an output head.
    pub(crate) fn class_of(&self, has_head: bool) -> &'static str {
        if has_head {
            self.class
        } else {
            self.headless_class
        }
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
    /// x · Φ(x), where Φ is the normal distribution, computed with a hyperbolic tangent.
    #[serde(rename = "gelu_pytorch_tanh", alias = "gelu_new")]
    GeluTanh,
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
