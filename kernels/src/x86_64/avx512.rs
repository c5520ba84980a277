//! Kernels for AVX-512 with VNNI: sixteen rows, or sixteen lanes of a sum, in a register.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;
use std::array::from_fn;
use std::hint::black_box;
use std::ops::Range;

use super::avx2::sum_eight_lanes;
use super::{
    GROUP_TOKENS, PREFETCH_BYTES, blocks, four_activations, padded, prefetch, starts_and_nexts,
};
use crate::PANEL_ROWS;
use crate::activation::{QuantizedActivations, QuantizedTokenMut, ScaledActivations};
use crate::dense::{DenseMatrix, DenseValues};
use crate::elementwise::{self, LANES, PanelScales};
use crate::int8::{BYTE_ZERO, INT8_COLUMNS, Int8Matrix};
use crate::prefetch::PrefetchQueue;
use crate::softmax::{self, LogitScale};
use crate::ternary::{BLOCK_ROWS, Block, PANEL_BLOCKS, TWO_BIT_COLUMNS, TernaryMatrix};

pub(crate) mod attention;

/// Products of panels of two-bit weights with up to eight tokens at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn ternary_matmul(
    weights: &TernaryMatrix,
    panels: Range<usize>,
    x: ScaledActivations<'_>,
    out: &mut [f32],
    prefetches: &mut PrefetchQueue<'_, '_>,
) {
    let ScaledActivations {
        activations: x,
        factors,
    } = x;
    for_each_tile(panels, x.tokens(), out, |panel, tokens, out| {
        let panel = weights.panel(panel).as_chunks().0;
        let at = (tokens.start, &factors[tokens.clone()]);
        match tokens.len() {
            1 => in_place::<1>(panel, x, at, out),
            2 => in_place::<2>(panel, x, at, out),
            3 => shifted::<3>(panel, x, at, prefetches, out),
            4 => shifted::<4>(panel, x, at, prefetches, out),
            5 => shifted::<5>(panel, x, at, prefetches, out),
            6 => shifted::<6>(panel, x, at, prefetches, out),
            7 => shifted::<7>(panel, x, at, prefetches, out),
            _ => shifted::<8>(panel, x, at, prefetches, out),
        }
    });
}

/// 32 rows × T tokens, for few tokens: fields are multiplied where they stand in their bytes, as 4^f · code, each into a sum of its own
/// that is shifted at the end. The largest sum, 128 · 128 · k / 4, fits an `i32` by the bound on k.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn in_place<const T: usize>(
    panel: &[[Block; PANEL_BLOCKS]],
    x: &QuantizedActivations,
    (first, factors): (usize, &[f32]),
    out: &mut [f32],
) {
    let rows: [&[[i8; TWO_BIT_COLUMNS]]; T] = from_fn(|t| x.padded_row(first + t).as_chunks().0);
    let mut sums = [[[_mm512_setzero_si512(); PANEL_BLOCKS]; T]; 4];
    for (b, step) in panel.iter().enumerate() {
        prefetch_panel(step);
        let packed = [load_block(&step[0]), load_block(&step[1])];
        for (f, sums) in sums.iter_mut().enumerate() {
            let mask = field_mask(f);
            let codes = [
                _mm512_and_si512(packed[0], mask),
                _mm512_and_si512(packed[1], mask),
            ];
            for t in 0..T {
                let q = _mm512_set1_epi32(four_activations(&rows[t][b], f));
                for half in 0..PANEL_BLOCKS {
                    sums[t][half] = _mm512_dpbusd_epi32(sums[t][half], codes[half], q);
                }
            }
        }
    }
    let mut totals = minus_sums::<T>(x, first, 1);
    for (t, totals) in totals.iter_mut().enumerate() {
        for (half, total) in totals.iter_mut().enumerate() {
            let sum = sum_of_fields(sums.map(|sums| sums[t][half]));
            *total = _mm512_add_epi32(sum, *total);
        }
    }
    store_scaled(&totals, factors, out);
}

/// 32 rows × T tokens: each field is shifted down once and multiplied with every token. Unpacking hides behind the multiplications.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn shifted<const T: usize>(
    panel: &[[Block; PANEL_BLOCKS]],
    x: &QuantizedActivations,
    (first, factors): (usize, &[f32]),
    prefetches: &mut PrefetchQueue<'_, '_>,
    out: &mut [f32],
) {
    let rows: [&[[i8; TWO_BIT_COLUMNS]]; T] = from_fn(|t| x.padded_row(first + t).as_chunks().0);
    let mask = _mm512_set1_epi8(3);
    let mut sums = minus_sums::<T>(x, first, 1);
    for (b, step) in panel.iter().enumerate() {
        prefetch_panel(step);
        prefetches.step();
        let mut packed = [load_block(&step[0]), load_block(&step[1])];
        for f in 0..4 {
            let codes = [
                _mm512_and_si512(packed[0], mask),
                _mm512_and_si512(packed[1], mask),
            ];
            packed = [
                _mm512_srli_epi32::<2>(packed[0]),
                _mm512_srli_epi32::<2>(packed[1]),
            ];
            for t in 0..T {
                let q = _mm512_set1_epi32(four_activations(&rows[t][b], f));
                for half in 0..PANEL_BLOCKS {
                    sums[t][half] = _mm512_dpbusd_epi32(sums[t][half], codes[half], q);
                }
            }
        }
    }
    store_scaled(&sums, factors, out);
}

/// Products of panels of 8-bit weights with up to eight tokens at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn int8_matmul(
    weights: &Int8Matrix,
    panels: Range<usize>,
    x: &QuantizedActivations,
    out: &mut [i32],
) {
    let last = weights.panels() - 1;
    for_each_tile(panels, x.tokens(), out, |panel, tokens, out| {
        // Each of several tiles asks for its part of the next panel: the first alone would wait for all of it, and the others for nothing.
        // (A head's tokens are few enough to be one group.)
        let next = weights.panel(last.min(panel + 1));
        let part = |token| next.len() * token / x.tokens();
        let ahead = if tokens.len() < x.tokens() {
            &next[part(tokens.start)..part(tokens.end)]
        } else {
            &[]
        };
        let panel = weights.panel(panel).as_chunks().0;
        let first = tokens.start;
        match tokens.len() {
            1 => int8_tile::<1>(panel, x, first, ahead, out),
            2 => int8_tile::<2>(panel, x, first, ahead, out),
            3 => int8_tile::<3>(panel, x, first, ahead, out),
            4 => int8_tile::<4>(panel, x, first, ahead, out),
            5 => int8_tile::<5>(panel, x, first, ahead, out),
            6 => int8_tile::<6>(panel, x, first, ahead, out),
            7 => int8_tile::<7>(panel, x, first, ahead, out),
            _ => int8_tile::<8>(panel, x, first, ahead, out),
        }
    });
}

/// 32 rows × T tokens: bytes are multiplied as they are, and the 128 in each is taken off at the start. Prefetches a block of
/// `ahead` a step, or what stands [`PREFETCH_BYTES`] further on if there are none.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn int8_tile<const T: usize>(
    panel: &[[Block; PANEL_BLOCKS]],
    x: &QuantizedActivations,
    first: usize,
    ahead: &[Block],
    out: &mut [i32],
) {
    let rows: [&[[i8; INT8_COLUMNS]]; T] = from_fn(|t| x.padded_row(first + t).as_chunks().0);
    let mut sums = minus_sums::<T>(x, first, i32::from(BYTE_ZERO));
    for (b, step) in panel.iter().enumerate() {
        match ahead.get(b) {
            Some(block) => prefetch(block.0.as_ptr()),
            None if !ahead.is_empty() => {}
            None if T <= 4 => prefetch_stream(step),
            None => prefetch_panel(step),
        }
        let bytes = [load_block(&step[0]), load_block(&step[1])];
        for t in 0..T {
            let q = _mm512_set1_epi32(four_activations(&rows[t][b], 0));
            for half in 0..PANEL_BLOCKS {
                sums[t][half] = _mm512_dpbusd_epi32(sums[t][half], bytes[half], q);
            }
        }
    }
    store_sums(&sums, out);
}

/// Calls `tile(panel, tokens, out)` for up to eight tokens and one panel at a time. Tokens are taken in groups whose activations stay in
/// the second-level cache while the panels pass.
#[inline(always)]
pub(super) fn for_each_tile<V>(
    panels: Range<usize>,
    tokens: usize,
    out: &mut [V],
    mut tile: impl FnMut(usize, Range<usize>, &mut [V]),
) {
    for group in blocks(tokens, GROUP_TOKENS) {
        let outs = out.chunks_exact_mut(tokens * PANEL_ROWS);
        for (panel, out) in panels.clone().zip(outs) {
            for tokens in blocks(group.len(), 8) {
                let tokens = group.start + tokens.start..group.start + tokens.end;
                let out = &mut out[tokens.start * PANEL_ROWS..tokens.end * PANEL_ROWS];
                tile(panel, tokens, out);
            }
        }
    }
}

/// Where field f of each byte stands.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn field_mask(f: usize) -> __m512i {
    _mm512_set1_epi8((3_u8 << (2 * f)).cast_signed())
}

/// The sum of the sums of fields 0..4 that were multiplied as 4^f · code.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn sum_of_fields([s0, s1, s2, s3]: [__m512i; 4]) -> __m512i {
    let low = _mm512_add_epi32(s0, _mm512_srai_epi32::<2>(s1));
    let high = _mm512_add_epi32(_mm512_srai_epi32::<4>(s2), _mm512_srai_epi32::<6>(s3));
    _mm512_add_epi32(low, high)
}

/// What the sums of T tokens begin with: what `each` too much in every code adds up to, taken off.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn minus_sums<const T: usize>(
    x: &QuantizedActivations,
    first: usize,
    each: i32,
) -> [[__m512i; PANEL_BLOCKS]; T] {
    let mut sums = [[_mm512_setzero_si512(); PANEL_BLOCKS]; T];
    for (t, sums) in sums.iter_mut().enumerate() {
        *sums = [_mm512_set1_epi32(-each * x.sum(first + t)); PANEL_BLOCKS];
    }
    sums
}

/// Stores the sums of T tokens, `[T][32]`.
#[target_feature(enable = "avx512f")]
#[inline]
fn store_sums<const T: usize>(sums: &[[__m512i; PANEL_BLOCKS]; T], out: &mut [i32]) {
    for (t, sums) in sums.iter().enumerate() {
        for (half, sum) in sums.iter().enumerate() {
            store_i32(*sum, &mut out[t * PANEL_ROWS + half * BLOCK_ROWS..]);
        }
    }
}

/// Stores the sums of T tokens, each times its token's factor, `[T][32]`.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn store_scaled<const T: usize>(
    sums: &[[__m512i; PANEL_BLOCKS]; T],
    factors: &[f32],
    out: &mut [f32],
) {
    let (out, _) = out.as_chunks_mut::<PANEL_ROWS>();
    for ((sums, &factor), out) in sums.iter().zip(&factors[..T]).zip(&mut out[..T]) {
        let factor = _mm512_set1_ps(factor);
        for (sum, out) in sums.iter().zip(out.as_chunks_mut().0) {
            *out = lanes(_mm512_mul_ps(_mm512_cvtepi32_ps(*sum), factor));
        }
    }
}

/// Products of panels of float rows with all tokens.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn dense_panel<W: Copy + Default>(
    panel: &[W],
    x: &[f32],
    m: usize,
    out: &mut [f32],
    load_weights: impl Fn(&[W; LANES]) -> __m512 + Copy,
) {
    const ROWS: usize = 4;
    let columns = x.len() / m;
    let (whole, rest) = panel.split_at(panel.len() / (ROWS * columns) * (ROWS * columns));
    for tokens in blocks(m, 4) {
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

/// R rows with one to four tokens; `out` begins at the first row of the first token.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn dense_rows<const R: usize, W: Copy + Default>(
    rows: &[W],
    columns: usize,
    x: &[f32],
    out: &mut [f32],
    load_weights: impl Fn(&[W; LANES]) -> __m512 + Copy,
) {
    let rows = (rows, (R * columns).cast_signed());
    match x.len() / columns {
        1 => dense_block::<R, 1, W>(rows, columns, x, out, load_weights),
        2 => dense_block::<R, 2, W>(rows, columns, x, out, load_weights),
        3 => dense_block::<R, 3, W>(rows, columns, x, out, load_weights),
        _ => dense_block::<R, 4, W>(rows, columns, x, out, load_weights),
    }
}

/// R rows with T tokens. What is multiplied next stands `next` values behind each row.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn dense_block<const R: usize, const T: usize, W: Copy + Default>(
    (rows, next): (&[W], isize),
    columns: usize,
    x: &[f32],
    out: &mut [f32],
    load_weights: impl Fn(&[W; LANES]) -> __m512,
) {
    let rows: [(&[[W; LANES]], &[W]); R] = from_fn(|r| rows[r * columns..][..columns].as_chunks());
    let x: [(&[[f32; LANES]], &[f32]); T] = from_fn(|t| x[t * columns..][..columns].as_chunks());
    let mut sums = [[_mm512_setzero_ps(); T]; R];
    for chunk in 0..columns / LANES {
        let mut tokens = [_mm512_setzero_ps(); T];
        for (token, x) in tokens.iter_mut().zip(&x) {
            *token = load(&x.0[chunk]);
        }
        for r in 0..R {
            let weights = &rows[r].0[chunk];
            prefetch(weights.as_ptr().wrapping_offset(next));
            let weights = load_weights(weights);
            for t in 0..T {
                sums[r][t] = _mm512_fmadd_ps(weights, tokens[t], sums[r][t]);
            }
        }
    }
    if !columns.is_multiple_of(LANES) {
        for r in 0..R {
            let weights = load_weights(&padded(rows[r].1));
            for t in 0..T {
                sums[r][t] = _mm512_fmadd_ps(weights, load(&padded(x[t].1)), sums[r][t]);
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            out[t * PANEL_ROWS + r] = sum_lanes(sums[r][t]);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn dense_dots(weights: &DenseMatrix, rows: &[u32], x: &[f32], out: &mut [f32]) {
    match weights.values() {
        DenseValues::F16(all) => dots(all, rows, x, out, |halves| widen(halves)),
        DenseValues::F32(all) => dots(all, rows, x, out, |values| load(values)),
    }
}

/// One row after the other, the next one asked for meanwhile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn dots<W: Copy + Default>(
    all: &[W],
    rows: &[u32],
    x: &[f32],
    out: &mut [f32],
    load_weights: impl Fn(&[W; LANES]) -> __m512 + Copy,
) {
    let columns = x.len();
    for ((start, next), out) in starts_and_nexts(rows, columns).zip(out.chunks_exact_mut(1)) {
        let row = (&all[start..][..columns], next);
        dense_block::<1, 1, _>(row, columns, x, out, load_weights);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
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

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn quantize(x: &[f32], out: &mut QuantizedTokenMut<'_>) {
    (*out.scale, *out.sum) = elementwise::quantize(x, out.values);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    elementwise::rms_norm(x, weight, eps, out);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn rope(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    elementwise::rope(x, head_dim, cos, sin);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn relu2_gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
    elementwise::relu2_gate(gate, up, out);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn silu_gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
    elementwise::silu_gate(gate, up, out);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn scale_panel(
    acc: &[i32],
    scales: PanelScales<'_>,
    out: &mut [f32],
    largest: &mut [f32],
) {
    elementwise::scale_panel(acc, scales, out, largest);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn scan_logits(logits: &[f32], peaks: &mut [f32]) -> bool {
    softmax::scan_logits(logits, peaks)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn weigh_logits(
    logits: &[f32],
    scale: LogitScale,
    weights: &mut [f32],
    masses: &mut [f32],
    heaviest: &mut [f32],
) {
    softmax::weigh_logits(logits, scale, weights, masses, heaviest);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn sum_weights(logits: &[f32], scale: LogitScale, masses: &mut [f32]) {
    softmax::sum_weights(logits, scale, masses);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn weights_from(bar: f32, weights: &[f32], heaviest: &[f32]) -> (f64, usize) {
    softmax::weights_from(bar, weights, heaviest)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn drop_weights(bar: f32, weights: &mut [f32], heaviest: &[f32], masses: &mut [f32]) {
    softmax::drop_weights(bar, weights, heaviest, masses);
}

/// Reads all of `bytes`, in eight streams of registers that nothing waits for.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn probe_read(bytes: &[u8], ahead: bool) {
    let mut seen = [_mm512_setzero_si512(); 8];
    for lines in bytes.as_chunks::<64>().0.as_chunks::<8>().0 {
        for (seen, line) in seen.iter_mut().zip(lines) {
            if ahead {
                prefetch(line.as_ptr().wrapping_add(PREFETCH_BYTES));
            }
            *seen = _mm512_or_si512(*seen, load_bytes(line));
        }
    }
    black_box(seen);
}

/// Sixteen independent sums of register operands: 64 multiplications and as many additions each a round.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn probe_int8(rounds: u64) -> u64 {
    let (codes, q) = black_box((_mm512_set1_epi8(2), _mm512_set1_epi8(-3)));
    let mut sums = [_mm512_setzero_si512(); 16];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, codes, q);
        }
    }
    black_box(sums);
    rounds * 16 * 64 * 2
}

/// Prefetches the two blocks that stand [`PREFETCH_BYTES`] after `step`, be they of this panel or the next.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn prefetch_panel(step: &[Block; PANEL_BLOCKS]) {
    for block in step {
        prefetch(block.0.as_ptr().wrapping_add(PREFETCH_BYTES));
    }
}

/// As [`prefetch_panel`] for products that only wait for memory: the first block alone. Its neighbour comes along by the hardware's own
/// prefetching, and another request would be in the way of those that follow. With more work on a block, asking for both is faster.
#[target_feature(enable = "avx512f")]
#[inline]
fn prefetch_stream(step: &[Block; PANEL_BLOCKS]) {
    prefetch(step[0].0.as_ptr().wrapping_add(PREFETCH_BYTES));
}

/// Adds sixteen lanes up in the order of `elementwise::sum_lanes`: halves onto each other.
#[target_feature(enable = "avx512f")]
#[inline]
fn sum_lanes(lanes: __m512) -> f32 {
    let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(lanes)));
    sum_eight_lanes(_mm256_add_ps(_mm512_castps512_ps256(lanes), upper))
}

/// Loads a block.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn load_block(block: &Block) -> __m512i {
    // SAFETY: a `Block` is 64 readable bytes, aligned to 64 by its type.
    unsafe { _mm512_load_si512((&raw const block.0).cast()) }
}

/// Loads a cache line's worth of bytes.
#[target_feature(enable = "avx512f")]
#[inline]
fn load_bytes(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: `bytes` is 64 readable bytes, and `loadu` needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// Loads sixteen floats.
#[target_feature(enable = "avx512f")]
#[inline]
fn load(values: &[f32; LANES]) -> __m512 {
    // SAFETY: `values` is 64 readable bytes, and `loadu` needs no alignment.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

/// Loads sixteen half-precision floats as f32.
#[target_feature(enable = "avx512f")]
#[inline]
fn widen(halves: &[u16; LANES]) -> __m512 {
    // SAFETY: `halves` is 32 readable bytes, and `loadu` needs no alignment.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(halves.as_ptr().cast()) })
}

/// Sixteen floats in half precision, rounded to nearest even.
#[target_feature(enable = "avx512f")]
#[inline]
fn narrow(values: __m512) -> [u16; LANES] {
    let mut halves = [0; LANES];
    let rounded = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
    // SAFETY: `halves` is 32 writable bytes, and `storeu` needs no alignment.
    unsafe { _mm256_storeu_si256(halves.as_mut_ptr().cast(), rounded) }
    halves
}

/// The lanes of a register as an array.
#[target_feature(enable = "avx512f")]
#[inline]
fn lanes(register: __m512) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    // SAFETY: `lanes` is 64 writable bytes, and `storeu` needs no alignment.
    unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), register) }
    lanes
}

/// Stores sixteen sums at the start of `out`.
#[target_feature(enable = "avx512f")]
#[inline]
fn store_i32(sums: __m512i, out: &mut [i32]) {
    let out = &mut out[..BLOCK_ROWS];
    // SAFETY: `out` is sixteen writable `i32`, by the slice just taken, and `storeu` needs no alignment.
    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), sums) }
}
