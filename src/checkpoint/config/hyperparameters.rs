//! The hyperparameters of a model, and their limits: what the kernels compute and what makes sense.

use super::experts::Experts;
use super::masked_blocks::{CommittedAttention, MaskedBlocks};
use super::pooling::Pooling;
use super::recurrent::RecurrentLayers;
use super::rope::RopeScaling;
use super::rotation::Rotation;
use crate::checkpoint::architecture::{Activation, Architecture, ScaleDirection};
use crate::checkpoint::{LoadResult, require};

/// The attention kernels divide a head into vectors of this many values.
const HEAD_VECTOR: usize = 16;

/// The largest head of a recurrent layer, and the most tokens that its convolution sees.
const MAX_STATE_DIM: usize = 1024;
pub(crate) const MAX_TAPS: usize = 16;

/// The largest size of any kind. It keeps every product of two sizes far from overflow. How much is
/// really read is bounded by the file.
const MAX_SIZE: usize = 1 << 24;

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
    /// The base of the frequencies of the rotary embedding.
    pub rope_theta: f64,
    /// How the frequencies of the rotary embedding are changed for long contexts.
    pub rope_scaling: RopeScaling,
    /// The number of values of a head that are rotated by its position: the first ones.
    pub rotary_dim: usize,
    /// The layers that are recurrent, if there are such layers.
    pub recurrent: Option<RecurrentLayers>,
    /// The mixtures of experts, if there are such layers.
    pub experts: Option<Experts>,
    /// The layers that attend to near tokens only, if there are such layers.
    pub local: Option<LocalLayers>,
    /// What the products of query and key are multiplied by, as a multiple of 1 / √head_dim.
    /// Architectures with norms of the query heads may have another factor than 1.
    pub query_factor: f32,
    /// The epsilon of the norms.
    pub norm_eps: f32,
    /// The function of the gate.
    pub activation: Activation,
    /// Whether there is an output head. Without one, a model computes no logits.
    pub has_head: bool,
    /// Whether the output head is the embedding.
    pub tied: bool,
    /// How the hidden states of a text become its embedding.
    pub pooling: Pooling,
    /// How the linears were made ternary.
    pub quantization: Quantization,
    /// How the files call tensors of parts that text generation does not need: prefixes.
    pub unused_parts: Vec<String>,
    /// Which weights are rotated, if any.
    pub rotation: Option<Rotation>,
    /// The stop tokens: the union over `config.json`, `generation_config.json` and the tokenizer,
    /// ascending.
    pub eos_tokens: Vec<u32>,
    /// The token that begins a text.
    pub bos_token: Option<u32>,
    /// The masked blocks that the model was trained to fill, if it was.
    pub masked_blocks: Option<MaskedBlocks>,
}

impl ModelConfig {
    /// Returns the tokens that begin and end a text.
    pub fn named_tokens(&self) -> Vec<u32> {
        let begin = self.bos_token.into_iter();
        begin.chain(self.eos_tokens.iter().copied()).collect()
    }
}

/// The layers that attend to near tokens only. Their frequencies are not scaled.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalLayers {
    /// Whether each layer of the model attends to near tokens only.
    pub is_local: Vec<bool>,
    /// The base of their rotary frequencies.
    pub rope_theta: f64,
    /// The number of tokens that a token attends to, itself included.
    pub window: usize,
    /// Whether queries and keys are rotated in these layers alone. The others know no positions.
    pub rotates_alone: bool,
}

/// How the linears were made ternary.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantization {
    /// What a stored scale does.
    pub scale: ScaleDirection,
    /// What the checkpoint holds for a ternary linear.
    pub stored: StoredWeights,
    /// The epsilon of the norm on the input of every ternary linear, if there is one
    /// (`use_rms_norm`).
    pub input_norm_eps: Option<f32>,
    /// The modules that stay float: prefixes that end at a dot, or suffixes. If the checkpoint does
    /// not say, this is the output head.
    pub float_modules: Vec<String>,
}

impl Quantization {
    /// How a checkpoint is stored if its configuration does not say it.
    pub(super) const UNPACKED: Quantization = Quantization {
        scale: ScaleDirection::Multiply,
        stored: StoredWeights::Unpacked,
        input_norm_eps: None,
        float_modules: Vec::new(),
    };

    /// How a checkpoint with input norms is stored if its configuration does not say it.
    pub(super) fn masters() -> Quantization {
        Quantization {
            stored: StoredWeights::Masters,
            float_modules: vec!["lm_head".to_owned()],
            ..Quantization::UNPACKED
        }
    }

    /// How a `.bin` file is stored if its configuration does not say it: the converter made the
    /// linears ternary, and the scale of each linear is a factor.
    pub(super) fn packed_file() -> Quantization {
        Quantization {
            stored: StoredWeights::Packed,
            float_modules: vec!["lm_head".to_owned()],
            ..Quantization::UNPACKED
        }
    }
}

/// What a checkpoint holds for a ternary linear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredWeights {
    /// Packed weights, or the floats −1, 0 and 1, with a scale.
    Packed,
    /// Float master weights, which are made ternary on loading (`quantization_mode` is "online").
    Masters,
    /// Floats that are ternary already: each is −s, 0 or s, where s belongs to a group of columns
    /// or to the whole tensor.
    Unpacked,
}

impl ModelConfig {
    /// Returns the number of query heads that share a key-value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns whether the linear `module` (such as `model.layers.0.mlp.up_proj`) stays float.
    pub fn is_float(&self, module: &str) -> bool {
        self.quantization.float_modules.iter().any(|pattern| {
            let rest = module.strip_prefix(pattern.as_str());
            let is_prefix = rest.is_some_and(|rest| {
                rest.is_empty() || rest.starts_with('.') || pattern.ends_with('.')
            });
            is_prefix || module.ends_with(pattern.as_str())
        })
    }

    /// Returns the name of the norm on the input of the linear `module`, and its epsilon, if
    /// ternary linears have such norms.
    pub(crate) fn input_norm(&self, module: &str) -> Option<(String, f32)> {
        let of_family = self.architecture.layer.input_norm_of(module);
        let of_family = of_family.map(|name| (name, self.norm_eps));
        let eps = self.quantization.input_norm_eps;
        of_family.or_else(|| eps.map(|eps| (format!("{module}.rms_norm"), eps)))
    }

    /// Returns whether a layer attends to near tokens only.
    pub(crate) fn is_local(&self, layer: usize) -> bool {
        let local = self.local.as_ref();
        local.is_some_and(|local| local.is_local[layer])
    }

    /// Returns the rows of the query projection: the queries, and the gates if there are any.
    pub fn query_rows(&self) -> usize {
        let parts = 1 + usize::from(self.architecture.has_attention_gate);
        parts * self.heads * self.head_dim
    }

    /// Returns the mixture of a layer, if its feed-forward half is one.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        let experts = self.experts.as_ref();
        experts.filter(|experts| !experts.is_dense[layer])
    }

    /// Returns whether a layer is recurrent.
    pub fn is_recurrent(&self, layer: usize) -> bool {
        let recurrent = self.recurrent.as_ref();
        recurrent.is_some_and(|recurrent| recurrent.is_recurrent[layer])
    }

    /// Returns the number of layers that attend, and so have keys and values.
    pub fn attention_layers(&self) -> usize {
        self.layers - self.recurrent.as_ref().map_or(0, RecurrentLayers::layers)
    }

    /// Returns the number of values in the widest input row of a linear.
    pub(crate) fn max_width(&self) -> usize {
        let recurrent = self.recurrent.as_ref().map_or(0, RecurrentLayers::values);
        let experts = self.experts.as_ref();
        let experts = experts.map_or(0, |experts| experts.intermediate.max(experts.count));
        (self.hidden)
            .max(self.intermediate)
            .max(self.heads * self.head_dim)
            .max(recurrent)
            .max(experts)
    }

    /// # Errors
    /// If a size or epsilon is out of range, or two of them contradict each other.
    pub(super) fn check(&self) -> LoadResult<()> {
        self.check_epsilons()?;
        // The frequencies are computed in f32, where a smaller or larger base makes them NaN.
        let local = self.local.iter().map(|local| local.rope_theta);
        for theta in std::iter::once(self.rope_theta).chain(local) {
            let is_usable = theta > 0.0 && (theta as f32).is_normal();
            let problem = format_args!("must be positive and fit a 32-bit float; got {theta}");
            require(is_usable, "rope_theta", problem)?;
        }
        self.check_ranges()?;
        self.check_heads()?;
        self.check_recurrent()?;
        self.check_masked_blocks()?;
        let (widest, limit) = (self.max_width(), sterna_kernels::MAX_COLUMNS);
        require(
            widest <= limit,
            "intermediate_size",
            format_args!("a row of {widest} values is too wide; the limit is {limit}"),
        )?;
        require(
            self.architecture.layer.input_norm.is_none()
                || self.quantization.input_norm_eps.is_none(),
            "use_rms_norm",
            "must be false, because the linears have input norms of another name",
        )?;
        require(
            !self.tied
                || !self.has_head
                || self.is_float("lm_head")
                || self.quantization.stored == StoredWeights::Unpacked,
            "modules_to_not_convert",
            "must list lm_head, because tie_word_embeddings makes it the (float) embedding",
        )
    }

    /// A norm with a negative or infinite epsilon makes every value NaN or zero.
    fn check_epsilons(&self) -> LoadResult<()> {
        let input_norm_eps = self.quantization.input_norm_eps.unwrap_or_default();
        for (field, eps) in [
            ("rms_norm_eps", self.norm_eps),
            ("quantization_config.rms_norm_eps", input_norm_eps),
        ] {
            let problem = format_args!("must be finite and not negative; got {eps}");
            require(eps.is_finite() && eps >= 0.0, field, problem)?;
        }
        Ok(())
    }

    fn check_ranges(&self) -> LoadResult<()> {
        for (field, size) in [
            ("vocab_size", self.vocab),
            ("hidden_size", self.hidden),
            ("intermediate_size", self.intermediate),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position),
        ] {
            let problem = format_args!("must be between 1 and {MAX_SIZE}; got {size}");
            require((1..=MAX_SIZE).contains(&size), field, problem)?;
        }
        Ok(())
    }

    fn check_heads(&self) -> LoadResult<()> {
        let (heads, kv_heads, head_dim) = (self.heads, self.kv_heads, self.head_dim);
        let problem = format_args!("must divide num_attention_heads ({heads}); got {kv_heads}");
        require(
            heads.is_multiple_of(kv_heads),
            "num_key_value_heads",
            problem,
        )?;
        let limit = sterna_kernels::MAX_HEAD_DIM;
        require(
            head_dim.is_multiple_of(HEAD_VECTOR) && head_dim <= limit,
            "head_dim",
            format_args!("must be a multiple of {HEAD_VECTOR}, at most {limit}; got {head_dim}"),
        )?;
        let rotated = self.rotary_dim;
        require(
            rotated.is_multiple_of(2) && (2..=head_dim).contains(&rotated),
            "partial_rotary_factor",
            format_args!("rotates {rotated} values of a head; must be even, at most {head_dim}"),
        )?;
        // The norm before the output projection has hidden_size weights.
        let has_sub_norm = self.architecture.layer.attention_sub_norm.is_some();
        let (width, hidden) = (heads * head_dim, self.hidden);
        require(
            !has_sub_norm || width == hidden,
            "head_dim",
            format_args!(
                "num_attention_heads * head_dim ({width}) must equal hidden_size ({hidden})"
            ),
        )
    }

    /// A model that fills no blocks would compute causal attention.
    fn check_masked_blocks(&self) -> LoadResult<()> {
        let attention = self.masked_blocks.map(|blocks| blocks.committed_attention);
        let fills_blocks = self.has_head && self.recurrent.is_none();
        require(
            fills_blocks || attention != Some(CommittedAttention::BlockCausal),
            "committed_attention",
            "must be causal for a model that is recurrent or has no head",
        )
    }

    fn check_recurrent(&self) -> LoadResult<()> {
        let Some(recurrent) = &self.recurrent else {
            return Ok(());
        };
        for (field, size, limit) in [
            ("linear_num_key_heads", recurrent.key_heads, MAX_SIZE),
            ("linear_num_value_heads", recurrent.value_heads, MAX_SIZE),
            ("linear_key_head_dim", recurrent.key_dim, MAX_STATE_DIM),
            ("linear_value_head_dim", recurrent.value_dim, MAX_STATE_DIM),
            ("linear_conv_kernel_dim", recurrent.taps, MAX_TAPS),
        ] {
            let problem = format_args!("must be between 1 and {limit}; got {size}");
            require((1..=limit).contains(&size), field, problem)?;
        }
        let (keys, values) = (recurrent.key_heads, recurrent.value_heads);
        let problem =
            format_args!("must be a multiple of linear_num_key_heads ({keys}); got {values}");
        require(
            values.is_multiple_of(keys),
            "linear_num_value_heads",
            problem,
        )?;
        let (columns, dim) = (sterna_kernels::DELTA_COLUMNS, recurrent.value_dim);
        let problem = format_args!("must be a multiple of {columns}; got {dim}");
        require(
            dim.is_multiple_of(columns),
            "linear_value_head_dim",
            problem,
        )?;
        let problem = "must have a layer of full attention";
        require(self.attention_layers() > 0, "layer_types", problem)
    }
}
