//! Products of two-bit weights with groups for AVX2.
//!
//! The products are formed as in `ternary.rs`. But the sums of each group become floats, which are
//! added up in the outputs in ascending order.

use std::arch::x86_64::*;
use std::ops::Range;

use super::ternary::{SPAN_FOURS, SpanCodes, add_pairs, narrow_sums, unpack};
use crate::activation::{ActivationSlices, ScaledActivations, TokenGroups};
use crate::block::{BLOCK_ROWS, Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::groups::RecordShape;
use crate::packing::{Packing, TWO_BIT_COLUMNS};
use crate::prefetch::PrefetchQueue;
use crate::ternary::TernaryMatrix;
use crate::x86_64::registers::avx2::{FloatPair, fused, lanes, load, to_floats, widen};
use crate::x86_64::registers::prefetch;
use crate::x86_64::{PREFETCH_BYTES, blocks, prefetch_rest, rolled};

/// Multiplies all tokens by the rows of some panels with groups.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn grouped_matmul(
    weights: &TernaryMatrix,
    panels: Range<usize>,
    x: ScaledActivations<'_>,
    out: &mut [f32],
    _: &mut PrefetchQueue<'_, '_>,
) {
    let (tokens, x) = (x.activations.tokens(), x.slices());
    let mut codes = [[[_mm256_setzero_si256(); 2]; SPAN_FOURS]; PANEL_BLOCKS];
    let fours = weights.record_shape().step_columns() / 4;
    for (panel, out) in panels.zip(out.chunks_exact_mut(tokens * PANEL_ROWS)) {
        out.fill(0.0);
        let (panel, out) = (weights.panel(panel), out.as_chunks_mut().0);
        by_count!(fours, [16 32 64], K => {
            match tokens {
                1 => from_blocks::<1, 2, K>(panel, x, out),
                2 => from_blocks::<2, 1, K>(panel, x, out),
                _ => by_spans::<K>(panel, x, &mut codes, out),
            }
        });
    }
}

/// Returns the shape of the records of groups of K times four columns.
const fn shape_of<const K: usize>() -> RecordShape {
    RecordShape::of_columns(Packing::TwoBit, 4 * K)
}

/// Returns what T tokens from `first` on multiply groups of K times four columns by.
#[inline(always)]
fn tokens_of<const T: usize, const K: usize>(
    x: ActivationSlices<'_>,
    first: usize,
) -> [TokenGroups<'_>; T] {
    let mut tokens = [x.token(first, 4 * K); T];
    for (t, token) in tokens.iter_mut().enumerate() {
        *token = x.token(first + t, 4 * K);
    }
    tokens
}

/// Multiplies the 32 rows of a panel by T tokens, straight from the blocks, H halves of the panel
/// at a time.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn from_blocks<const T: usize, const H: usize, const K: usize>(
    panel: &[Block],
    x: ActivationSlices<'_>,
    out: &mut [[f32; PANEL_ROWS]],
) {
    let shape = const { shape_of::<K>() };
    let tokens = tokens_of::<T, K>(x, 0);
    for (group, record) in shape.records(panel).enumerate() {
        prefetch_rest(&record);
        // Not `from_fn`: it is compiled without these features, so it inlines no closure that has
        // them.
        let mut rows: [&[[i8; TWO_BIT_COLUMNS]]; T] = [&[]; T];
        for (row, token) in rows.iter_mut().zip(&tokens) {
            let values = &token.values[group * 4 * K..][..4 * K];
            *row = &values.as_chunks().0[..record.steps.len()];
        }
        let steps = &record.steps[..rolled(K / 4)];
        for half in (0..PANEL_BLOCKS).step_by(H) {
            let narrow = narrow_sums::<T, H>(steps, half, rows);
            for h in 0..H {
                let scales = widen(&record.scales[half + h]);
                for ((token, narrow), out) in tokens.iter().zip(&narrow).zip(&mut *out) {
                    let own = (token.sums[group], token.factors[group]);
                    let out = &mut out.as_chunks_mut::<BLOCK_ROWS>().0[half + h];
                    add_scaled(narrow[h], scales, own, out);
                }
            }
        }
    }
}

/// Multiplies the 32 rows of a panel by three tokens or more, in spans of some groups.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn by_spans<const K: usize>(
    panel: &[Block],
    x: ActivationSlices<'_>,
    codes: &mut SpanCodes,
    out: &mut [[f32; PANEL_ROWS]],
) {
    let (shape, groups) = const { (shape_of::<K>(), SPAN_FOURS / K) };
    for (index, span) in panel.chunks(groups * shape.blocks()).enumerate() {
        for block in span {
            prefetch(block.0.as_ptr().wrapping_add(PREFETCH_BYTES));
        }
        for tokens in blocks(out.len(), 4) {
            let out = &mut out[tokens.clone()];
            let (first, group) = (tokens.start, index * groups);
            for (half, codes) in codes.iter_mut().enumerate() {
                let codes = codes.as_chunks_mut().0;
                match (first, out.len()) {
                    (0, 2) => add_tile::<2, K, true>(span, half, x, (first, group), codes, out),
                    (0, 3) => add_tile::<3, K, true>(span, half, x, (first, group), codes, out),
                    (0, _) => add_tile::<4, K, true>(span, half, x, (first, group), codes, out),
                    (_, 3) => add_tile::<3, K, false>(span, half, x, (first, group), codes, out),
                    (_, _) => add_tile::<4, K, false>(span, half, x, (first, group), codes, out),
                }
            }
        }
    }
}

/// Adds the products of 16 rows of a span and T tokens from `first` on. The span begins at `group`.
/// The first tile of a span also unpacks the codes for the others.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_tile<const T: usize, const K: usize, const UNPACKS: bool>(
    span: &[Block],
    half: usize,
    x: ActivationSlices<'_>,
    (first, group): (usize, usize),
    codes: &mut [[[__m256i; 2]; K]],
    out: &mut [[f32; PANEL_ROWS]],
) {
    let shape = const { shape_of::<K>() };
    let tokens = tokens_of::<T, K>(x, first);
    let out = out.first_chunk_mut::<T>().expect("outputs of T tokens");
    for (g, (record, codes)) in shape.records(span).zip(codes).enumerate() {
        let mut rows = [&[[0; 4]; K]; T];
        for (row, token) in rows.iter_mut().zip(&tokens) {
            *row = &token.values.as_chunks::<4>().0.as_chunks().0[group + g];
        }
        let mut sums = [[_mm256_setzero_si256(); 2]; T];
        let count = rolled(K);
        if UNPACKS {
            let steps = &record.steps[..K / 4];
            for f in 0..4 {
                for k in (f..count).step_by(4) {
                    codes[k] = unpack(&steps[k / 4][half], f);
                    add_pairs(&mut sums, codes[k], rows.map(|row| row[k]));
                }
            }
        } else {
            for k in 0..count {
                add_pairs(&mut sums, codes[k], rows.map(|row| row[k]));
            }
        }
        let scales = widen(&record.scales[half]);
        for ((token, sums), out) in tokens.iter().zip(sums).zip(&mut *out) {
            let own = (token.sums[group + g], token.factors[group + g]);
            let out = &mut out.as_chunks_mut::<BLOCK_ROWS>().0[half];
            add_scaled(sums, scales, own, out);
        }
    }
}

/// Widens the sums of 16 rows, one group and one token, and adds them to the outputs, each times
/// the scale of its row and the factor of the token. `sum` is the sum of the token's activations in
/// the group.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_scaled(
    sums: [__m256i; 2],
    scales: FloatPair,
    (sum, factor): (i32, f32),
    out: &mut [f32; BLOCK_ROWS],
) {
    let (ones, sum) = (_mm256_set1_epi16(1), _mm256_set1_epi32(sum));
    let factor = _mm256_set1_ps(factor);
    let dots = sums.map(|pairs| _mm256_sub_epi32(_mm256_madd_epi16(pairs, ones), sum));
    let factors = scales.map(|scales| _mm256_mul_ps(scales, factor));
    *out = lanes(fused(to_floats(dots), factors, load(out)));
}
