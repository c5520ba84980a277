//! Mixtures of experts in the feed-forward halves of layers: Mixtral and Qwen 3 MoE.
//!
//! Sources: `MixtralConfig` and `Qwen3MoeConfig` of `transformers`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::checkpoint::architecture::{Architecture, MIXTRAL};
use crate::checkpoint::{LoadResult, parse_json, require};

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
    let is_mixtral = *architecture == MIXTRAL;
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
        normalizes: is_mixtral || json.norm_topk_prob.unwrap_or(false),
        is_dense: (0..layers).map(is_dense).collect(),
    };
    let Experts {
        count,
        used,
        intermediate,
        ..
    } = experts;
    let problem = format_args!("must be between 1 and {MAX_EXPERTS}; got {count}");
    require((1..=MAX_EXPERTS).contains(&count), field, problem)?;
    let problem = format_args!("must be between 1 and {count}; got {used}");
    require((1..=count).contains(&used), "num_experts_per_tok", problem)?;
    require(
        (1..=sterna_kernels::MAX_COLUMNS).contains(&intermediate),
        width,
        format_args!("must be at least 1 and fit a row; got {intermediate}"),
    )?;
    Ok(experts)
}
