//! Attention for AVX2.

use std::array::from_fn;

use super::super::{CACHE_LINE_HALVES, blocks, padded};
use super::{broadcast, fused, lanes, load, narrow, prefetch, widen, zero};
use crate::attention::{AttentionState, KvPage, PAGE_TOKENS, SPAN_TOKENS};
use crate::elementwise::LANES;

/// Attention over one span; each load of keys and values serves up to two heads.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn attention_span(
    queries: &[f32],
    run: &[KvPage<'_>],
    visible: usize,
    state: &mut AttentionState,
) {
    let (group, head_dim) = (state.group(), state.head_dim());
    for heads in blocks(group, 2) {
        let queries = &queries[heads.start * head_dim..heads.end * head_dim];
        let scores = &mut state.scores_mut()[heads.start * SPAN_TOKENS..heads.end * SPAN_TOKENS];
        match heads.len() {
            1 => scores_of::<1>(queries, run, scores),
            _ => scores_of::<2>(queries, run, scores),
        }
    }
    state.weigh_span(visible);
    let (weights, acc) = state.weights_and_acc_mut();
    for heads in blocks(group, 2) {
        let weights = &weights[heads.start * SPAN_TOKENS..heads.end * SPAN_TOKENS];
        let acc = &mut acc[heads.start * head_dim..heads.end * head_dim];
        match heads.len() {
            1 => values_of::<1>(weights, run, visible, acc),
            _ => values_of::<2>(weights, run, visible, acc),
        }
    }
    state.merge_span();
}

/// Products of H queries with all keys of the run, two pages at a time: eight independent sums keep both multipliers busy.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn scores_of<const H: usize>(queries: &[f32], run: &[KvPage<'_>], scores: &mut [f32]) {
    let (pairs, last) = run.as_chunks::<2>();
    for (index, pair) in pairs.iter().enumerate() {
        let following = &run[2 * index + 2..];
        let scores = &mut scores[index * 2 * PAGE_TOKENS..];
        scores_of_pages::<H, 2>(queries, pair, following, scores);
    }
    if let [page] = last {
        let scores = &mut scores[pairs.len() * 2 * PAGE_TOKENS..];
        scores_of_pages::<H, 1>(queries, &[*page], &[], scores);
    }
}

/// `scores` begins at the first page's first token of the first head. The pages that follow are prefetched.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn scores_of_pages<const H: usize, const P: usize>(
    queries: &[f32],
    pages: &[KvPage<'_>; P],
    following: &[KvPage<'_>],
    scores: &mut [f32],
) {
    let head_dim = queries.len() / H;
    let queries: [&[f32]; H] = from_fn(|h| &queries[h * head_dim..][..head_dim]);
    let next: [&[u16]; P] = from_fn(|p| following.get(p).unwrap_or(&pages[p]).keys);
    let pages: [&[[u16; PAGE_TOKENS]]; P] = from_fn(|p| pages[p].keys.as_chunks().0);
    let mut sums = [[zero(); P]; H];
    for i in 0..head_dim {
        let mut keys = [zero(); P];
        for p in 0..P {
            prefetch(next[p].as_ptr().wrapping_add(i * PAGE_TOKENS));
            keys[p] = widen(&pages[p][i]);
        }
        for h in 0..H {
            let query = broadcast(queries[h][i]);
            for p in 0..P {
                sums[h][p] = fused(query, keys[p], sums[h][p]);
            }
        }
    }
    for h in 0..H {
        for p in 0..P {
            scores[h * SPAN_TOKENS + p * PAGE_TOKENS..][..PAGE_TOKENS]
                .copy_from_slice(&lanes(sums[h][p]));
        }
    }
}

/// Sums of weighted values for H heads, 32 of a head's values at a time.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn values_of<const H: usize>(weights: &[f32], run: &[KvPage<'_>], visible: usize, acc: &mut [f32]) {
    const WIDE: usize = 2;
    let head_dim = acc.len() / H;
    let mut first = 0;
    while first + WIDE * LANES <= head_dim {
        values_from::<H, WIDE>(weights, run, visible, first, acc);
        first += WIDE * LANES;
    }
    while first < head_dim {
        values_from::<H, 1>(weights, run, visible, first, acc);
        first += LANES;
    }
}

/// The 16 · J values of each head from `first` on. Tokens beyond `visible` are not read.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn values_from<const H: usize, const J: usize>(
    weights: &[f32],
    run: &[KvPage<'_>],
    visible: usize,
    first: usize,
    acc: &mut [f32],
) {
    let head_dim = acc.len() / H;
    let mut sums = [[zero(); J]; H];
    for (index, page) in run.iter().enumerate() {
        let next = run.get(index + 1).unwrap_or(page);
        for slot in 0..PAGE_TOKENS.min(visible - index * PAGE_TOKENS) {
            let token = index * PAGE_TOKENS + slot;
            let values = page.values[slot * head_dim + first..][..J * LANES]
                .as_chunks()
                .0;
            for line in (first..first + J * LANES).step_by(CACHE_LINE_HALVES) {
                prefetch(next.values.as_ptr().wrapping_add(slot * head_dim + line));
            }
            let mut widened = [zero(); J];
            for (widened, values) in widened.iter_mut().zip(values) {
                *widened = widen(values);
            }
            for h in 0..H {
                let weight = broadcast(weights[h * SPAN_TOKENS + token]);
                for j in 0..J {
                    sums[h][j] = fused(weight, widened[j], sums[h][j]);
                }
            }
        }
    }
    for h in 0..H {
        for j in 0..J {
            acc[h * head_dim + first + j * LANES..][..LANES].copy_from_slice(&lanes(sums[h][j]));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn store_kv(
    key: &[f32],
    value: &[f32],
    slot: usize,
    k_page: &mut [u16],
    v_page: &mut [u16],
) {
    let key_lanes = k_page.as_chunks_mut::<PAGE_TOKENS>().0;
    for (rows, key) in key_lanes.chunks_mut(LANES).zip(key.chunks(LANES)) {
        for (row, half) in rows.iter_mut().zip(narrow(load(&padded(key)))) {
            row[slot] = half;
        }
    }
    let v_row = &mut v_page[slot * value.len()..][..value.len()];
    for (halves, value) in v_row.chunks_mut(LANES).zip(value.chunks(LANES)) {
        halves.copy_from_slice(&narrow(load(&padded(value)))[..value.len()]);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn attention_finish(state: &AttentionState, out: &mut [f32]) {
    state.finish(out);
}
