//! Attention for AVX-512.

use std::arch::x86_64::*;
use std::array::from_fn;
use std::hint::black_box;
use std::ops::Range;

use super::super::attention::{PANEL_COLUMNS, PanelRow, next_keys, score_span, sum_span};
use super::super::{CACHE_LINE_HALVES, blocks, padded, prefetch};
use super::{lanes, load, narrow, widen};
use crate::attention::{AttentionState, KvPage, PAGE_TOKENS, Row, Span};
use crate::elementwise::LANES;

/// Queries of a tile.
const TILE_ROWS: usize = 12;

/// Registers of a panel's row.
const PANEL_REGISTERS: usize = PANEL_COLUMNS / LANES;

/// Attention over one span.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn attention_span(span: Span<'_>, state: &mut AttentionState) {
    if state.positions() == 1 {
        one_position(span, state);
    } else {
        many_positions(span, state);
    }
}

/// For a step that decodes: each load of keys and values serves up to four heads, and what is read next is on its way.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn one_position(span: Span<'_>, state: &mut AttentionState) {
    let (group, head_dim) = (state.group(), state.head_dim());
    let (queries, scores) = state.queries_and_scores_mut();
    for heads in blocks(group, 4) {
        let (queries, scores) = (&queries[heads.clone()], &mut scores[heads.clone()]);
        match heads.len() {
            1 => scores_of::<1>(queries, span.pages, scores),
            2 => scores_of::<2>(queries, span.pages, scores),
            3 => scores_of::<3>(queries, span.pages, scores),
            _ => scores_of::<4>(queries, span.pages, scores),
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

/// Products of H queries with all keys of the run, four pages at a time: enough independent sums to keep both multipliers busy.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn scores_of<const H: usize>(queries: &[Row], pages: &[KvPage<'_>], scores: &mut [Row]) {
    let (fours, rest) = pages.as_chunks::<4>();
    for (index, four) in fours.iter().enumerate() {
        scores_of_pages::<H, 4>(queries, four, index * 4 * PAGE_TOKENS, scores);
    }
    let (two, one) = rest.as_chunks::<2>();
    let mut first = fours.len() * 4 * PAGE_TOKENS;
    if let [two] = two {
        scores_of_pages::<H, 2>(queries, two, first, scores);
        first += 2 * PAGE_TOKENS;
    }
    if let [one] = one {
        scores_of_pages::<H, 1>(queries, &[*one], first, scores);
    }
}

/// `first` is the pages' first token. Their values, which are needed soon, are prefetched.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn scores_of_pages<const H: usize, const P: usize>(
    queries: &[Row],
    pages: &[KvPage<'_>; P],
    first: usize,
    scores: &mut [Row],
) {
    let head_dim = pages[0].keys.len() / PAGE_TOKENS;
    let queries: [&[[f32; 2]]; H] = from_fn(|h| queries[h].0[..head_dim].as_chunks().0);
    let values: [*const u16; P] = from_fn(|p| pages[p].values.as_ptr());
    let pages: [&[[u16; CACHE_LINE_HALVES]]; P] =
        from_fn(|p| &pages[p].keys.as_chunks().0[..head_dim / 2]);
    let mut sums = [[_mm512_setzero_ps(); P]; H];
    // The values are fetched in the order of memory, which the hardware's own prefetching goes along with.
    let steps_a_page = head_dim / 2 / P;
    let (mut page, mut steps_left, mut fetched) = (0, steps_a_page, values[0]);
    for i in 0..head_dim / 2 {
        if steps_left == 0 {
            page = (page + 1) % P;
            (steps_left, fetched) = (steps_a_page, values[page]);
        }
        steps_left -= 1;
        for _ in 0..P {
            prefetch(fetched);
            fetched = fetched.wrapping_add(CACHE_LINE_HALVES);
        }
        for half in [0, 1] {
            let mut keys = [_mm512_setzero_ps(); P];
            for p in 0..P {
                keys[p] = widen(&pages[p][i].as_chunks().0[half]);
            }
            for h in 0..H {
                let query = _mm512_set1_ps(queries[h][i][half]);
                for p in 0..P {
                    sums[h][p] = _mm512_fmadd_ps(query, keys[p], sums[h][p]);
                }
            }
        }
    }
    for h in 0..H {
        let scores = &mut scores[h].0[first..][..P * PAGE_TOKENS];
        for (scores, sums) in scores.as_chunks_mut().0.iter_mut().zip(sums[h]) {
            *scores = lanes(sums);
        }
    }
}

/// Sums of weighted values for H heads, four registers of a head's values at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn values_of<const H: usize>(weights: &[Row], span: Span<'_>, head_dim: usize, acc: &mut [Row]) {
    const WIDE: usize = 4;
    let mut first = 0;
    while first + WIDE * LANES <= head_dim {
        values_from::<H, WIDE>(weights, span, head_dim, first, acc);
        first += WIDE * LANES;
    }
    while first < head_dim {
        values_from::<H, 1>(weights, span, head_dim, first, acc);
        first += LANES;
    }
}

/// The 16 · J values of each head from `first` on. Tokens that are not seen are not read. Later keys are prefetched.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn values_from<const H: usize, const J: usize>(
    weights: &[Row],
    span: Span<'_>,
    head_dim: usize,
    first: usize,
    acc: &mut [Row],
) {
    let weights: [&[f32]; H] = from_fn(|h| &weights[h].0[..span.visible]);
    let mut sums = [[_mm512_setzero_ps(); J]; H];
    for (index, page) in span.pages.iter().enumerate() {
        let next = next_keys(span, index, first..first + J * LANES);
        let tokens = index * PAGE_TOKENS..span.visible.min((index + 1) * PAGE_TOKENS);
        for (token, values) in tokens.zip(page.values.chunks_exact(head_dim)) {
            let at = (token % PAGE_TOKENS) * J * LANES;
            for line in (0..J * LANES).step_by(CACHE_LINE_HALVES) {
                prefetch(next.wrapping_add(at + line));
            }
            let values = values[first..][..J * LANES].as_chunks().0;
            let mut widened = [_mm512_setzero_ps(); J];
            for (widened, values) in widened.iter_mut().zip(values) {
                *widened = widen(values);
            }
            for h in 0..H {
                let weight = _mm512_set1_ps(weights[h][token]);
                for j in 0..J {
                    sums[h][j] = _mm512_fmadd_ps(weight, widened[j], sums[h][j]);
                }
            }
        }
    }
    for h in 0..H {
        let acc = acc[h].0[first..][..J * LANES].as_chunks_mut().0;
        for (acc, sums) in acc.iter_mut().zip(sums[h]) {
            *acc = lanes(sums);
        }
    }
}

/// For chunks of a prompt: each key and value, widened once, serves the queries of all positions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn widen_keys(pages: &[KvPage<'_>], panel: &mut [PanelRow]) {
    for (p, part) in (0..PANEL_REGISTERS).enumerate() {
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
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

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
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
        6 => tile::<6>(a, k, panel, c, column, fresh),
        7 => tile::<7>(a, k, panel, c, column, fresh),
        8 => tile::<8>(a, k, panel, c, column, fresh),
        9 => tile::<9>(a, k, panel, c, column, fresh),
        10 => tile::<10>(a, k, panel, c, column, fresh),
        11 => tile::<11>(a, k, panel, c, column, fresh),
        _ => tile::<12>(a, k, panel, c, column, fresh),
    }
}

/// R rows × 32 columns, as [`super::super::attention::Tile`] says.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
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
    let mut sums = [[_mm512_setzero_ps(); PANEL_REGISTERS]; R];
    if !fresh {
        for r in 0..R {
            let c = c[r].0[column..][..PANEL_COLUMNS].as_chunks().0;
            for (sum, c) in sums[r].iter_mut().zip(c) {
                *sum = load(c);
            }
        }
    }
    for (i, row) in panel.iter().enumerate() {
        let row = row.0.as_chunks().0;
        let row = [load(&row[0]), load(&row[1])];
        for r in 0..R {
            let a = _mm512_set1_ps(rows[r][i]);
            for j in 0..PANEL_REGISTERS {
                sums[r][j] = _mm512_fmadd_ps(a, row[j], sums[r][j]);
            }
        }
    }
    for r in 0..R {
        let c = c[r].0[column..][..PANEL_COLUMNS].as_chunks_mut().0;
        for (c, sum) in c.iter_mut().zip(sums[r]) {
            *c = lanes(sum);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn attention_finish(state: &AttentionState, out: &mut [f32]) {
    state.finish(out);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
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

/// Sixteen independent sums of register operands: 16 multiplications and as many additions each a round.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn probe_f32(rounds: u64) -> u64 {
    let (a, b) = black_box((_mm512_set1_ps(0.5), _mm512_set1_ps(0.25)));
    let mut sums = [_mm512_setzero_ps(); 16];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, a, b);
        }
    }
    black_box(sums);
    rounds * 16 * 16 * 2
}
