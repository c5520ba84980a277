//! The hyperparameters in the metadata of a GGUF file, read and written.

use std::collections::BTreeSet;

use super::experts;
use super::gemma3;
use super::hyperparameters::{ModelConfig, Quantization};
use super::maple;
use super::masked_blocks::MaskedBlocks;
use super::pooling::{self, Pooling};
use super::qwen3_5;
use super::rope::{RopeScaling, yarn_attention_factor};
use super::rotation::Rotation;
use crate::checkpoint::architecture::{
    Activation, Architecture, BITNET, BITNET_GEMMA3, BITNET_QWEN3, FAST_DLLM, LLAMA, MAPLE,
    MIXTRAL, QWEN2, QWEN3, QWEN3_5, QWEN3_MOE,
};
use crate::checkpoint::{
    FileNames, Gguf, LoadError, LoadResult, Metadata, MetadataEntries, MetadataValue, STOP_TOKENS,
    head_dim, require,
};

/// The base of rotary frequencies if a file does not state it, as in llama.cpp.
const DEFAULT_ROPE_BASE: f64 = 10_000.0;

/// Control tokens that end an answer, whatever the metadata names as EOS. Files name one token, but
/// chat models have another for the end of a turn.
const END_TOKENS: [&str; 8] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|return|>",
];

/// An architecture, and the function of its gate, by a name that files give them.
type Named = (&'static str, &'static Architecture, Activation);

/// The architectures by the names that GGUF files give them. The name `bitnet` means SiLU, and
/// Microsoft's names mean squared ReLU. The tensors tell architectures of one name apart.
const ARCHITECTURES: [Named; 13] = [
    ("bitnet-b1.58", &BITNET, Activation::Relu2),
    ("bitnet-25", &BITNET, Activation::Relu2),
    ("bitnet", &BITNET, Activation::Silu),
    ("llama", &LLAMA, Activation::Silu),
    ("qwen2", &QWEN2, Activation::Silu),
    ("fast-dllm", &FAST_DLLM, Activation::Silu),
    ("qwen3", &QWEN3, Activation::Silu),
    ("qwen3", &BITNET_QWEN3, Activation::Silu),
    ("gemma3", &BITNET_GEMMA3, Activation::GeluTanh),
    ("qwen35", &QWEN3_5, Activation::Silu),
    ("llama", &MIXTRAL, Activation::Silu),
    ("qwen3moe", &QWEN3_MOE, Activation::Silu),
    ("maple", &MAPLE, Activation::Silu),
];

/// The keys after the name of the architecture, and what `config.json` calls them. A field
/// that is a part of another one stands below it.
const FIELDS: [(&str, &str); 22] = [
    ("sliding_window", "attention.sliding_window"),
    ("committed_attention", "attention.causal"),
    ("linear_num_key_heads", "ssm.group_count"),
    ("linear_num_value_heads", "ssm.time_step_rank"),
    ("linear_key_head_dim", "ssm.state_size"),
    ("linear_value_head_dim", "ssm.inner_size"),
    ("linear_conv_kernel_dim", "ssm.conv_kernel"),
    ("max_position_embeddings", "context_length"),
    ("hidden_size", "embedding_length"),
    ("intermediate_size", "feed_forward_length"),
    ("num_hidden_layers", "block_count"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("partial_rotary_factor", "rope.dimension_count"),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ("rope_theta", "rope.freq_base"),
    ("head_dim", "attention.key_length"),
    ("layer_types", "full_attention_interval"),
    ("rope_scaling", "rope.scaling.type"),
    ("num_experts", "expert_count"),
    ("num_experts_per_tok", "expert_used_count"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
];

/// Reads the configuration of a GGUF file.
///
/// # Errors
/// Those of [`ModelConfig::read`]. They name the keys of the file.
pub(super) fn read(gguf: &Gguf) -> LoadResult<ModelConfig> {
    let named = architecture(gguf)?;
    let checked = read_unchecked(gguf, named).and_then(|config| {
        config.check()?;
        Ok(config)
    });
    checked.map_err(|error| in_words_of_file(error, gguf.metadata(), named.0))
}

/// Returns an error with the key of the file in place of a field of `config.json`.
fn in_words_of_file(error: LoadError, metadata: &Metadata, name: &str) -> LoadError {
    let Some((field, problem)) = error.field() else {
        return error;
    };
    let key = FIELDS.iter().find(|(known, _)| *known == field);
    let key = key.map_or_else(|| field.to_owned(), |(_, key)| format!("{name}.{key}"));
    let problem = FIELDS
        .iter()
        .fold(problem.to_owned(), |problem, (field, key)| {
            problem.replace(field, key)
        });
    metadata.error(&key, problem)
}

fn read_unchecked(gguf: &Gguf, (name, architecture, activation): Named) -> LoadResult<ModelConfig> {
    let metadata = gguf.metadata();
    let size = |key: &str| metadata.require_size(&format!("{name}.{key}"));
    let key = format!("{name}.attention.head_count_kv");
    let (heads, kv_heads) = (size("attention.head_count")?, metadata.size(&key)?);
    let head_dim = head_dim(metadata, name)?;
    if ![QWEN3_5, MAPLE].contains(architecture) {
        check_rotation(metadata, name, head_dim)?;
    }
    let embedding = "model.embed_tokens.weight";
    let vocab = gguf.shape(embedding).and_then(<[usize]>::first);
    let vocab = *vocab.ok_or_else(|| LoadError::missing_tensor("token_embd.weight"))?;
    let theta = metadata.float(&format!("{name}.rope.freq_base"))?;
    let eps = format!("{name}.attention.layer_norm_rms_epsilon");
    let has_own_head = gguf.shape("lm_head.weight").is_some();
    let stated = pooling::of_gguf(gguf, name)?;
    let mut config = ModelConfig {
        architecture,
        vocab,
        hidden: size("embedding_length")?,
        intermediate: intermediate(metadata, name, architecture)?,
        layers: size("block_count")?,
        heads,
        kv_heads: kv_heads.unwrap_or(heads),
        head_dim,
        max_position: size("context_length")?,
        rope_theta: theta.unwrap_or(DEFAULT_ROPE_BASE),
        rope_scaling: rope_scaling(metadata, name, size("context_length")?)?,
        rotary_dim: head_dim,
        recurrent: None,
        experts: None,
        local: None,
        query_factor: 1.0,
        norm_eps: metadata
            .float(&eps)?
            .map_or(architecture.norm_eps, |eps| eps as f32),
        activation,
        // Only the file of an embedding model, which lacks a head, states how to pool.
        has_head: has_own_head || stated.is_none(),
        tied: !has_own_head,
        pooling: pooling_of(architecture, stated),
        quantization: Quantization::UNPACKED,
        unused_parts: Vec::new(),
        rotation: None,
        eos_tokens: end_tokens(metadata, vocab)?,
        bos_token: token_id(metadata, "bos")?,
        masked_blocks: MaskedBlocks::of_gguf(
            metadata,
            name,
            (vocab, architecture.is_block_causal),
        )?,
    };
    apply_family(&mut config, metadata, name)?;
    config.rotation = Rotation::read(gguf, architecture, config.recurrent.is_some())?;
    Ok(config)
}

/// Reads what the metadata says beside the keys that all architectures have.
fn apply_family(config: &mut ModelConfig, metadata: &Metadata, name: &str) -> LoadResult<()> {
    let architecture = config.architecture;
    if *architecture == BITNET_GEMMA3 || architecture.layer.experts.is_some() {
        config.check()?; // The sizes are used.
    }
    if *architecture == BITNET_GEMMA3 {
        let window = metadata.size(&window_key(name))?;
        let theta = metadata.float(&format!("{name}.rope.freq_base_swa"))?;
        let scalar = format!("{name}.attention.query_pre_attn_scalar");
        let scalar = metadata.float(&scalar)?;
        gemma3::apply_to_gguf(config, window, theta, scalar)?;
    }
    if *architecture == QWEN3_5 {
        qwen3_5::apply_to_gguf(config, metadata, name)?;
    }
    if *architecture == MAPLE {
        maple::apply_to_gguf(config, metadata, name)?;
    }
    if architecture.layer.experts.is_some() {
        let sizes = (config.layers, config.intermediate);
        config.experts = Some(experts::of_gguf(architecture, sizes, (metadata, name))?);
    }
    Ok(())
}

/// Returns the width of a dense feed-forward half. A file whose halves are all mixtures need not
/// state it.
fn intermediate(metadata: &Metadata, name: &str, architecture: &Architecture) -> LoadResult<usize> {
    let key = format!("{name}.feed_forward_length");
    match metadata.size(&key)? {
        None | Some(0) if architecture.layer.experts.is_some() => {
            metadata.require_size(&format!("{name}.expert_feed_forward_length"))
        }
        Some(size) => Ok(size),
        None => metadata.require_size(&key),
    }
}

/// Returns the key of the number of tokens that a token attends to.
fn window_key(name: &str) -> String {
    format!("{name}.attention.sliding_window")
}

/// Returns the pooling of a file that states `stated`.
///
/// The published files of BitNet-embedding state mean pooling, because their converter does so if
/// it finds no statement. The models were trained with the last token, as their documentation says.
fn pooling_of(architecture: &Architecture, stated: Option<Pooling>) -> Pooling {
    let is_doubtful = architecture.layer.input_norm.is_some() && stated == Some(Pooling::Mean);
    if is_doubtful {
        tracing::warn!(
            "the file states mean pooling, but models with input norms are trained with the last \
             token: using the last token"
        );
        return Pooling::LastToken;
    }
    stated.unwrap_or_default()
}

/// Returns the metadata of a configuration, without the tokenizer's metadata.
///
/// # Errors
/// If GGUF has no name for the architecture with this activation, or no keys for how the rotary
/// frequencies are scaled.
pub(crate) fn metadata(config: &ModelConfig) -> LoadResult<MetadataEntries> {
    let is_named = |named: &&Named| named.1 == config.architecture && named.2 == config.activation;
    let (name, ..) = ARCHITECTURES.iter().find(is_named).ok_or_else(|| {
        let class = config.architecture.class;
        let activation = config.activation;
        let problem = format!("GGUF has no name for {class} with {activation:?}");
        LoadError::config("hidden_act", problem)
    })?;
    let mut entries = vec![
        (
            "general.architecture".to_owned(),
            MetadataValue::Text((*name).to_owned()),
        ),
        (
            "general.type".to_owned(),
            MetadataValue::Text("model".to_owned()),
        ),
        (
            "general.quantization_version".to_owned(),
            MetadataValue::Size(2),
        ),
    ];
    for (key, size) in [
        ("vocab_size", config.vocab),
        ("context_length", config.max_position),
        ("embedding_length", config.hidden),
        ("block_count", config.layers),
        ("feed_forward_length", config.intermediate),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.rotary_dim),
    ] {
        // `ModelConfig::check` limits every size.
        entries.push((format!("{name}.{key}"), MetadataValue::Size(size as u32)));
    }
    let eps = format!("{name}.attention.layer_norm_rms_epsilon");
    entries.push((eps, MetadataValue::Float(config.norm_eps)));
    if !config.has_head {
        let number = MetadataValue::Size(config.pooling.gguf_number());
        entries.push((format!("{name}.pooling_type"), number));
    }
    let theta = exact("rope_theta", config.rope_theta)?;
    entries.push((
        format!("{name}.rope.freq_base"),
        MetadataValue::Float(theta),
    ));
    for (key, value) in scaling_metadata(&config.rope_scaling)? {
        entries.push((format!("{name}.rope.scaling.{key}"), value));
    }
    let recurrent = config.recurrent.iter().flat_map(qwen3_5::metadata);
    let experts = match &config.experts {
        Some(experts) => experts.metadata()?,
        None => Vec::new(),
    };
    let windows = maple::metadata(config)?;
    let of_family = recurrent.chain(experts).chain(windows);
    entries.extend(of_family.map(|(key, value)| (format!("{name}.{key}"), value)));
    if let Some(blocks) = config.masked_blocks {
        entries.extend(blocks.metadata(name));
    }
    if let Some(rotation) = &config.rotation {
        entries.extend(rotation.metadata(FileNames::of_architecture(name, false)));
    }
    Ok(entries)
}

/// Returns the keys after `rope.scaling.`, with their values.
fn scaling_metadata(scaling: &RopeScaling) -> LoadResult<Vec<(&'static str, MetadataValue)>> {
    let field = "rope_scaling";
    let float = |value: f64| exact(field, value).map(MetadataValue::Float);
    let kind = |name: &str| ("type", MetadataValue::Text(name.to_owned()));
    match *scaling {
        RopeScaling::None => Ok(Vec::new()),
        RopeScaling::Linear { factor } => Ok(vec![kind("linear"), ("factor", float(factor)?)]),
        RopeScaling::Yarn {
            factor,
            original,
            beta_fast,
            beta_slow,
            attention_factor,
        } => {
            let mut entries = vec![
                kind("yarn"),
                ("factor", float(factor)?),
                (
                    "original_context_length",
                    MetadataValue::Size(original as u32),
                ),
                ("yarn_beta_fast", float(beta_fast)?),
                ("yarn_beta_slow", float(beta_slow)?),
            ];
            let usual = yarn_attention_factor(factor);
            if attention_factor != usual {
                entries.push(("yarn_attn_factor", float(attention_factor / usual)?));
            }
            Ok(entries)
        }
        RopeScaling::Llama3 { .. } | RopeScaling::LongRope { .. } => {
            let problem = "GGUF has keys for linear and yarn only";
            Err(LoadError::config(field, problem))
        }
    }
}

/// Returns a number in single precision.
fn exact(field: &str, value: f64) -> LoadResult<f32> {
    let single = value as f32;
    let problem = format_args!("{value} is not exact in single precision, which GGUF has");
    require(f64::from(single) == value, field, problem)?;
    Ok(single)
}

fn architecture(gguf: &Gguf) -> LoadResult<Named> {
    let (metadata, key) = (gguf.metadata(), "general.architecture");
    let given = metadata.require_text(key)?;
    let has_norms = |architecture: &Architecture| {
        let query = architecture.layer.query;
        let norm = architecture.layer.input_norm_of(query);
        norm.is_some_and(|norm| {
            let name = format!("model.layers.0.{norm}.weight");
            gguf.shape(&name).is_some()
        })
    };
    let mut named = ARCHITECTURES.iter().filter(|(name, ..)| *name == given);
    let experts = metadata.size(&format!("{given}.expert_count"))?;
    let has_experts = experts.is_some_and(|experts| experts > 0);
    let is_same = |known: &Architecture| known.layer.experts.is_some() == has_experts;
    let with_norms = named.clone().find(|(_, known, _)| has_norms(known));
    let with_norms = with_norms.or_else(|| named.clone().find(|(_, known, _)| is_same(known)));
    with_norms.or_else(|| named.next()).copied().ok_or_else(|| {
        let mut names = ARCHITECTURES.map(|(name, ..)| name).to_vec();
        names.dedup();
        let names = names.join(", ");
        metadata.error(key, format!("must be one of {names}; got {given:?}"))
    })
}

/// # Errors
/// If the file asks for anything else than a rotation of all values of a head by plain frequencies.
fn check_rotation(metadata: &Metadata, name: &str, head_dim: usize) -> LoadResult<()> {
    let key = format!("{name}.rope.dimension_count");
    let rotated = metadata.size(&key)?.unwrap_or(head_dim);
    if rotated != head_dim {
        let problem = format!("must be the size of a head, {head_dim}; got {rotated}");
        return Err(metadata.error(&key, problem));
    }
    Ok(())
}

/// Reads how the frequencies are scaled. `max_position` is the longest context.
fn rope_scaling(metadata: &Metadata, name: &str, max_position: usize) -> LoadResult<RopeScaling> {
    let key = |key: &str| format!("{name}.rope.scaling.{key}");
    let number = |name: &str| -> LoadResult<Option<f64>> {
        let number = metadata.float(&key(name))?;
        let is_usable = |number: &f64| number.is_finite() && *number > 0.0;
        match number {
            Some(number) if !is_usable(&number) => {
                let problem = format!("must be positive; got {number}");
                Err(metadata.error(&key(name), problem))
            }
            number => Ok(number),
        }
    };
    let window = window_key(name);
    let has_window = metadata.size(&window)?.is_some_and(|window| window > 0);
    if has_window && !["gemma3", "maple"].contains(&name) {
        return Err(metadata.error(&window, "attention over a window is not supported"));
    }
    // Without a type, the factor is a linear one. Old files have another name for it.
    let old = metadata.float(&format!("{name}.rope.scale_linear"))?;
    let linear = number("factor")?.or(old).unwrap_or(1.0);
    match metadata.text(&key("type"))? {
        Some("none") => Ok(RopeScaling::None),
        None if linear == 1.0 => Ok(RopeScaling::None),
        None | Some("linear") => Ok(RopeScaling::Linear { factor: linear }),
        Some("yarn") => {
            let factor = number("factor")?.unwrap_or(1.0);
            let original = metadata.size(&key("original_context_length"))?;
            let attention = number("yarn_attn_factor")?.or(number("attn_factor")?);
            if number("yarn_ext_factor")?.is_some_and(|factor| factor != 1.0) {
                return Err(metadata.error(&key("yarn_ext_factor"), "must be 1"));
            }
            // llama.cpp reads it for other architectures only, and Sterna computes none of them.
            let log = metadata.float(&key("yarn_log_multiplier"))?.unwrap_or(0.0);
            if log != 0.0 {
                let problem = format!("must be 0 for this architecture; got {log}");
                return Err(metadata.error(&key("yarn_log_multiplier"), problem));
            }
            Ok(RopeScaling::Yarn {
                factor,
                original: original.unwrap_or(max_position) as f64,
                beta_fast: number("yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: number("yarn_beta_slow")?.unwrap_or(1.0),
                attention_factor: attention.unwrap_or(1.0) * yarn_attention_factor(factor),
            })
        }
        Some(other) => {
            let problem = format!("must be none, linear or yarn; got {other:?}");
            Err(metadata.error(&key("type"), problem))
        }
    }
}

fn token_id(metadata: &Metadata, role: &str) -> LoadResult<Option<u32>> {
    let key = format!("tokenizer.ggml.{role}_token_id");
    let id = metadata.size(&key)?.map(|id| {
        let problem = || metadata.error(&key, format!("{id} is too large"));
        u32::try_from(id).map_err(|_| problem())
    });
    id.transpose()
}

/// Returns the stop tokens: the tokens that the metadata names, and control tokens that end a turn.
pub(super) fn end_tokens(metadata: &Metadata, vocab: usize) -> LoadResult<Vec<u32>> {
    const CONTROL: f64 = 3.0;
    let mut ends = BTreeSet::new();
    if let Some(stated) = metadata.numbers(STOP_TOKENS)? {
        // A file that Sterna wrote lists all of them.
        let id = |id: &f64| (0.0..vocab as f64).contains(id).then_some(*id as u32);
        let problem = || metadata.error(STOP_TOKENS, format!("must be below {vocab}"));
        let ids = stated.iter().map(|stated| id(stated).ok_or_else(problem));
        return Ok(ids
            .collect::<LoadResult<BTreeSet<u32>>>()?
            .into_iter()
            .collect());
    }
    for role in ["eos", "eot", "eom"] {
        ends.extend(token_id(metadata, role)?);
    }
    if let Some(types) = metadata.numbers("tokenizer.ggml.token_type")? {
        let tokens = metadata.require_texts("tokenizer.ggml.tokens")?;
        for ((id, token), kind) in (0_u32..).zip(tokens).zip(types) {
            if *kind == CONTROL && END_TOKENS.contains(&&**token) {
                ends.insert(id);
            }
        }
    }
    ends.retain(|id| (*id as usize) < vocab);
    Ok(ends.into_iter().collect())
}
