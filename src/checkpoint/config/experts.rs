//! Mixtures of experts in the feed-forward halves of layers: Mixtral, Qwen 3 MoE and Maple.
//!
//! Sources: `MixtralConfig` and `Qwen3MoeConfig` of `transformers`; the keys of llama.cpp.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::checkpoint::architecture::{Architecture, MAPLE, MIXTRAL};
use crate::checkpoint::{LoadResult, Metadata, MetadataValue, parse_json, require};

/// The limit of gate and up of Maple if a configuration does not state it.
const GATE_LIMIT: f32 = 7.0;

/// The largest number of experts of a layer. It bounds the memory of a router's logits.
const MAX_EXPERTS: usize = 4096;

/// The mixtures of a model. All have the same shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Experts {
    /// The experts of a layer.
    pub count: usize,
    /// The experts that a token uses.
    pub used: usize,
    /// The number of values between gate and down of an expert.
    pub intermediate: usize,
    /// Whether the weights of a token's experts add up to 1. Otherwise those of all experts do.
    pub normalizes: bool,
    /// The largest gate, and the largest magnitude of up, if they are limited.
    pub gate_limit: Option<f32>,
    /// Whether each layer of the model has a dense feed-forward half instead.
    pub is_dense: Vec<bool>,
}

#[derive(Deserialize)]
struct ExpertsJson {
    num_local_experts: Option<usize>,
    num_experts: Option<usize>,
    num_experts_per_tok: usize,
    moe_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
    shared_expert_intermediate_size: Option<usize>,
    sliding_window: Option<Value>,
}

/// Reads the mixtures of a model from its `config.json`. An expert of Mixtral has the width of a
/// dense half, `intermediate`.
pub(super) fn read(
    architecture: &Architecture,
    (layers, intermediate): (usize, usize),
    (name, text): (&str, &[u8]),
) -> LoadResult<Experts> {
    let json: ExpertsJson = parse_json(name, text)?;
    let shared = json.shared_expert_intermediate_size.unwrap_or(0);
    let problem = "must be missing; experts that all tokens share are not supported";
    require(shared == 0, "shared_expert_intermediate_size", problem)?;
    let (is_mixtral, is_maple) = (*architecture == MIXTRAL, *architecture == MAPLE);
    let slides = is_mixtral && json.sliding_window.is_some_and(|window| !window.is_null());
    let problem = "must be null; attention over a window is not supported";
    require(!slides, "sliding_window", problem)?;
    let step = json.decoder_sparse_step.unwrap_or(1);
    require(step > 0, "decoder_sparse_step", "must be at least 1; got 0")?;
    let only = json.mlp_only_layers.unwrap_or_default();
    let is_dense = |layer: usize| only.contains(&layer) || !(layer + 1).is_multiple_of(step);
    let (field, count, width) = match is_mixtral {
        true => (
            "num_local_experts",
            json.num_local_experts,
            "intermediate_size",
        ),
        false => (
            "num_experts",
            json.num_experts.or(json.num_local_experts),
            "moe_intermediate_size",
        ),
    };
    let experts = Experts {
        count: count.unwrap_or(0),
        used: json.num_experts_per_tok,
        intermediate: match is_mixtral {
            true => intermediate,
            false => json.moe_intermediate_size.unwrap_or(0),
        },
        normalizes: is_mixtral || json.norm_topk_prob.unwrap_or(is_maple),
        gate_limit: is_maple.then_some(GATE_LIMIT),
        is_dense: (0..layers).map(is_dense).collect(),
    };
    experts.check((field, "num_experts_per_tok", width))?;
    Ok(experts)
}

/// Reads the mixtures of a model from the metadata of a GGUF file, whose architecture is called
/// `name`. Such files do not say whether weights add up to 1; the programs that read them assume
/// it.
pub(super) fn of_gguf(
    architecture: &Architecture,
    (layers, intermediate): (usize, usize),
    (metadata, name): (&Metadata, &str),
) -> LoadResult<Experts> {
    let key = |key: &str| format!("{name}.{key}");
    let size = |field: &str| metadata.size(&key(field));
    for field in ["expert_shared_count", "expert_shared_feed_forward_length"] {
        if size(field)?.is_some_and(|size| size > 0) {
            let problem = "experts that all tokens share are not supported";
            return Err(metadata.error(&key(field), problem));
        }
    }
    for (field, plain) in [
        ("expert_gating_func", 1.0),
        ("expert_weights_scale", 1.0),
        ("expert_group_count", 1.0),
        ("leading_dense_block_count", 0.0),
    ] {
        let value = metadata.float(&key(field))?;
        if value.is_some_and(|value| value != plain && value != 0.0) {
            let problem = format!("must be {plain}; other kinds of mixtures are not supported");
            return Err(metadata.error(&key(field), problem));
        }
    }
    let used = metadata.require_size(&key("expert_used_count"))?;
    let is_mixtral = *architecture == MIXTRAL;
    let width = match size("expert_feed_forward_length")? {
        Some(width) => width,
        None if is_mixtral => intermediate,
        None => intermediate / used.max(1),
    };
    let limits = key("swiglu_clamp_exp");
    let limit = match metadata.numbers(&limits)? {
        _ if *architecture != MAPLE => None,
        None => Some(GATE_LIMIT),
        Some([first, rest @ ..])
            if rest.len() + 1 == layers
                && *first as f32 > 0.0
                && rest.iter().all(|limit| limit == first) =>
        {
            Some(*first as f32)
        }
        Some(_) => {
            let problem = "must be positive, and the same in each layer of the model";
            return Err(metadata.error(&limits, problem));
        }
    };
    let experts = Experts {
        count: metadata.require_size(&key("expert_count"))?,
        used,
        intermediate: width,
        normalizes: metadata.bool(&key("expert_weights_norm"))?.unwrap_or(true),
        gate_limit: limit,
        is_dense: vec![false; layers],
    };
    experts.check((
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    ))?;
    Ok(experts)
}

impl Experts {
    /// Returns the keys of a GGUF file, without the name of the architecture.
    ///
    /// # Errors
    /// If only some layers are mixtures, which such files cannot say.
    pub(super) fn metadata(&self) -> LoadResult<Vec<(&'static str, MetadataValue)>> {
        let problem = "has layers, which GGUF cannot say";
        require(!self.is_dense.contains(&true), "mlp_only_layers", problem)?;
        let size = |size: usize| MetadataValue::Size(size as u32); // `check` limits it.
        Ok(vec![
            ("expert_count", size(self.count)),
            ("expert_used_count", size(self.used)),
            ("expert_feed_forward_length", size(self.intermediate)),
            ("expert_weights_norm", MetadataValue::Bool(self.normalizes)),
        ])
    }

    /// # Errors
    /// If a size is out of range. The error names one of `fields`: those of the number of experts,
    /// of the experts of a token and of the width.
    fn check(&self, fields: (&str, &str, &str)) -> LoadResult<()> {
        let Experts {
            count,
            used,
            intermediate,
            ..
        } = *self;
        let problem = format_args!("must be between 1 and {MAX_EXPERTS}; got {count}");
        require((1..=MAX_EXPERTS).contains(&count), fields.0, problem)?;
        let problem = format_args!("must be between 1 and {count}; got {used}");
        require((1..=count).contains(&used), fields.1, problem)?;
        require(
            (1..=sterna_kernels::MAX_COLUMNS).contains(&intermediate),
            fields.2,
            format_args!("must be at least 1 and fit a row; got {intermediate}"),
        )
    }
}
