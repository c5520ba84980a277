//! Kernels for AVX2 with FMA and F16C: eight rows, or half the lanes of a sum, in a register.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;
use std::array::from_fn;
use std::hint::black_box;
use std::ops::Range;

use zerocopy::{FromBytes, IntoBytes};

use super::{PREFETCH_BYTES, blocks, four_activations, padded, starts_and_nexts};
use crate::PANEL_ROWS;
use crate::activation::{QuantizedActivations, QuantizedTokenMut, ScaledActivations};
use crate::dense::{DenseMatrix, DenseValues};
use crate::elementwise::{self, LANES, PanelScales};
use crate::int8::{BYTE_ZERO, INT8_COLUMNS, Int8Matrix};
use crate::prefetch::PrefetchQueue;
use crate::softmax::{self, LogitScale};
use crate::ternary::{BLOCK_ROWS, Block, PANEL_BLOCKS, TWO_BIT_COLUMNS, TernaryMatrix};

pub(crate) mod attention;

/// Sixteen lanes of a float sum: 0..8 and 8..16.
type Lanes = [__m256; 2];

/// Blocks that 16-bit sums take before they are widened. A block adds four products of at least −2 · (2 · 128) and at most 2 · (2 · 127)
/// to each, so the sums of 16 blocks reach from −32,768 to 32,512 and just fit.
const NARROW_BLOCKS: usize = 16;

/// Fours of columns in a span of a panel: as many as 16-bit sums take.
const SPAN_FOURS: usize = NARROW_BLOCKS * TWO_BIT_COLUMNS / 4;

/// The codes of a span, one a byte: `[half of the panel][four columns][rows 0..8, 8..16]`.
type SpanCodes = [[[__m256i; 2]; SPAN_FOURS]; PANEL_BLOCKS];

/// Products of panels of two-bit weights: with one or two tokens straight from the blocks, with more by way of unpacked codes.
#[target_feature(enable = "avx2,fma,f16c")]
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
    let panels = panels.map(|panel| weights.panel(panel).as_chunks().0);
    let products = panels.zip(out.chunks_exact_mut(x.tokens() * PANEL_ROWS));
    match x.tokens() {
        1 => products.for_each(|(panel, out)| widened::<1>(panel, x, factors, out)),
        2 => products.for_each(|(panel, out)| widened::<2>(panel, x, factors, out)),
        _ => {
            let mut codes = [[[_mm256_setzero_si256(); 2]; SPAN_FOURS]; PANEL_BLOCKS];
            products.for_each(|(panel, out)| by_spans(panel, x, factors, &mut codes, out));
        }
    }
}

/// 32 rows × T tokens: pairs of products are summed in 16 bits and widened in time.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn widened<const T: usize>(
    panel: &[[Block; PANEL_BLOCKS]],
    x: &QuantizedActivations,
    factors: &[f32],
    out: &mut [f32],
) {
    let rows: [&[[i8; TWO_BIT_COLUMNS]]; T] = from_fn(|t| x.padded_row(t).as_chunks().0);
    let ones = _mm256_set1_epi16(1);
    let mut sums = [[[_mm256_setzero_si256(); 2]; PANEL_BLOCKS]; T];
    for (t, sums) in sums.iter_mut().enumerate() {
        *sums = [[_mm256_set1_epi32(-x.sum(t)); 2]; PANEL_BLOCKS];
    }
    for (index, steps) in panel.chunks(NARROW_BLOCKS).enumerate() {
        let rows = rows.map(|row| &row[index * NARROW_BLOCKS..][..steps.len()]);
        let narrow = narrow_sums::<T>(steps, rows);
        for t in 0..T {
            for half in 0..PANEL_BLOCKS {
                for part in 0..2 {
                    let wide = _mm256_madd_epi16(narrow[t][half][part], ones);
                    sums[t][half][part] = _mm256_add_epi32(sums[t][half][part], wide);
                }
            }
        }
    }
    let out = as_sums(out);
    store_sums(&sums, 0, out);
    scale_sums(factors, out);
}

/// The sums over at most [`NARROW_BLOCKS`] steps, each row's as two 16-bit halves: `[token][block][rows 0..8, 8..16]`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn narrow_sums<const T: usize>(
    steps: &[[Block; PANEL_BLOCKS]],
    rows: [&[[i8; TWO_BIT_COLUMNS]]; T],
) -> [[[__m256i; 2]; PANEL_BLOCKS]; T] {
    let mask = _mm256_set1_epi8(3);
    let mut sums = [[[_mm256_setzero_si256(); 2]; PANEL_BLOCKS]; T];
    for (b, step) in steps.iter().enumerate() {
        let mut packed = [load_bytes(&step[0].0), load_bytes(&step[1].0)];
        for block in step {
            prefetch(block.0.as_ptr().wrapping_add(PREFETCH_BYTES));
        }
        for f in 0..4 {
            let mut codes = packed;
            for half in 0..PANEL_BLOCKS {
                for part in 0..2 {
                    codes[half][part] = _mm256_and_si256(packed[half][part], mask);
                    packed[half][part] = _mm256_srli_epi32::<2>(packed[half][part]);
                }
            }
            for t in 0..T {
                let q = _mm256_set1_epi32(four_activations(&rows[t][b], f));
                for half in 0..PANEL_BLOCKS {
                    for part in 0..2 {
                        let pairs = _mm256_maddubs_epi16(codes[half][part], q);
                        sums[t][half][part] = _mm256_add_epi16(sums[t][half][part], pairs);
                    }
                }
            }
        }
    }
    sums
}

/// A panel × three tokens or more. A span of it is unpacked once, and meets all tokens while it is in the first-level cache.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn by_spans(
    panel: &[[Block; PANEL_BLOCKS]],
    x: &QuantizedActivations,
    factors: &[f32],
    codes: &mut SpanCodes,
    out: &mut [f32],
) {
    let out = as_sums(out);
    for (token, out) in out.chunks_exact_mut(PANEL_ROWS).enumerate() {
        out.fill(-x.sum(token));
    }
    let (spans, rest) = panel.as_chunks::<NARROW_BLOCKS>();
    for (i, span) in spans.iter().enumerate() {
        add_span::<SPAN_FOURS>(span, i * SPAN_FOURS, x, codes, out);
    }
    for (i, step) in rest.as_chunks::<1>().0.iter().enumerate() {
        add_span::<4>(step, spans.len() * SPAN_FOURS + 4 * i, x, codes, out);
    }
    scale_sums(factors, out);
}

/// The memory of outputs, for the sums that they are made of.
fn as_sums(out: &mut [f32]) -> &mut [i32] {
    FromBytes::mut_from_bytes(out.as_mut_bytes()).expect("as large and aligned as floats")
}

/// Turns the sums of a panel, `[token][32]`, into outputs in the same memory: each times its token's factor.
#[target_feature(enable = "avx2")]
#[inline]
fn scale_sums(factors: &[f32], sums: &mut [i32]) {
    for (sums, &factor) in sums.as_chunks_mut::<PANEL_ROWS>().0.iter_mut().zip(factors) {
        let factor = _mm256_set1_ps(factor);
        for sums in sums.as_chunks_mut().0 {
            let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(load_i32(sums)), factor);
            store_i32(_mm256_castps_si256(scaled), sums);
        }
    }
}

/// Adds the products of K · 4 columns, from four columns `start` on, with all tokens.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_span<const K: usize>(
    span: &[[Block; PANEL_BLOCKS]],
    start: usize,
    x: &QuantizedActivations,
    codes: &mut SpanCodes,
    out: &mut [i32],
) {
    for block in span.as_flattened() {
        prefetch(block.0.as_ptr().wrapping_add(PREFETCH_BYTES));
    }
    for tokens in blocks(x.tokens(), 4) {
        let out = &mut out[tokens.start * PANEL_ROWS..tokens.end * PANEL_ROWS];
        for (half, codes) in codes.iter_mut().enumerate() {
            let codes = codes.first_chunk_mut::<K>().expect("room for a span");
            let at = (tokens.start, start, half);
            match (tokens.start, tokens.len()) {
                (0, 2) => first_tile::<2, K>(span, codes, at, x, out),
                (0, 3) => first_tile::<3, K>(span, codes, at, x, out),
                (0, _) => first_tile::<4, K>(span, codes, at, x, out),
                (_, 3) => tile::<3, K>(codes, at, x, out),
                (_, _) => tile::<4, K>(codes, at, x, out),
            }
        }
    }
}

/// What [`tile`] does, and unpacks the codes for the tiles after it: by themselves, the stores would take longer than the multiplications
/// that they hide behind. A field at a time, since the compiler reorders the additions of four at once until they need more registers
/// than there are.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn first_tile<const T: usize, const K: usize>(
    span: &[[Block; PANEL_BLOCKS]],
    codes: &mut [[__m256i; 2]; K],
    (first, start, half): (usize, usize, usize),
    x: &QuantizedActivations,
    out: &mut [i32],
) {
    let span = &span[..K / 4];
    let rows = fours_of::<T, K>(x, first, start);
    let mask = _mm256_set1_epi8(3);
    let mut sums = [[_mm256_setzero_si256(); 2]; T];
    for f in 0..4 {
        for k in (f..K).step_by(4) {
            codes[k] = load_bytes(&span[k / 4][half].0).map(|packed| {
                let field = match f {
                    0 => packed,
                    1 => _mm256_srli_epi32::<2>(packed),
                    2 => _mm256_srli_epi32::<4>(packed),
                    _ => _mm256_srli_epi32::<6>(packed),
                };
                _mm256_and_si256(field, mask)
            });
            add_pairs(&mut sums, codes[k], rows.map(|row| row[k]));
        }
    }
    add_wide(&sums, half, out);
}

/// Adds the products of 16 rows and a span with T tokens.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn tile<const T: usize, const K: usize>(
    codes: &[[__m256i; 2]; K],
    (first, start, half): (usize, usize, usize),
    x: &QuantizedActivations,
    out: &mut [i32],
) {
    let rows = fours_of::<T, K>(x, first, start);
    let mut sums = [[_mm256_setzero_si256(); 2]; T];
    for k in 0..K {
        add_pairs(&mut sums, codes[k], rows.map(|row| row[k]));
    }
    add_wide(&sums, half, out);
}

/// K times four activations of each of T tokens.
#[inline(always)]
fn fours_of<const T: usize, const K: usize>(
    x: &QuantizedActivations,
    first: usize,
    start: usize,
) -> [&[[i8; 4]; K]; T] {
    from_fn(|t| {
        let fours = x.padded_row(first + t).as_chunks().0;
        fours[start..]
            .first_chunk()
            .expect("a row has whole blocks")
    })
}

/// Adds pairs of products of 16 rows with T tokens.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_pairs<const T: usize>(
    sums: &mut [[__m256i; 2]; T],
    codes: [__m256i; 2],
    fours: [[i8; 4]; T],
) {
    for t in 0..T {
        let q = _mm256_set1_epi32(four_activations(&fours[t], 0));
        for part in 0..2 {
            let pairs = _mm256_maddubs_epi16(codes[part], q);
            sums[t][part] = _mm256_add_epi16(sums[t][part], pairs);
        }
    }
}

/// Widens the sums of 16 rows with T tokens and adds them to those in `out`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_wide<const T: usize>(sums: &[[__m256i; 2]; T], half: usize, out: &mut [i32]) {
    let ones = _mm256_set1_epi16(1);
    let (out, _) = out.as_chunks_mut::<PANEL_ROWS>();
    // As many as there are sums, known here: the loops are then unrolled, and no sum leaves its register.
    let out = out.first_chunk_mut::<T>().expect("sums of T tokens");
    for (sums, out) in sums.iter().zip(out) {
        let out = &mut out.as_chunks_mut::<BLOCK_ROWS>().0[half];
        for (sum, out) in sums.iter().zip(out.as_chunks_mut().0) {
            let wide = _mm256_madd_epi16(*sum, ones);
            store_i32(_mm256_add_epi32(load_i32(out), wide), out);
        }
    }
}

/// Products of panels of 8-bit weights with up to four tokens at a time.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn int8_matmul(
    weights: &Int8Matrix,
    panels: Range<usize>,
    x: &QuantizedActivations,
    out: &mut [i32],
) {
    for (panel, out) in panels.zip(out.chunks_exact_mut(x.tokens() * PANEL_ROWS)) {
        let panel = weights.panel(panel).as_chunks().0;
        for tokens in blocks(x.tokens(), 4) {
            let out = &mut out[tokens.start * PANEL_ROWS..tokens.end * PANEL_ROWS];
            match tokens.len() {
                1 => int8_tile::<2, 1>(panel, 0, x, tokens.start, out),
                2 => int8_tile::<2, 2>(panel, 0, x, tokens.start, out),
                3 => (0..PANEL_BLOCKS)
                    .for_each(|half| int8_tile::<1, 3>(panel, half, x, tokens.start, out)),
                _ => (0..PANEL_BLOCKS)
                    .for_each(|half| int8_tile::<1, 4>(panel, half, x, tokens.start, out)),
            }
        }
    }
}

/// 16 · H rows, from block `half` of each step, × T tokens. The instruction multiplies an unsigned byte with a signed one, so the sign of
/// an activation goes over to the weight; two products of at most 128 · 127 each then fit 16 bits.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn int8_tile<const H: usize, const T: usize>(
    panel: &[[Block; PANEL_BLOCKS]],
    half: usize,
    x: &QuantizedActivations,
    first: usize,
    out: &mut [i32],
) {
    let rows: [&[[i8; INT8_COLUMNS]]; T] = from_fn(|t| x.padded_row(first + t).as_chunks().0);
    let ones = _mm256_set1_epi16(1);
    let byte_zero = _mm256_set1_epi8(BYTE_ZERO.cast_signed());
    let mut sums = [[[_mm256_setzero_si256(); 2]; H]; T];
    for (b, step) in panel.iter().enumerate() {
        for block in step {
            prefetch(block.0.as_ptr().wrapping_add(PREFETCH_BYTES));
        }
        let mut weights = [[_mm256_setzero_si256(); 2]; H];
        for (weights, block) in weights.iter_mut().zip(&step[half..]) {
            *weights = load_bytes(&block.0).map(|bytes| _mm256_xor_si256(bytes, byte_zero));
        }
        for t in 0..T {
            let q = _mm256_set1_epi32(four_activations(&rows[t][b], 0));
            let magnitude = _mm256_abs_epi8(q);
            for h in 0..H {
                for part in 0..2 {
                    let signed = _mm256_sign_epi8(weights[h][part], q);
                    let pairs = _mm256_maddubs_epi16(magnitude, signed);
                    let fours = _mm256_madd_epi16(pairs, ones);
                    sums[t][h][part] = _mm256_add_epi32(sums[t][h][part], fours);
                }
            }
        }
    }
    store_sums(&sums, half, out);
}

/// Stores the sums of T tokens and 16 · H rows from block `half` on.
#[target_feature(enable = "avx2")]
#[inline]
fn store_sums<const H: usize, const T: usize>(
    sums: &[[[__m256i; 2]; H]; T],
    half: usize,
    out: &mut [i32],
) {
    for (t, blocks) in sums.iter().enumerate() {
        for (h, parts) in blocks.iter().enumerate() {
            for (part, sum) in parts.iter().enumerate() {
                let row = (half + h) * BLOCK_ROWS + part * BLOCK_ROWS / 2;
                store_i32(*sum, &mut out[t * PANEL_ROWS + row..]);
            }
        }
    }
}

/// Products of panels of float rows with all tokens.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn dense_matmul(
    weights: &DenseMatrix,
    panels: Range<usize>,
    x: &[f32],
    m: usize,
    out: &mut [f32],
) {
    let panel_values = PANEL_ROWS * weights.columns();
    for (panel, out) in panels.zip(out.chunks_exact_mut(m * PANEL_ROWS)) {
        let values = panel * panel_values
            ..(weights.rows() * weights.columns()).min((panel + 1) * panel_values);
        out.fill(0.0);
        match weights.values() {
            DenseValues::F16(all) => dense_panel(&all[values], x, m, out, |halves| widen(halves)),
            DenseValues::F32(all) => dense_panel(&all[values], x, m, out, |values| load(values)),
        }
    }
}

/// Tokens outside, rows inside: a block of tokens stays in the first-level cache while the panel's rows pass from the second.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dense_panel<W: Copy + Default>(
    panel: &[W],
    x: &[f32],
    m: usize,
    out: &mut [f32],
    load_weights: impl Fn(&[W; LANES]) -> Lanes + Copy,
) {
    const ROWS: usize = 2;
    let columns = x.len() / m;
    let (whole, rest) = panel.split_at(panel.len() / (ROWS * columns) * (ROWS * columns));
    for tokens in blocks(m, 2) {
        let x = &x[tokens.start * columns..tokens.end * columns];
        let out = &mut out[tokens.start * PANEL_ROWS..tokens.end * PANEL_ROWS];
        for (block, rows) in whole.chunks_exact(ROWS * columns).enumerate() {
            dense_rows::<ROWS, W>(rows, columns, x, &mut out[block * ROWS..], load_weights);
        }
        for (row, values) in rest.chunks_exact(columns).enumerate() {
            dense_rows::<1, W>(
                values,
                columns,
                x,
                &mut out[whole.len() / columns + row..],
                load_weights,
            );
        }
    }
}

/// R rows with one or two tokens; `out` begins at the first row of the first token.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dense_rows<const R: usize, W: Copy + Default>(
    rows: &[W],
    columns: usize,
    x: &[f32],
    out: &mut [f32],
    load_weights: impl Fn(&[W; LANES]) -> Lanes + Copy,
) {
    let rows = (rows, (R * columns).cast_signed());
    match x.len() / columns {
        1 => dense_block::<R, 1, W>(rows, columns, x, out, load_weights),
        _ => dense_block::<R, 2, W>(rows, columns, x, out, load_weights),
    }
}

/// R rows with T tokens. What is multiplied next stands `next` values behind each row.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dense_block<const R: usize, const T: usize, W: Copy + Default>(
    (rows, next): (&[W], isize),
    columns: usize,
    x: &[f32],
    out: &mut [f32],
    load_weights: impl Fn(&[W; LANES]) -> Lanes,
) {
    let rows: [(&[[W; LANES]], &[W]); R] = from_fn(|r| rows[r * columns..][..columns].as_chunks());
    let x: [(&[[f32; LANES]], &[f32]); T] = from_fn(|t| x[t * columns..][..columns].as_chunks());
    let mut sums = [[zero(); T]; R];
    for chunk in 0..columns / LANES {
        let mut tokens = [zero(); T];
        for (token, x) in tokens.iter_mut().zip(&x) {
            *token = load(&x.0[chunk]);
        }
        for r in 0..R {
            let weights = &rows[r].0[chunk];
            prefetch(weights.as_ptr().wrapping_offset(next));
            let weights = load_weights(weights);
            for t in 0..T {
                sums[r][t] = fused(weights, tokens[t], sums[r][t]);
            }
        }
    }
    if !columns.is_multiple_of(LANES) {
        for r in 0..R {
            let weights = load_weights(&padded(rows[r].1));
            for t in 0..T {
                sums[r][t] = fused(weights, load(&padded(x[t].1)), sums[r][t]);
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            out[t * PANEL_ROWS + r] = sum_lanes(sums[r][t]);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn dense_dots(weights: &DenseMatrix, rows: &[u32], x: &[f32], out: &mut [f32]) {
    match weights.values() {
        DenseValues::F16(all) => dots(all, rows, x, out, |halves| widen(halves)),
        DenseValues::F32(all) => dots(all, rows, x, out, |values| load(values)),
    }
}

/// One row after the other, the next one asked for meanwhile.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dots<W: Copy + Default>(
    all: &[W],
    rows: &[u32],
    x: &[f32],
    out: &mut [f32],
    load_weights: impl Fn(&[W; LANES]) -> Lanes + Copy,
) {
    let columns = x.len();
    for ((start, next), out) in starts_and_nexts(rows, columns).zip(out.chunks_exact_mut(1)) {
        let row = (&all[start..][..columns], next);
        dense_block::<1, 1, _>(row, columns, x, out, load_weights);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn dense_row(weights: &DenseMatrix, row: usize, out: &mut [f32]) {
    let values = row * weights.columns()..(row + 1) * weights.columns();
    match weights.values() {
        DenseValues::F32(all) => out.copy_from_slice(&all[values]),
        DenseValues::F16(all) => {
            for (out, halves) in out.chunks_mut(LANES).zip(all[values].chunks(LANES)) {
                out.copy_from_slice(&lanes(widen(&padded(halves)))[..halves.len()]);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn quantize(x: &[f32], out: &mut QuantizedTokenMut<'_>) {
    (*out.scale, *out.sum) = elementwise::quantize(x, out.values);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    elementwise::rms_norm(x, weight, eps, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn rope(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    elementwise::rope(x, head_dim, cos, sin);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn relu2_gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
    elementwise::relu2_gate(gate, up, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn silu_gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
    elementwise::silu_gate(gate, up, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn scale_panel(
    acc: &[i32],
    scales: PanelScales<'_>,
    out: &mut [f32],
    largest: &mut [f32],
) {
    elementwise::scale_panel(acc, scales, out, largest);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn scan_logits(logits: &[f32], peaks: &mut [f32]) -> bool {
    softmax::scan_logits(logits, peaks)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn weigh_logits(
    logits: &[f32],
    scale: LogitScale,
    weights: &mut [f32],
    masses: &mut [f32],
    heaviest: &mut [f32],
) {
    softmax::weigh_logits(logits, scale, weights, masses, heaviest);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn sum_weights(logits: &[f32], scale: LogitScale, masses: &mut [f32]) {
    softmax::sum_weights(logits, scale, masses);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn weights_from(bar: f32, weights: &[f32], heaviest: &[f32]) -> (f64, usize) {
    softmax::weights_from(bar, weights, heaviest)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn drop_weights(bar: f32, weights: &mut [f32], heaviest: &[f32], masses: &mut [f32]) {
    softmax::drop_weights(bar, weights, heaviest, masses);
}

/// Reads all of `bytes`, in eight streams of registers that nothing waits for.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn probe_read(bytes: &[u8], ahead: bool) {
    let mut seen = [[_mm256_setzero_si256(); 2]; 4];
    for lines in bytes.as_chunks::<64>().0.as_chunks::<4>().0 {
        for (seen, line) in seen.iter_mut().zip(lines) {
            if ahead {
                prefetch(line.as_ptr().wrapping_add(PREFETCH_BYTES));
            }
            let [low, high] = load_bytes(line);
            *seen = [
                _mm256_or_si256(seen[0], low),
                _mm256_or_si256(seen[1], high),
            ];
        }
    }
    black_box(seen);
}

/// Twelve independent chains of 32 multiplications and 16 additions a round. A real sum adds once more, partly where the next
/// multiplications would be, so no product quite reaches this.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn probe_int8(rounds: u64) -> u64 {
    let codes = black_box(_mm256_set1_epi8(2));
    let mut pairs = black_box([_mm256_set1_epi8(-3); 12]);
    for _ in 0..rounds {
        for pair in &mut pairs {
            *pair = _mm256_maddubs_epi16(codes, *pair);
        }
    }
    black_box(pairs);
    rounds * 12 * 32 * 2
}

/// Asks for the cache line at `address`, which need not be valid.
#[inline(always)]
pub(crate) fn prefetch<T>(address: *const T) {
    // SAFETY: every x86-64 CPU has SSE, and a prefetch reads nothing.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
}

/// Zero in every lane.
#[target_feature(enable = "avx2")]
#[inline]
fn zero() -> Lanes {
    [_mm256_setzero_ps(); 2]
}

/// Adds sixteen lanes up in the order of `elementwise::sum_lanes`: halves onto each other.
#[target_feature(enable = "avx2")]
#[inline]
fn sum_lanes(lanes: Lanes) -> f32 {
    sum_eight_lanes(_mm256_add_ps(lanes[0], lanes[1]))
}

/// The rest of that order, once eight lanes are left.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn sum_eight_lanes(eight: __m256) -> f32 {
    let four = _mm_add_ps(
        _mm256_castps256_ps128(eight),
        _mm256_extractf128_ps::<1>(eight),
    );
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

/// `value` in every lane.
#[target_feature(enable = "avx2")]
#[inline]
fn broadcast(value: f32) -> Lanes {
    [_mm256_set1_ps(value); 2]
}

/// `a · b + c`, rounded once.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes {
    [
        _mm256_fmadd_ps(a[0], b[0], c[0]),
        _mm256_fmadd_ps(a[1], b[1], c[1]),
    ]
}

/// Loads 64 bytes, of a block: rows 0..8 and 8..16.
#[target_feature(enable = "avx2")]
#[inline]
fn load_bytes(bytes: &[u8; 64]) -> [__m256i; 2] {
    let register = bytes.as_ptr().cast::<__m256i>();
    // SAFETY: `bytes` is 64 readable bytes, two registers' worth, and `loadu` needs no alignment.
    unsafe {
        [
            _mm256_loadu_si256(register),
            _mm256_loadu_si256(register.add(1)),
        ]
    }
}

/// Loads sixteen floats.
#[target_feature(enable = "avx2")]
#[inline]
fn load(values: &[f32; LANES]) -> Lanes {
    let values = values.as_ptr();
    // SAFETY: `values` is sixteen readable floats, two registers' worth, and `loadu` needs no alignment.
    unsafe { [_mm256_loadu_ps(values), _mm256_loadu_ps(values.add(8))] }
}

/// Loads sixteen half-precision floats as f32.
#[target_feature(enable = "avx2,f16c")]
#[inline]
fn widen(halves: &[u16; LANES]) -> Lanes {
    let register = halves.as_ptr().cast::<__m128i>();
    // SAFETY: `halves` is 32 readable bytes, two registers' worth, and `loadu` needs no alignment.
    let [low, high] = unsafe { [_mm_loadu_si128(register), _mm_loadu_si128(register.add(1))] };
    [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
}

/// Sixteen floats in half precision, rounded to nearest even.
#[target_feature(enable = "avx2,f16c")]
#[inline]
fn narrow(values: Lanes) -> [u16; LANES] {
    let mut halves = [0; LANES];
    for (part, values) in halves.as_chunks_mut::<8>().0.iter_mut().zip(values) {
        let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
        // SAFETY: `part` is 16 writable bytes, and `storeu` needs no alignment.
        unsafe { _mm_storeu_si128(part.as_mut_ptr().cast(), rounded) }
    }
    halves
}

/// The lanes as an array.
#[target_feature(enable = "avx2")]
#[inline]
fn lanes(registers: Lanes) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    for (part, register) in lanes.as_chunks_mut::<8>().0.iter_mut().zip(registers) {
        // SAFETY: `part` is 32 writable bytes, and `storeu` needs no alignment.
        unsafe { _mm256_storeu_ps(part.as_mut_ptr(), register) }
    }
    lanes
}

/// Loads eight sums.
#[target_feature(enable = "avx2")]
#[inline]
fn load_i32(sums: &[i32; 8]) -> __m256i {
    // SAFETY: `sums` is 32 readable bytes, and `loadu` needs no alignment.
    unsafe { _mm256_loadu_si256(sums.as_ptr().cast()) }
}

/// Stores eight sums at the start of `out`.
#[target_feature(enable = "avx2")]
#[inline]
fn store_i32(sums: __m256i, out: &mut [i32]) {
    let out = &mut out[..BLOCK_ROWS / 2];
    // SAFETY: `out` is eight writable `i32`, by the slice just taken, and `storeu` needs no alignment.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), sums) }
}
