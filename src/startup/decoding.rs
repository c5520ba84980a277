//! How the model decodes: what its files say of masked blocks, and then the flags.

use sterna_scheduler::{Diffusion, OwnDrafts, TokenId};

use crate::checkpoint::{CommittedAttention, MaskedBlocks, ModelConfig};
use crate::config::{Decoding, ServeConfig};

/// The masked blocks that the model can fill.
struct StatedBlocks {
    /// The largest number of tokens in a block that the model was trained for.
    size: u32,
    mask_token: TokenId,
    is_causal: bool,
}

impl StatedBlocks {
    /// Returns `None` if neither the model's files nor the flags name masked blocks.
    ///
    /// # Errors
    /// If a part of them is missing, or the mask token is none of the model's tokens.
    fn of(config: &ServeConfig, model: &ModelConfig) -> Result<Option<StatedBlocks>, String> {
        let flags = &config.scheduling;
        let stated = match (model.masked_blocks, flags.diffusion_mask_token) {
            (Some(stated), _) => stated,
            (None, Some(_)) => MaskedBlocks {
                size: None,
                mask_token: None,
                committed_attention: CommittedAttention::BlockCausal,
            },
            (None, None) => return without_blocks(config),
        };
        if model.recurrent.is_some() || !model.has_head {
            return match flags.diffusion_mask_token {
                Some(_) => Err(
                    "--diffusion-mask-token: a model that is recurrent or has no head \
                                fills no masked tokens"
                        .to_owned(),
                ),
                None => without_blocks(config),
            };
        }
        let stated_size = stated.size.map(|size| size as u32);
        let size = stated_size.or(flags.diffusion_block).ok_or(
            "the model's files do not say how many tokens a masked block has: give \
             --diffusion-block",
        )?;
        let mask_token = flags.diffusion_mask_token.or(stated.mask_token).ok_or(
            "the model's files do not name the mask token: give its number with \
             --diffusion-mask-token",
        )?;
        if mask_token as usize >= model.vocab {
            return Err(format!(
                "--diffusion-mask-token {mask_token}: the model has {} tokens, numbered from 0",
                model.vocab
            ));
        }
        Ok(Some(StatedBlocks {
            size,
            mask_token,
            is_causal: stated.committed_attention == CommittedAttention::Causal,
        }))
    }
}

/// Checks that no flag says how to fill blocks that the model does not have.
fn without_blocks(config: &ServeConfig) -> Result<Option<StatedBlocks>, String> {
    let flags = &config.scheduling;
    let useless = match (flags.diffusion_block, flags.diffusion_block_cache) {
        (Some(_), _) => "--diffusion-block",
        (None, true) => "--diffusion-block-cache",
        (None, false) => return Ok(None),
    };
    Err(format!(
        "{useless}: the model's files name no masked blocks, so it has none to fill. If it was \
         trained to, give --diffusion-mask-token too"
    ))
}

/// Returns how the model drafts for itself, if it should.
///
/// # Errors
/// If the configuration asks for a way of decoding that the model does not have, or as for
/// [`StatedBlocks::of`].
pub(super) fn own_drafts(
    config: &ServeConfig,
    model: &ModelConfig,
) -> Result<Option<OwnDrafts>, String> {
    let blocks = StatedBlocks::of(config, model)?;
    match (config.scheduling.decoding, blocks) {
        (Some(Decoding::SelfSpeculation | Decoding::Diffusion), None) => Err(
            "--decoding: the model was not trained to fill masked tokens: its config.json has no \
             mask_token_id and block_size. If it was, give --diffusion-mask-token and \
             --diffusion-block"
                .to_owned(),
        ),
        (
            Some(Decoding::Autoregressive | Decoding::SelfSpeculation),
            Some(StatedBlocks {
                is_causal: false, ..
            }),
        ) => Err(
            "--decoding: the model was trained for diffusion alone: the keys and values of known \
             tokens are not those of causal attention (committed_attention: block-causal)"
                .to_owned(),
        ),
        (Some(Decoding::Autoregressive), _) => Ok(None),
        (_, blocks) => {
            let causal = blocks.filter(|blocks| blocks.is_causal);
            Ok(causal.map(|blocks| OwnDrafts {
                mask_token: blocks.mask_token,
                block: blocks.size,
            }))
        }
    }
}

/// Returns how the model fills blocks, if it can.
///
/// # Errors
/// As for [`StatedBlocks::of`].
pub(super) fn diffusion(
    config: &ServeConfig,
    model: &ModelConfig,
) -> Result<Option<Diffusion>, String> {
    let flags = &config.scheduling;
    let blocks = StatedBlocks::of(config, model)?;
    Ok(blocks.map(|blocks| {
        let block = flags.diffusion_block.unwrap_or(blocks.size);
        Diffusion {
            block,
            part: flags.diffusion_part.min(block),
            mask_token: blocks.mask_token,
            is_causal: blocks.is_causal,
            has_block_cache: flags.diffusion_block_cache,
        }
    }))
}
