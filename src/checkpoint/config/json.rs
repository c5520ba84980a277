//! `config.json`: which fields it may have, and what they mean.

use serde::Deserialize;

use super::experts;
use super::gemma3;
use super::gguf;
use super::hyperparameters::{ModelConfig, Quantization, StoredWeights};
use super::maple;
use super::masked_blocks::{BlocksJson, MaskedBlocks};
use super::pooling;
use super::qwen3_5;
use super::rope::RopeScaling;
use super::rope_json::{Positions, RopeJson, check_partial};
use super::stop_tokens::{self, TokenIds};
use crate::checkpoint::architecture::{
    self, Activation, Architecture, BITNET_GEMMA3, MAPLE, QWEN3_5, ScaleDirection,
};
use crate::checkpoint::{LoadError, LoadResult, Source, has_tensor, parse_json, require};

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
            return gguf::read(gguf);
        }
        let name = "config.json";
        let text = source.read(name)?;
        let text = text.ok_or_else(|| source.missing_file(name))?;
        let text = qwen3_5::text_part(name, text.to_vec())?;
        // The other fields of an unknown architecture can have any names and types.
        let family: FamilyJson = parse_json(name, &text)?;
        let family = family.architecture()?;
        let json: ConfigJson = parse_json(name, &text)?;
        let mut config = json.to_config(source, family)?;
        config.check()?;
        if *config.architecture == BITNET_GEMMA3 {
            gemma3::apply(&mut config, name, &text)?;
            config.check()?;
        }
        if *config.architecture == QWEN3_5 {
            qwen3_5::apply(&mut config, name, &text)?;
            config.check()?;
        }
        if *config.architecture == MAPLE {
            maple::apply(&mut config, name, &text)?;
            config.check()?;
        }
        if config.architecture.layer.experts.is_some() {
            let sizes = (config.layers, config.intermediate);
            let experts = experts::read(config.architecture, sizes, (name, &text))?;
            config.experts = Some(experts);
            config.check()?;
        }
        config.eos_tokens = stop_tokens::read(source, json.eos_token_id.as_ref(), config.vocab)?;
        Ok(config)
    }
}

/// Returns the stop tokens of a checkpoint, whether or not this engine computes it. `vocab` is the
/// number of token ids.
///
/// # Errors
/// If a file that may name them is malformed.
pub(crate) fn stop_tokens(source: &Source, vocab: usize) -> LoadResult<Vec<u32>> {
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

/// The fields of `config.json` that name the architecture.
#[derive(Deserialize)]
struct FamilyJson {
    architectures: Option<Vec<String>>,
    model_type: Option<String>,
}

/// The fields of `config.json`, as `transformers` 4 and 5 write them.
#[derive(Deserialize)]
struct ConfigJson {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: Option<usize>,
    original_max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f64>,
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
    #[serde(flatten)]
    blocks: BlocksJson,
}

impl FamilyJson {
    /// Returns the architecture that `architectures` names, and whether it has an output head. If
    /// that field is missing, `model_type` decides.
    fn architecture(&self) -> LoadResult<(&'static Architecture, bool)> {
        let named = |known: &'static Architecture| {
            let has_head = match (&self.architectures, &self.model_type) {
                (Some(classes), _) if classes[..] == [known.class] => Some(true),
                (Some(classes), _) if classes[..] == [known.headless_class] => Some(false),
                (None, Some(model_type)) if model_type == known.model_type => Some(true),
                _ => None,
            };
            has_head.map(|has_head| (known, has_head))
        };
        architecture::ALL
            .into_iter()
            .find_map(named)
            .ok_or_else(|| {
                let mut classes: Vec<_> = architecture::ALL
                    .iter()
                    .flat_map(|known| [known.class, known.headless_class])
                    .collect();
                classes.sort_unstable();
                classes.dedup();
                let classes = classes.join(" or ");
                let problem = match (&self.architectures, &self.model_type) {
                    (Some(given), _) => format!("must be {classes}; got {given:?}"),
                    (None, given) => format!("missing, and model_type is {given:?}; use {classes}"),
                };
                LoadError::config("architectures", problem)
            })
    }
}

impl ConfigJson {
    fn to_config(
        &self,
        source: &Source,
        (architecture, has_head): (&'static Architecture, bool),
    ) -> LoadResult<ModelConfig> {
        let architecture = with_norms_of(source, architecture);
        self.refuse_biases(architecture)?;
        let slides = self.use_sliding_window == Some(true);
        let problem = "must be false; attention over a window is not supported";
        require(!slides, "use_sliding_window", problem)?;
        let bos = self.bos_token_id.as_ref();
        let (rope_theta, rope_scaling) = if [BITNET_GEMMA3, QWEN3_5, MAPLE].contains(architecture) {
            (1.0, RopeScaling::None) // The fields of these families follow.
        } else {
            self.rope()?
        };
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
            rotary_dim: self.head_dim()?,
            recurrent: None,
            experts: None,
            local: None,
            query_factor: 1.0,
            norm_eps: self
                .rms_norm_eps
                .map_or(architecture.norm_eps, |eps| eps as f32),
            activation: self.hidden_act.unwrap_or(architecture.activation),
            has_head,
            tied: self.tie_word_embeddings.unwrap_or(architecture.is_tied),
            pooling: pooling::read(source)?,
            quantization: self.quantization(architecture, source.bin().is_some())?,
            unused_parts: Vec::new(),
            rotation: None,
            eos_tokens: Vec::new(),
            bos_token: bos.and_then(|ids| ids.as_slice().first().copied()),
            masked_blocks: MaskedBlocks::read(
                source,
                &self.blocks,
                (self.vocab_size, architecture.is_block_causal),
            )?,
        })
    }

    /// `is_packed_file` says that the file has packed weights whatever the configuration says.
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
            None if architecture.layer.input_norm.is_some() => Ok(Quantization::masters()),
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

/// Returns the architecture of the same class with input norms if the checkpoint has them.
fn with_norms_of(source: &Source, architecture: &'static Architecture) -> &'static Architecture {
    let Some(other) = architecture.with_input_norms() else {
        return architecture;
    };
    let norm = other.layer.input_norm_of(other.layer.query);
    let name = norm.map(|norm| format!("model.layers.0.{norm}.weight"));
    if name.is_some_and(|name| has_tensor(source, &name)) {
        other
    } else {
        architecture
    }
}

#[derive(Deserialize)]
struct QuantizationJson {
    quant_method: Option<String>,
    linear_class: Option<String>,
    quantization_mode: Option<String>,
    use_rms_norm: Option<bool>,
    rms_norm_eps: Option<f64>,
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
            input_norm_eps: uses_norm.then(|| self.rms_norm_eps.unwrap_or(1e-6) as f32),
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
