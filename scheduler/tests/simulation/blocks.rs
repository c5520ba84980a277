//! Block diffusion of the fake model: what a pass over a block draws, and the answer of a request
//! that runs alone. The answer is written without the scheduler's rules of rows.

use std::ops::Range;

use sterna_random::{Random, mix};
use sterna_scheduler::{Diffusion, FinishReason, Limits, Request, TokenId};

use crate::model::{chain, next_token};

/// No token of the fake model.
pub(crate) const MASK: TokenId = 99;

/// Blocks for some worlds.
pub(crate) fn some_diffusion(random: &mut Random, limits: &Limits) -> Option<Diffusion> {
    if limits.states.is_some() || !random.percent(50) {
        return None;
    }
    let block = random.pick(&[4, 4, 8, 8, 16, 16, 24, 32]);
    Some(Diffusion {
        block,
        part: random.between(1, u64::from(block)) as u32,
        mask_token: MASK,
        is_causal: random.percent(60),
        has_block_cache: random.percent(80),
    })
}

/// Returns what a pass puts in the places of a block: tokens that stay, or nothing. `before` is the
/// chain of the tokens before the block.
pub(crate) fn pass(
    before: u64,
    block: &[TokenId],
    places: Range<usize>,
    alphabet: u64,
) -> Vec<Option<TokenId>> {
    let whole = block.iter().fold(before, |hash, &token| chain(hash, token));
    let draws: Vec<Option<(u64, TokenId)>> = places
        .map(|place| {
            let hash = mix(whole ^ (place as u64) << 40);
            let draw = (mix(hash) % 1000, next_token(hash, alphabet));
            (block[place] == MASK).then_some(draw)
        })
        .collect();
    let best = draws.iter().flatten().map(|draw| draw.0).max();
    let mut is_first = true;
    let stays = |draw: Option<(u64, TokenId)>| {
        let (confidence, token) = draw?;
        let is_best = Some(confidence) == best && std::mem::take(&mut is_first);
        (is_best || confidence > 700).then_some(token)
    };
    draws.into_iter().map(stays).collect()
}

/// Returns the places of the next pass: those of the mask tokens of the first part that has any.
pub(crate) fn next_places(rules: Diffusion, block: &[TokenId]) -> Range<usize> {
    let part = rules.part as usize;
    let mut parts = block.chunks(part).zip(0..);
    let (tokens, index) = parts
        .find(|(tokens, _)| tokens.contains(&MASK))
        .expect("a mask token");
    let is_mask = |token: &TokenId| *token == MASK;
    let first = tokens.iter().position(is_mask).unwrap_or(0);
    let last = tokens.iter().rposition(is_mask).unwrap_or(0);
    index * part + first..index * part + last + 1
}

/// What the next pass over a block computes, in places of the block.
pub(crate) struct NextPass {
    pub(crate) row: Range<usize>,
    pub(crate) tokens: Vec<TokenId>,  // Of the row.
    pub(crate) unknown: Range<usize>, // The places that need logits.
}

/// Returns what the next pass computes. `cached` is the block as the last pass over all of it saw
/// it, and whether the pages still hold that pass.
pub(crate) fn next_pass(
    rules: Diffusion,
    block: &[TokenId],
    cached: Option<(&[TokenId], bool)>,
) -> NextPass {
    let unknown = next_places(rules, block);
    let part = rules.part as usize;
    let begin = unknown.start / part * part;
    let has_part = rules.has_block_cache && block[begin] != MASK && part < block.len();
    let cached = cached.filter(|_| has_part);
    let (row, tokens, unknown) = match cached {
        None => (0..block.len(), block, unknown),
        Some((cached, false)) => (0..block.len(), cached, 0..0),
        Some((_, true)) => {
            let row = begin..block.len().min(begin + part);
            (row.clone(), &block[row], unknown)
        }
    };
    NextPass {
        row,
        tokens: tokens.to_vec(),
        unknown,
    }
}

/// Returns the answer to a request that runs alone.
pub(crate) fn answer(
    request: &Request,
    rules: Diffusion,
    alphabet: u64,
) -> (Vec<TokenId>, FinishReason) {
    let size = rules.block as usize;
    let mut tokens = request.prompt.clone();
    let first = tokens.len();
    let ending = |token: TokenId, output: usize| {
        let stops = request.stop_tokens.contains(&token);
        if output >= request.min_new_tokens as usize && stops {
            return Some(FinishReason::Stop);
        }
        (output == request.max_new_tokens as usize).then_some(FinishReason::Length)
    };
    loop {
        let begin = tokens.len() / size * size;
        let before = tokens[..begin].iter().fold(0, |b, &token| chain(b, token));
        let known = tokens.len() - begin;
        let mut block = tokens[begin..].to_vec();
        block.resize(size, MASK);
        if known == 0 {
            block.truncate(1);
            block[0] = next_token(before, alphabet);
        }
        let mut seen: Option<Vec<TokenId>> = None; // By the last pass over the whole block.
        'passes: loop {
            for (place, &token) in block.iter().enumerate().skip(known) {
                if token == MASK {
                    let places = next_places(rules, &block);
                    let part = rules.part as usize;
                    let begin = places.start / part * part;
                    match &mut seen {
                        Some(seen) if rules.has_block_cache && block[begin] != MASK => {
                            let part = begin..size.min(begin + part);
                            seen[part.clone()].copy_from_slice(&block[part]);
                        }
                        _ => seen = Some(block.clone()),
                    }
                    let view = seen.as_ref().expect("it was just set");
                    let kept = pass(before, view, places.clone(), alphabet);
                    for (place, kept) in places.zip(kept) {
                        block[place] = kept.unwrap_or(block[place]);
                    }
                    continue 'passes;
                }
                if let Some(reason) = ending(token, begin + place + 1 - first) {
                    tokens.truncate(begin);
                    tokens.extend(&block[..=place]);
                    return (tokens.split_off(first), reason);
                }
            }
            break;
        }
        tokens.truncate(begin);
        tokens.extend(block);
    }
}
