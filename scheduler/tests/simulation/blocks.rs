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
    let block = random.pick(&[4, 8, 16, 32]);
    Some(Diffusion {
        block,
        part: random.between(1, u64::from(block)) as u32,
        mask_token: MASK,
        is_causal: random.percent(60),
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
        'passes: loop {
            for (place, &token) in block.iter().enumerate().skip(known) {
                if token == MASK {
                    let places = next_places(rules, &block);
                    let kept = pass(before, &block, places.clone(), alphabet);
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
