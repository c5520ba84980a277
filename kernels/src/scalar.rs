//! The definition, in plain Rust, of every kernel that the instruction sets implement differently.
//!
//! `elementwise.rs` and `softmax.rs` define the kernels over single rows. `attention.rs` defines
//! what happens between the two products of attention.

use std::hint::black_box;
use std::ops::Range;

use crate::activation::{QuantizedActivations, ScaledActivations};
use crate::attention::{AttentionState, ProductBuffers, Span};
use crate::block::PANEL_ROWS;
use crate::dense::{DenseMatrix, DenseValues, f16_from_f32, f32_from_f16};
use crate::elementwise::{LANES, sum_lanes};
use crate::four_bit::FourBitMatrix;
use crate::groups::GroupSize;
use crate::int8::Int8Matrix;
use crate::int8_rows::LOW_BITS;
use crate::kv_geometry::PAGE_TOKENS;
use crate::kv_page::{FloatChunk, FloatPage, Int8Page, SpanScales};
use crate::packing::{FIVE_TRIT_COLUMNS, TWO_BIT_COLUMNS};
use crate::prefetch::PrefetchQueue;
use crate::row_kernels::row_kernels;
use crate::ternary::TernaryMatrix;

/// The columns that are unpacked at once: whole blocks in every packing.
const UNPACKED: usize = 12 * FIVE_TRIT_COLUMNS;
const _: () = assert!(UNPACKED.is_multiple_of(TWO_BIT_COLUMNS));

/// The columns of the largest group.
const MAX_GROUP: usize = GroupSize::G256.columns();

/// Computes `out[panel][token][row] = factor(token) · Σ weight(row, k) · q(token, k)`. The sum over
/// the columns k is exact.
pub(crate) fn ternary_matmul(
    weights: &TernaryMatrix,
    panels: Range<usize>,
    x: ScaledActivations<'_>,
    out: &mut [f32],
    _: &mut PrefetchQueue<'_, '_>,
) {
    let ScaledActivations {
        activations: x,
        factors,
    } = x;
    for (panel, out) in panels.zip(out.chunks_exact_mut(x.tokens() * PANEL_ROWS)) {
        for (token, out) in out.chunks_exact_mut(PANEL_ROWS).enumerate() {
            for (row, out) in out.iter_mut().enumerate() {
                let mut sum = -x.sum(token);
                for (index, q) in x.row(token).chunks(UNPACKED).enumerate() {
                    let mut codes = [0; UNPACKED];
                    let codes = &mut codes[..q.len()];
                    weights.unpack(panel, row, index * UNPACKED, codes, i16::from);
                    sum += int_dot(codes, q);
                }
                *out = sum as f32 * factors[token];
            }
        }
    }
}

/// Computes the product of weights with groups, where `factor(token, group)` is 1 / s of the
/// quantized activations:
///
/// ```text
/// out[panel][token][row] = Σ_group dot(row, token, group) · scales(row, token, group)
/// scales(row, token, group) = scale(row, group) · factor(token, group)
/// dot(row, token, group) = Σ_{k in group} weight(row, k) · q(token, k)
/// ```
///
/// `dot` is an exact integer. The product of the two scales is rounded to f32. The sum over the
/// groups starts at 0 and takes them in ascending order; each of its multiplications is fused with
/// the addition, so rounded once.
pub(crate) fn grouped_matmul(
    weights: &TernaryMatrix,
    panels: Range<usize>,
    x: ScaledActivations<'_>,
    out: &mut [f32],
    _: &mut PrefetchQueue<'_, '_>,
) {
    let group = weights.columns_of_scale();
    let tokens = x.activations.tokens();
    for (panel, out) in panels.zip(out.chunks_exact_mut(tokens * PANEL_ROWS)) {
        for (token, out) in out.chunks_exact_mut(PANEL_ROWS).enumerate() {
            let (q, factors) = (x.activations.row(token), x.factors_of(token));
            for (row, out) in out.iter_mut().enumerate() {
                *out = 0.0;
                for (index, q) in q.chunks_exact(group).enumerate() {
                    let mut values = [0; MAX_GROUP];
                    let values = &mut values[..group];
                    let value = |code| i16::from(code) - 1;
                    weights.unpack(panel, row, index * group, values, value);
                    let dot = int_dot(values, q) as f32;
                    *out = dot.mul_add(
                        weights.panel_scale(panel, row, index) * factors[index],
                        *out,
                    );
                }
            }
        }
    }
}

fn int_dot(weights: &[i16], q: &[i8]) -> i32 {
    let products = weights.iter().zip(q);
    products
        .map(|(&weight, &q)| i32::from(weight) * i32::from(q))
        .sum()
}

/// Computes `out[panel][token][row] = Σ weight(row, k) · q(token, k)` exactly, without the scales
/// of the rows. Rows beyond the last are zero.
pub(crate) fn int8_matmul(
    weights: &Int8Matrix,
    panels: Range<usize>,
    x: &QuantizedActivations,
    out: &mut [i32],
) {
    int_matmul(
        weights.rows(),
        |row, k| weights.weight(row, k),
        panels,
        x,
        out,
    );
}

fn int_matmul(
    rows: usize,
    weight: impl Fn(usize, usize) -> i8,
    panels: Range<usize>,
    x: &QuantizedActivations,
    out: &mut [i32],
) {
    for (panel, out) in panels.zip(out.chunks_exact_mut(x.tokens() * PANEL_ROWS)) {
        out.fill(0);
        for (token, out) in out.chunks_exact_mut(PANEL_ROWS).enumerate() {
            for (out, row) in out.iter_mut().zip(panel * PANEL_ROWS..rows) {
                let products = x.row(token).iter().enumerate();
                *out = products
                    .map(|(k, &q)| i32::from(weight(row, k)) * i32::from(q))
                    .sum();
            }
        }
    }
}

/// Computes `out[panel][token][row] = Σ weight(row, k) · q(token, k)` exactly, without the scales
/// of the rows. Rows beyond the last are zero.
pub(crate) fn four_bit_matmul(
    weights: &FourBitMatrix,
    panels: Range<usize>,
    x: &QuantizedActivations,
    out: &mut [i32],
) {
    int_matmul(
        weights.rows(),
        |row, k| weights.weight(row, k),
        panels,
        x,
        out,
    );
}

/// Computes `out[panel][token][row] = Σ weight(row, k) · x(token, k)`. Lane k mod 16 adds up its
/// products in ascending k, each fused with its addition. Then `sum_lanes` adds up the lanes. Rows
/// beyond the last are zero.
pub(crate) fn dense_matmul(
    weights: &DenseMatrix,
    panels: Range<usize>,
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
) {
    let columns = weights.columns();
    for (panel, out) in panels.zip(out.chunks_exact_mut(tokens * PANEL_ROWS)) {
        out.fill(0.0);
        for lane in 0..PANEL_ROWS.min(weights.rows() - panel * PANEL_ROWS) {
            let row = panel * PANEL_ROWS + lane;
            for (token, x) in x.chunks_exact(columns).enumerate() {
                out[token * PANEL_ROWS + lane] = dense_dot(weights, row, x);
            }
        }
    }
}

/// Multiplies one token by some rows, as [`dense_matmul`] does.
pub(crate) fn dense_dots(weights: &DenseMatrix, rows: &[u32], x: &[f32], out: &mut [f32]) {
    for (row, out) in rows.iter().zip(out) {
        *out = dense_dot(weights, *row as usize, x);
    }
}

fn dense_dot(weights: &DenseMatrix, row: usize, x: &[f32]) -> f32 {
    let values = row * weights.columns()..(row + 1) * weights.columns();
    match weights.values() {
        DenseValues::F16(all) => dot(all[values].iter().map(|&half| f32_from_f16(half)), x),
        DenseValues::F32(all) => dot(all[values].iter().copied(), x),
    }
}

fn dot(weights: impl Iterator<Item = f32>, x: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    for (k, (weight, &x)) in weights.zip(x).enumerate() {
        lanes[k % LANES] = weight.mul_add(x, lanes[k % LANES]);
    }
    sum_lanes(&lanes)
}

/// Copies a row as f32.
pub(crate) fn dense_row(weights: &DenseMatrix, row: usize, out: &mut [f32]) {
    let values = row * weights.columns()..(row + 1) * weights.columns();
    match weights.values() {
        DenseValues::F32(all) => out.copy_from_slice(&all[values]),
        DenseValues::F16(all) => {
            for (out, &half) in out.iter_mut().zip(&all[values]) {
                *out = f32_from_f16(half);
            }
        }
    }
}

/// Reduces one span of floats for the queries of the state, query by query:
///
/// 1. the products with the keys, in ascending dimension, fused;
/// 2. the weights;
/// 3. the sums of the weighted values, in ascending token, fused.
pub(crate) fn attention_span<C: FloatChunk>(span: Span<'_>, state: &mut AttentionState) {
    let head_dim = state.head_dim();
    let pages = FloatPage::<C>::all_of(span.pages, head_dim);
    for row in 0..state.rows() {
        let seen = state.seen(row, span.visible);
        let ProductBuffers { input, output, .. } = state.score_buffers();
        for (token, score) in output[row].0.iter_mut().enumerate().take(seen) {
            let keys = pages[token / PAGE_TOKENS].keys.iter();
            let lane = keys.map(|chunk| chunk.stored().widened(token % PAGE_TOKENS));
            let query = input[row].0.iter().zip(lane);
            *score = query.fold(0.0, |sum, (q, key)| q.mul_add(key, sum));
        }
    }
    let scales = C::UNIT.map(|unit| SpanScales::of(span.pages, unit));
    state.weigh_span((span.visible, span.hidden), scales.as_ref());
    for row in 0..state.rows() {
        let seen = state.seen(row, span.visible);
        let ProductBuffers { input, output, .. } = state.value_buffers();
        let acc = &mut output[row].0[..head_dim];
        acc.fill(0.0);
        for (token, weight) in input[row].0.iter().enumerate().take(seen) {
            let values = pages[token / PAGE_TOKENS].values;
            let values = values
                .chunks_exact(head_dim / LANES)
                .nth(token % PAGE_TOKENS);
            let values = values.expect("a value of each token");
            for (acc, values) in acc.as_chunks_mut::<LANES>().0.iter_mut().zip(values) {
                let stored = values.stored();
                for (lane, acc) in acc.iter_mut().enumerate() {
                    *acc = weight.mul_add(stored.widened(lane), *acc);
                }
            }
        }
    }
}

/// Reduces one span of 8-bit integers for the queries of the state; see `int8_rows.rs`. Both
/// products are exact.
pub(crate) fn int8_attention_span(span: Span<'_>, state: &mut AttentionState) {
    let head_dim = state.head_dim();
    let pages = Int8Page::all_of(span.pages, head_dim);
    let pages = &pages[..span.pages.len()];
    state.quantize_queries();
    let (rows, scores) = state.int8_score_buffers();
    for (row, scores) in rows.iter().zip(scores) {
        for (page, scores) in pages.iter().zip(scores.0.as_chunks_mut::<PAGE_TOKENS>().0) {
            for (token, score) in scores.iter_mut().enumerate() {
                let query = row.query.as_flattened().iter().take(head_dim).enumerate();
                let products = query.map(|(i, &q)| i32::from(q) * i32::from(page.key(token, i)));
                *score = products.sum::<i32>() as f32;
            }
        }
    }
    state.weigh_int8_span(span, &SpanScales::of(span.pages, 1.0), || ());
    let (rows, acc) = state.int8_value_buffers();
    for (row, acc) in rows.iter().zip(acc) {
        let (high, low) = (row.high.as_flattened(), row.low.as_flattened());
        for (i, acc) in acc.0.iter_mut().enumerate().take(head_dim) {
            let mut sum = 0;
            for token in 0..pages.len() * PAGE_TOKENS {
                let weight = i32::from(high[token]) << LOW_BITS | i32::from(low[token]);
                let value = pages[token / PAGE_TOKENS].value(token % PAGE_TOKENS, i);
                sum += weight * i32::from(value);
            }
            *acc = sum as f32 * row.weight_scale;
        }
    }
}

/// Stores a token's key as a lane of the page's keys and its value as a row, rounded to half
/// precision.
pub(crate) fn store_f16(key: &[f32], value: &[f32], slot: usize, page: &mut [u8]) {
    let (keys, values) = page
        .as_chunks_mut::<2>()
        .0
        .split_at_mut(key.len() * PAGE_TOKENS);
    for (half, &key) in keys.iter_mut().skip(slot).step_by(PAGE_TOKENS).zip(key) {
        *half = f16_from_f32(key).to_le_bytes();
    }
    for (half, &value) in values.iter_mut().skip(slot * value.len()).zip(value) {
        *half = f16_from_f32(value).to_le_bytes();
    }
}

row_kernels! {}

/// Reads all bytes.
pub(crate) fn probe_read(bytes: &[u8], _prefetches: bool) {
    let words = bytes.as_chunks::<8>().0.iter();
    black_box(words.fold(0, |seen, &word| seen | u64::from_ne_bytes(word)));
}

/// Computes sixteen independent sums, each a fused multiplication and addition a round.
pub(crate) fn probe_f32(rounds: u64) -> u64 {
    let (a, b) = black_box((0.5_f32, 0.25));
    let mut sums = [1.0_f32; 16];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = sum.mul_add(a, b);
        }
    }
    black_box(sums);
    rounds * 16 * 2
}

/// Computes sixteen independent sums, each a multiplication and an addition a round.
pub(crate) fn probe_int8(rounds: u64) -> u64 {
    let (code, q) = black_box((2, -3));
    let mut sums = [1_i32; 16];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = sum.wrapping_mul(code).wrapping_add(q);
        }
    }
    black_box(sums);
    rounds * 16 * 2
}
