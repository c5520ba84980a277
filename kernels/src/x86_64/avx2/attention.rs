//! Attention for AVX2.

use std::array::from_fn;
use std::hint::black_box;
use std::ops::Range;

use super::super::attention::{PANEL_COLUMNS, PanelRow, next_keys, score_span, sum_span};
use super::super::{CACHE_LINE_HALVES, blocks, padded, prefetch};
use super::{broadcast, fused, lanes, load, narrow, widen, zero};
use crate::attention::{AttentionState, KvPage, PAGE_TOKENS, Row, Span};
use crate::elementwise::LANES;

/// Queries of a tile.
const TILE_ROWS: usize = 6;

/// Attention over one span.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn attention_span(span: Span<'_>, state: &mut AttentionState) {
    if state.positions() == 1 {
        one_position(span, state);
    } else {
        many_positions(span, state);
    }
}

/// For a step that decodes: each load of keys and values serves up to four heads, and what is read next is on its way.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn one_position(span: Span<'_>, state: &mut AttentionState) {
    let (group, head_dim) = (state.group(), state.head_dim());
    let (queries, scores) = state.queries_and_scores_mut();
    for heads in blocks(group, 4) {
        let (queries, scores) = (&queries[heads.clone()], &mut scores[heads.clone()]);
        for (index, page) in span.pages.iter().enumerate() {
            let first = index * PAGE_TOKENS;
            match heads.len() {
                1 => scores_of::<1>(queries, page, first, scores),
                2 => scores_of::<2>(queries, page, first, scores),
                3 => scores_of::<3>(queries, page, first, scores),
                _ => scores_of::<4>(queries, page, first, scores),
            }
        }
    }
    state.weigh_span(span.visible);
    let (weights, acc) = state.weights_and_acc_mut();
    for heads in blocks(group, 4) {
        let (weights, acc) = (&weights[heads.clone()], &mut acc[heads.clone()]);
        match heads.len() {
            1 => values_of::<1>(weights, span, head_dim, acc),
            2 => values_of::<2>(weights, span, head_dim, acc),
            3 => values_of::<3>(weights, span, head_dim, acc),
            _ => values_of::<4>(weights, span, head_dim, acc),
        }
    }
    state.merge_span();
}

/// Products of H queries with the keys of a page, whose first token is `first`: four queries are eight independent sums, enough to keep
/// both multipliers busy. The page's values, which are needed soon, are prefetched.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn scores_of<const H: usize>(queries: &[Row], page: &KvPage<'_>, first: usize, scores: &mut [Row]) {
    let head_dim = page.keys.len() / PAGE_TOKENS;
    let queries: [&[[f32; 2]]; H] = from_fn(|h| queries[h].0[..head_dim].as_chunks().0);
    let keys: &[[u16; CACHE_LINE_HALVES]] = page.keys.as_chunks().0;
    let keys = &keys[..head_dim / 2];
    let mut sums = [zero(); H];
    for (i, keys) in keys.iter().enumerate() {
        prefetch(page.values.as_ptr().wrapping_add(i * CACHE_LINE_HALVES));
        for half in [0, 1] {
            let keys = widen(&keys.as_chunks().0[half]);
            for h in 0..H {
                sums[h] = fused(broadcast(queries[h][i][half]), keys, sums[h]);
            }
        }
    }
    for h in 0..H {
        scores[h].0.as_chunks_mut().0[first / LANES] = lanes(sums[h]);
    }
}

/// Sums of weighted values for H heads, sixteen of a head's values at a time. Tokens that are not seen are not read. Later keys are
/// prefetched.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn values_of<const H: usize>(weights: &[Row], span: Span<'_>, head_dim: usize, acc: &mut [Row]) {
    let weights: [&[f32]; H] = from_fn(|h| &weights[h].0[..span.visible]);
    for first in (0..head_dim).step_by(LANES) {
        let mut sums = [zero(); H];
        for (index, page) in span.pages.iter().enumerate() {
            let next = next_keys(span, index, first..first + LANES);
            let tokens = index * PAGE_TOKENS..span.visible.min((index + 1) * PAGE_TOKENS);
            for (token, values) in tokens.zip(page.values.chunks_exact(head_dim)) {
                if token % 2 == 0 {
                    prefetch(next.wrapping_add(token % PAGE_TOKENS * LANES));
                }
                let values = widen(&values.as_chunks().0[first / LANES]);
                for h in 0..H {
                    sums[h] = fused(broadcast(weights[h][token]), values, sums[h]);
                }
            }
        }
        for h in 0..H {
            acc[h].0.as_chunks_mut().0[first / LANES] = lanes(sums[h]);
        }
    }
}

/// For chunks of a prompt: each key and value, widened once, serves the queries of all positions.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn many_positions(span: Span<'_>, state: &mut AttentionState) {
    let head_dim = state.head_dim();
    let tile = |a: &[Row], k: usize, panel: &[PanelRow], c: &mut [Row], column: usize, fresh| {
        tile_of_rows(a, k, panel, c, column, fresh);
    };
    score_span(
        state,
        span.pages,
        TILE_ROWS,
        |pages, panel| widen_keys(pages, panel),
        tile,
    );
    state.weigh_span(span.visible);
    let widen = |tokens: Range<usize>, column, panel: &mut [PanelRow]| {
        widen_values(span, head_dim, tokens, column, panel);
    };
    sum_span(state, span.visible, TILE_ROWS, widen, tile);
    state.merge_span();
}

/// Keys of one or two pages; columns of a page that is not there are zero.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn widen_keys(pages: &[KvPage<'_>], panel: &mut [PanelRow]) {
    for (p, part) in (0..PANEL_COLUMNS / LANES).enumerate() {
        match pages.get(p) {
            Some(page) => {
                let keys = page.keys.as_chunks::<PAGE_TOKENS>().0;
                for (i, (row, keys)) in panel.iter_mut().zip(keys).enumerate() {
                    prefetch(page.values.as_ptr().wrapping_add(i * PAGE_TOKENS));
                    row.0.as_chunks_mut().0[part] = lanes(widen(keys));
                }
            }
            None => {
                for row in &mut *panel {
                    row.0.as_chunks_mut::<LANES>().0[part] = [0.0; LANES];
                }
            }
        }
    }
}

/// 32 values, from `column` on, of some tokens; columns beyond the head are zero. Later keys are prefetched.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn widen_values(
    span: Span<'_>,
    head_dim: usize,
    tokens: Range<usize>,
    column: usize,
    panel: &mut [PanelRow],
) {
    for (token, row) in tokens.zip(panel) {
        let (page, at) = (token / PAGE_TOKENS, token % PAGE_TOKENS * head_dim + column);
        if let Some(next) = span.next.get(page) {
            prefetch(next.keys.as_ptr().wrapping_add(at));
        }
        let values = &span.pages[page].values[at..][..PANEL_COLUMNS.min(head_dim - column)];
        let values = values.as_chunks::<LANES>().0;
        for (part, row) in row.0.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            *row = match values.get(part) {
                Some(values) => lanes(widen(values)),
                None => [0.0; LANES],
            };
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn tile_of_rows(
    a: &[Row],
    k: usize,
    panel: &[PanelRow],
    c: &mut [Row],
    column: usize,
    fresh: bool,
) {
    match a.len() {
        1 => tile::<1>(a, k, panel, c, column, fresh),
        2 => tile::<2>(a, k, panel, c, column, fresh),
        3 => tile::<3>(a, k, panel, c, column, fresh),
        4 => tile::<4>(a, k, panel, c, column, fresh),
        5 => tile::<5>(a, k, panel, c, column, fresh),
        _ => tile::<6>(a, k, panel, c, column, fresh),
    }
}

/// R rows × 32 columns, as [`super::super::attention::Tile`] says: sixteen columns at a time.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn tile<const R: usize>(
    a: &[Row],
    k: usize,
    panel: &[PanelRow],
    c: &mut [Row],
    column: usize,
    fresh: bool,
) {
    let a: &[Row; R] = a[..R].try_into().expect("R rows");
    let c: &mut [Row; R] = (&mut c[..R]).try_into().expect("R rows");
    let rows = a.each_ref().map(|row| &row.0[k..][..panel.len()]);
    for half in 0..PANEL_COLUMNS / LANES {
        let column = column + half * LANES;
        let mut sums = [zero(); R];
        if !fresh {
            for r in 0..R {
                sums[r] = load(&c[r].0.as_chunks().0[column / LANES]);
            }
        }
        for (i, row) in panel.iter().enumerate() {
            let row = load(&row.0.as_chunks().0[half]);
            for r in 0..R {
                sums[r] = fused(broadcast(rows[r][i]), row, sums[r]);
            }
        }
        for r in 0..R {
            c[r].0.as_chunks_mut().0[column / LANES] = lanes(sums[r]);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn attention_finish(state: &AttentionState, out: &mut [f32]) {
    state.finish(out);
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

/// Twelve independent sums of register operands: eight multiplications and as many additions each a round.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn probe_f32(rounds: u64) -> u64 {
    let (a, b) = black_box((broadcast(0.5), broadcast(0.25)));
    let mut sums = [zero(); 6];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = fused(*sum, a, b);
        }
    }
    black_box(sums);
    rounds * 6 * LANES as u64 * 2
}
