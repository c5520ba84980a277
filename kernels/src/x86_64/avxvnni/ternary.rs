//! Products of two-bit weights for AVX-VNNI.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::activation::{ActivationSlices, ScaledActivations};
use crate::block::{BLOCK_ROWS, Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::groups::{GroupSize, RecordShape};
use crate::packing::{Packing, TWO_BIT_COLUMNS};
use crate::prefetch::PrefetchQueue;
use crate::ternary::TernaryMatrix;
use crate::x86_64::registers::avxvnni::{fused, lanes, load, load_bytes, to_floats, widen};
use crate::x86_64::{for_each_tile, four_activations, prefetch_step, rolled};

/// Tokens of a tile. The sums of 16 rows and these tokens, the weights that they are multiplied by,
/// an activation and a mask just fit into the sixteen registers.
const TILE_TOKENS: usize = 6;

/// The sums of 16 rows and T tokens, `[token][s][rows 0..8, 8..16]`. Of few tokens, several fields
/// of a byte are multiplied where they are, as 4^s · code, each into a sum of its own that is
/// shifted at the end. That saves shifts, and gives the dot-product instruction the eight sums that
/// its latency needs. The largest of these sums, 128 · 128 · columns / 4, fits an `i32` by the
/// limit on columns.
type Sums<const T: usize, const S: usize> = [[[__m256i; 2]; S]; T];

/// Evaluates `$call` with constants: `$T` tokens, of which there are `$count`, and `$S` fields that
/// have sums of their own.
macro_rules! by_tokens {
    ($count:expr, [$($n:literal)*], $T:ident, $S:ident => $call:block) => {
        by_count!($count, [$($n)*], $T => {
            const $S: usize = match $T {
                1 => 4,
                2 => 2,
                _ => 1,
            };
            $call
        })
    };
}

/// Multiplies up to six tokens at a time by the rows of some panels.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(crate) fn ternary_matmul(
    weights: &TernaryMatrix,
    panels: Range<usize>,
    x: ScaledActivations<'_>,
    out: &mut [f32],
    _: &mut PrefetchQueue<'_, '_>,
) {
    for_each_tile::<_, TILE_TOKENS>(panels, x.activations.tokens(), out, |panel, tokens, out| {
        let panel = weights.panel(panel).as_chunks().0;
        by_tokens!(tokens.len(), [1 2 3 4 5 6], T, S => {
            for half in 0..PANEL_BLOCKS {
                multiply_half::<T, S>(panel, half, x, tokens.start, out)
            }
        })
    });
}

/// Multiplies 16 rows of a panel by T tokens from `first` on.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
#[inline]
fn multiply_half<const T: usize, const S: usize>(
    panel: &[[Block; PANEL_BLOCKS]],
    half: usize,
    x: ScaledActivations<'_>,
    first: usize,
    out: &mut [f32],
) {
    let ScaledActivations {
        activations: x,
        factors,
    } = x;
    let mut rows: [&[[i8; TWO_BIT_COLUMNS]]; T] = [&[]; T];
    let mut sums: Sums<T, S> = [[[_mm256_setzero_si256(); 2]; S]; T];
    for t in 0..T {
        rows[t] = &x.padded_row(first + t).as_chunks().0[..panel.len()];
        sums[t] = minus_sum(x.sum(first + t));
    }
    if T <= 3 {
        for (b, step) in panel.iter().enumerate() {
            let mut of_step = [&[0; TWO_BIT_COLUMNS]; T];
            for t in 0..T {
                of_step[t] = &rows[t][b];
            }
            add_step::<T, S, false>(step, half, of_step, &mut sums);
        }
    } else {
        add_field::<T, S, 0, false>(panel, half, rows, &mut sums);
        add_field::<T, S, 1, false>(panel, half, rows, &mut sums);
        add_field::<T, S, 2, false>(panel, half, rows, &mut sums);
        add_field::<T, S, 3, false>(panel, half, rows, &mut sums);
    }
    let out = out.as_chunks_mut::<PANEL_ROWS>().0;
    for ((sums, &factor), out) in sums.into_iter().zip(&factors[first..]).zip(out) {
        let factor = _mm256_set1_ps(factor);
        let scaled = to_floats(sum_of_fields(sums)).map(|sums| _mm256_mul_ps(sums, factor));
        out.as_chunks_mut::<BLOCK_ROWS>().0[half] = lanes(scaled);
    }
}

/// Multiplies up to six tokens at a time by the rows of some panels with groups.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(crate) fn grouped_matmul(
    weights: &TernaryMatrix,
    panels: Range<usize>,
    x: ScaledActivations<'_>,
    out: &mut [f32],
    _: &mut PrefetchQueue<'_, '_>,
) {
    let steps = weights.group().map_or(0, GroupSize::columns) / TWO_BIT_COLUMNS;
    let (tokens, x) = (x.activations.tokens(), x.slices());
    for_each_tile::<_, TILE_TOKENS>(panels, tokens, out, |panel, tokens, out| {
        let panel = weights.panel(panel);
        by_tokens!(tokens.len(), [1 2 3 4 5 6], T, S => {
            by_count!(steps, [4 8 16], N => {
                for half in 0..PANEL_BLOCKS {
                    multiply_records::<T, S, N>(panel, half, x, tokens.start, out)
                }
            })
        })
    });
}

/// Multiplies 16 rows of a panel with groups of N steps by T tokens from `first` on.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
#[inline]
fn multiply_records<const T: usize, const S: usize, const N: usize>(
    panel: &[Block],
    half: usize,
    x: ActivationSlices<'_>,
    first: usize,
    out: &mut [f32],
) {
    let columns = N * TWO_BIT_COLUMNS;
    let shape = const { RecordShape::of_columns(Packing::TwoBit, N * TWO_BIT_COLUMNS) };
    let groups = panel.len() / shape.blocks();
    let mut tokens = [x.token(first, columns); T];
    let mut rows: [&[[[i8; TWO_BIT_COLUMNS]; N]]; T] = [&[]; T];
    for t in 0..T {
        let token = x.token(first + t, columns);
        tokens[t].sums = &token.sums[..groups];
        tokens[t].factors = &token.factors[..groups];
        rows[t] = &token.values.as_chunks().0.as_chunks().0[..groups];
    }
    let out = out.as_chunks_mut::<PANEL_ROWS>().0.first_chunk_mut::<T>();
    let out = out.expect("outputs of T tokens");
    for out in &mut *out {
        out.as_chunks_mut::<BLOCK_ROWS>().0[half] = [0.0; BLOCK_ROWS];
    }
    for group in 0..groups {
        let record = shape.split(&panel[group * shape.blocks()..][..shape.blocks()]);
        let mut of_group = [&[[0; TWO_BIT_COLUMNS]; N]; T];
        let mut sums: Sums<T, S> = [[[_mm256_setzero_si256(); 2]; S]; T];
        for t in 0..T {
            of_group[t] = &rows[t][group];
            sums[t] = minus_sum(tokens[t].sums[group]);
        }
        let steps: &[_; N] = record.steps.first_chunk().expect("steps of a group");
        if T <= 4 {
            // Step by step, the sums of four tokens fit too. Field by field, groups of 64 and 128
            // are slower.
            let count = if T == 1 { rolled(N) } else { N };
            for (b, step) in steps[..count].iter().enumerate() {
                let mut of_step = [&[0; TWO_BIT_COLUMNS]; T];
                for t in 0..T {
                    of_step[t] = &of_group[t][b];
                }
                add_step::<T, S, true>(step, half, of_step, &mut sums);
            }
        } else {
            // A loop over sixteen steps stays a loop.
            let count = if N < 16 { rolled(N) } else { N };
            let steps = &steps[..count];
            let mut rows: [&[[i8; TWO_BIT_COLUMNS]]; T] = [&[]; T];
            for t in 0..T {
                rows[t] = &of_group[t][..count];
            }
            add_field::<T, S, 0, true>(steps, half, rows, &mut sums);
            add_field::<T, S, 1, true>(steps, half, rows, &mut sums);
            add_field::<T, S, 2, true>(steps, half, rows, &mut sums);
            add_field::<T, S, 3, true>(steps, half, rows, &mut sums);
        }
        let scales = widen(&record.scales[half]);
        for (t, out) in out.iter_mut().enumerate() {
            let factor = _mm256_set1_ps(tokens[t].factors[group]);
            let factors = [
                _mm256_mul_ps(scales[0], factor),
                _mm256_mul_ps(scales[1], factor),
            ];
            let out = &mut out.as_chunks_mut::<BLOCK_ROWS>().0[half];
            *out = lanes(fused(to_floats(sum_of_fields(sums[t])), factors, load(out)));
        }
    }
}

/// Adds the products of 16 rows of a step and T tokens, whose activations are `rows`.
///
/// `GROUPED` only makes a copy of this function and of [`add_field`] for each of the callers: the
/// compiler inlines a function of one caller, whatever its size.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
#[inline]
fn add_step<const T: usize, const S: usize, const GROUPED: bool>(
    step: &[Block; PANEL_BLOCKS],
    half: usize,
    rows: [&[i8; TWO_BIT_COLUMNS]; T],
    sums: &mut Sums<T, S>,
) {
    prefetch_step(step);
    let mut packed = load_bytes(&step[half].0);
    for f in 0..4 {
        let mask = _mm256_set1_epi8((3_u8 << (2 * (f % S))).cast_signed());
        let codes = [
            _mm256_and_si256(packed[0], mask),
            _mm256_and_si256(packed[1], mask),
        ];
        if (f + 1) % S == 0 {
            packed = packed.map(|packed| match S {
                1 => _mm256_srli_epi32::<2>(packed),
                _ => _mm256_srli_epi32::<4>(packed),
            });
        }
        for t in 0..T {
            let q = _mm256_set1_epi32(four_activations(rows[t], f));
            for part in 0..2 {
                let sum = &mut sums[t][f % S][part];
                *sum = _mm256_dpbusd_avx_epi32(*sum, codes[part], q);
            }
        }
    }
}

/// Adds the products of field F of 16 rows of some steps and T tokens.
///
/// The steps are read once for each field. After the first pass, they are in the first-level cache.
/// A pass keeps fewer unpacked weights than [`add_step`] does, so the sums of more tokens fit into
/// the registers.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
#[inline]
fn add_field<const T: usize, const S: usize, const F: usize, const GROUPED: bool>(
    steps: &[[Block; PANEL_BLOCKS]],
    half: usize,
    rows: [&[[i8; TWO_BIT_COLUMNS]]; T],
    sums: &mut Sums<T, S>,
) {
    let mask = _mm256_set1_epi8(3);
    for (b, step) in steps.iter().enumerate() {
        if F == 0 {
            prefetch_step(step);
        }
        let codes = load_bytes(&step[half].0).map(|packed| {
            let packed = match F {
                0 => packed,
                1 => _mm256_srli_epi32::<2>(packed),
                2 => _mm256_srli_epi32::<4>(packed),
                _ => _mm256_srli_epi32::<6>(packed),
            };
            _mm256_and_si256(packed, mask)
        });
        for t in 0..T {
            let q = _mm256_set1_epi32(four_activations(&rows[t][b], F));
            for part in 0..2 {
                let sum = &mut sums[t][0][part];
                *sum = _mm256_dpbusd_avx_epi32(*sum, codes[part], q);
            }
        }
    }
}

/// Returns the start of the sums of a token whose activations have this sum. A code is the weight
/// plus one, so the sum of the activations is subtracted.
#[target_feature(enable = "avx2")]
#[inline]
fn minus_sum<const S: usize>(sum: i32) -> [[__m256i; 2]; S] {
    let mut sums = [[_mm256_setzero_si256(); 2]; S];
    sums[0] = [_mm256_sub_epi32(_mm256_setzero_si256(), _mm256_set1_epi32(sum)); 2];
    sums
}

/// Adds up the sums of a token, the fields of which were multiplied as 4^s · code.
#[target_feature(enable = "avx2")]
#[inline]
fn sum_of_fields<const S: usize>(sums: [[__m256i; 2]; S]) -> [__m256i; 2] {
    let mut total = sums[0];
    for (s, sums) in sums.iter().enumerate().skip(1) {
        for (total, &sum) in total.iter_mut().zip(sums) {
            let sum = match s {
                1 => _mm256_srai_epi32::<2>(sum),
                2 => _mm256_srai_epi32::<4>(sum),
                _ => _mm256_srai_epi32::<6>(sum),
            };
            *total = _mm256_add_epi32(*total, sum);
        }
    }
    total
}
