//! The limits of hyperparameters: what the kernels compute, and what makes sense.

use super::hyperparameters::ModelConfig;
use crate::model::checkpoint::LoadError;

/// The attention kernels divide a head into vectors of this many values.
const HEAD_VECTOR: usize = 16;

/// The largest size of any kind. It keeps every product of two sizes far from overflow. How much is
/// really read is bounded by the file.
const MAX_SIZE: usize = 1 << 24;

/// # Errors
/// If a size or epsilon is out of range, or two of them contradict each other.
pub(super) fn check(config: &ModelConfig) -> Result<(), LoadError> {
    check_epsilons(config)?;
    check_ranges(config)?;
    check_heads(config)?;
    let widest = (config.hidden)
        .max(config.intermediate)
        .max(config.heads * config.head_dim);
    let limit = sterna_kernels::MAX_COLUMNS;
    if widest > limit {
        let problem = format!("a row of {widest} values is too wide; the limit is {limit}");
        return Err(LoadError::config("intermediate_size", problem));
    }
    if config.tied && !config.is_float("lm_head") {
        return Err(LoadError::config(
            "modules_to_not_convert",
            "must list lm_head, because tie_word_embeddings makes it the (float) embedding",
        ));
    }
    Ok(())
}

/// A norm with a negative or infinite epsilon makes every value NaN or zero.
fn check_epsilons(config: &ModelConfig) -> Result<(), LoadError> {
    let input_norm_eps = config.quantization.input_norm_eps;
    for (field, eps) in [
        ("rms_norm_eps", Some(config.norm_eps)),
        ("quantization_config.rms_norm_eps", input_norm_eps),
    ] {
        if let Some(eps) = eps.filter(|eps| !eps.is_finite() || *eps < 0.0) {
            let problem = format!("must be finite and not negative; got {eps}");
            return Err(LoadError::config(field, problem));
        }
    }
    Ok(())
}

fn check_ranges(config: &ModelConfig) -> Result<(), LoadError> {
    for (field, size) in [
        ("vocab_size", config.vocab),
        ("hidden_size", config.hidden),
        ("intermediate_size", config.intermediate),
        ("num_hidden_layers", config.layers),
        ("num_attention_heads", config.heads),
        ("num_key_value_heads", config.kv_heads),
        ("head_dim", config.head_dim),
        ("max_position_embeddings", config.max_position),
    ] {
        if !(1..=MAX_SIZE).contains(&size) {
            let problem = format!("must be between 1 and {MAX_SIZE}; got {size}");
            return Err(LoadError::config(field, problem));
        }
    }
    Ok(())
}

fn check_heads(config: &ModelConfig) -> Result<(), LoadError> {
    let (heads, kv_heads, head_dim) = (config.heads, config.kv_heads, config.head_dim);
    if !heads.is_multiple_of(kv_heads) {
        return Err(LoadError::config(
            "num_key_value_heads",
            format!("must divide num_attention_heads ({heads}); got {kv_heads}"),
        ));
    }
    let limit = sterna_kernels::MAX_HEAD_DIM;
    if !head_dim.is_multiple_of(HEAD_VECTOR) || head_dim > limit {
        return Err(LoadError::config(
            "head_dim",
            format!("must be a multiple of {HEAD_VECTOR}, at most {limit}; got {head_dim}"),
        ));
    }
    // The norm before the output projection has hidden_size weights.
    let has_sub_norm = config.architecture.layer.attention_sub_norm.is_some();
    if has_sub_norm && heads * head_dim != config.hidden {
        return Err(LoadError::config(
            "head_dim",
            format!(
                "num_attention_heads * head_dim ({}) must equal hidden_size ({})",
                heads * head_dim,
                config.hidden
            ),
        ));
    }
    Ok(())
}
