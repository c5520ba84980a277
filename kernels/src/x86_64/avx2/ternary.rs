//! Products of two-bit weights without groups for AVX2. `grouped.rs` has the products with groups.
//!
//! Pairs of products are summed in 16 bits and widened before they can overflow. One or two tokens
//! are multiplied straight from the blocks. For more tokens, a span of a panel is unpacked once and
//! multiplied by all of them while it is in the first-level cache.

use std::arch::x86_64::*;
use std::array::from_fn;
use std::ops::Range;

use zerocopy::{FromBytes, IntoBytes};

use super::int8::store_sums;
use crate::activation::ScaledActivations;
use crate::block::{BLOCK_ROWS, Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::packing::TWO_BIT_COLUMNS;
use crate::prefetch::PrefetchQueue;
use crate::ternary::TernaryMatrix;
use crate::x86_64::registers::avx2::{load_bytes, load_i32, store_i32};
use crate::x86_64::{blocks, four_activations, prefetch_step};

/// Blocks that are summed in 16 bits before they are widened. A block adds four products to each
/// sum, each pair between −2 · 256 and 2 · 254. So the sums of 16 blocks are between −32,768 and
/// 32,512 and just fit.
const NARROW_BLOCKS: usize = 16;

/// Groups of four columns in a span of a panel: as many as are summed in 16 bits.
pub(super) const SPAN_FOURS: usize = NARROW_BLOCKS * TWO_BIT_COLUMNS / 4;

/// The codes of a span, one a byte: `[half of the panel][four columns][rows 0..8, 8..16]`.
pub(super) type SpanCodes = [[[__m256i; 2]; SPAN_FOURS]; PANEL_BLOCKS];

/// What a tile of a span is multiplied by, and where its rows are in the panel.
#[derive(Clone, Copy)]
struct SpanTile<'a> {
    x: ScaledActivations<'a>,
    /// The first of the tile's tokens.
    token: usize,
    /// The first of the span's groups of four columns.
    four: usize,
    /// The half of the panel that has the tile's rows.
    half: usize,
}

/// Multiplies all tokens by the rows of some panels.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn ternary_matmul(
    weights: &TernaryMatrix,
    panels: Range<usize>,
    x: ScaledActivations<'_>,
    out: &mut [f32],
    _: &mut PrefetchQueue<'_, '_>,
) {
    let tokens = x.activations.tokens();
    let panels = panels.map(|panel| weights.panel(panel).as_chunks().0);
    let products = panels.zip(out.chunks_exact_mut(tokens * PANEL_ROWS));
    match tokens {
        1 => products.for_each(|(panel, out)| from_blocks::<1, 2>(panel, x, out)),
        2 => products.for_each(|(panel, out)| from_blocks::<2, 1>(panel, x, out)),
        _ => {
            let mut codes = [[[_mm256_setzero_si256(); 2]; SPAN_FOURS]; PANEL_BLOCKS];
            products.for_each(|(panel, out)| by_spans(panel, x, &mut codes, out));
        }
    }
}

/// Multiplies the 32 rows of a panel by T tokens, straight from the blocks, H halves of the panel
/// at a time.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn from_blocks<const T: usize, const H: usize>(
    panel: &[[Block; PANEL_BLOCKS]],
    x: ScaledActivations<'_>,
    out: &mut [f32],
) {
    let ScaledActivations {
        activations: x,
        factors,
    } = x;
    let rows: [&[[i8; TWO_BIT_COLUMNS]]; T] = from_fn(|t| x.padded_row(t).as_chunks().0);
    let ones = _mm256_set1_epi16(1);
    let mut sums = [[[_mm256_setzero_si256(); 2]; PANEL_BLOCKS]; T];
    for (t, sums) in sums.iter_mut().enumerate() {
        *sums = [[_mm256_set1_epi32(-x.sum(t)); 2]; PANEL_BLOCKS];
    }
    for (index, steps) in panel.chunks(NARROW_BLOCKS).enumerate() {
        let rows = rows.map(|row| &row[index * NARROW_BLOCKS..][..steps.len()]);
        for half in (0..PANEL_BLOCKS).step_by(H) {
            let narrow = narrow_sums::<T, H>(steps, half, rows);
            for (sums, narrow) in sums.iter_mut().zip(narrow) {
                let sums = sums[half..][..H].as_flattened_mut();
                for (sum, narrow) in sums.iter_mut().zip(narrow.as_flattened()) {
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(*narrow, ones));
                }
            }
        }
    }
    let out = as_sums(out);
    store_sums(&sums, 0, out);
    scale_sums(factors, out);
}

/// Returns the sums over at most [`NARROW_BLOCKS`] steps of H halves of a panel from `half` on, in
/// 16 bits, two for each row: `[token][half][rows 0..8, 8..16]`. The registers have room for the
/// sums of one token and two halves, or of two tokens and one half.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn narrow_sums<const T: usize, const H: usize>(
    steps: &[[Block; PANEL_BLOCKS]],
    half: usize,
    rows: [&[[i8; TWO_BIT_COLUMNS]]; T],
) -> [[[__m256i; 2]; H]; T] {
    let mask = _mm256_set1_epi8(3);
    let mut sums = [[[_mm256_setzero_si256(); 2]; H]; T];
    for (b, step) in steps.iter().enumerate() {
        let mut packed = [[_mm256_setzero_si256(); 2]; H];
        for h in 0..H {
            packed[h] = load_bytes(&step[half + h].0);
        }
        if half == 0 {
            prefetch_step(step);
        }
        for f in 0..4 {
            let mut codes = packed;
            for h in 0..H {
                codes[h] = packed[h].map(|packed| _mm256_and_si256(packed, mask));
                packed[h] = packed[h].map(|packed| _mm256_srli_epi32::<2>(packed));
            }
            for t in 0..T {
                let q = _mm256_set1_epi32(four_activations(&rows[t][b], f));
                for h in 0..H {
                    for part in 0..2 {
                        let pairs = _mm256_maddubs_epi16(codes[h][part], q);
                        sums[t][h][part] = _mm256_add_epi16(sums[t][h][part], pairs);
                    }
                }
            }
        }
    }
    sums
}

/// Multiplies the 32 rows of a panel by three tokens or more, span by span.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn by_spans(
    panel: &[[Block; PANEL_BLOCKS]],
    x: ScaledActivations<'_>,
    codes: &mut SpanCodes,
    out: &mut [f32],
) {
    let out = as_sums(out);
    for (token, out) in out.chunks_exact_mut(PANEL_ROWS).enumerate() {
        out.fill(-x.activations.sum(token));
    }
    let (spans, rest) = panel.as_chunks::<NARROW_BLOCKS>();
    for (i, span) in spans.iter().enumerate() {
        add_span::<SPAN_FOURS>(span, i * SPAN_FOURS, x, codes, out);
    }
    for (i, step) in rest.as_chunks::<1>().0.iter().enumerate() {
        let four = spans.len() * SPAN_FOURS + 4 * i;
        add_span::<4>(step, four, x, codes, out);
    }
    scale_sums(x.factors, out);
}

/// Returns the memory of the outputs as integers: the sums are formed there, then scaled in place.
fn as_sums(out: &mut [f32]) -> &mut [i32] {
    FromBytes::mut_from_bytes(out.as_mut_bytes()).expect("as large and aligned as floats")
}

/// Turns the sums of a panel, `[token][32]`, into outputs in the same memory: each times the factor
/// of its token.
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

/// Adds the products of K times four columns and all tokens. `four` times four columns are before
/// the span.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_span<const K: usize>(
    span: &[[Block; PANEL_BLOCKS]],
    four: usize,
    x: ScaledActivations<'_>,
    codes: &mut SpanCodes,
    out: &mut [i32],
) {
    span.iter().for_each(prefetch_step);
    for tokens in blocks(x.activations.tokens(), 4) {
        let out = &mut out[tokens.start * PANEL_ROWS..tokens.end * PANEL_ROWS];
        for (half, codes) in codes.iter_mut().enumerate() {
            let codes = codes.first_chunk_mut::<K>().expect("room for a span");
            let tile = SpanTile {
                x,
                token: tokens.start,
                four,
                half,
            };
            match (tokens.start, tokens.len()) {
                (0, 2) => add_first_tile::<2, K>(span, codes, tile, out),
                (0, 3) => add_first_tile::<3, K>(span, codes, tile, out),
                (0, _) => add_first_tile::<4, K>(span, codes, tile, out),
                (_, 3) => add_tile::<3, K>(codes, tile, out),
                (_, _) => add_tile::<4, K>(codes, tile, out),
            }
        }
    }
}

/// Does the work of [`add_tile`], and unpacks the codes for the tiles after it. The stores of the
/// codes take longer than the multiplications, so they run beside them.
///
/// The loop goes field by field: for four fields at once, the compiler reorders the additions until
/// they need more registers than there are.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_first_tile<const T: usize, const K: usize>(
    span: &[[Block; PANEL_BLOCKS]],
    codes: &mut [[__m256i; 2]; K],
    tile: SpanTile<'_>,
    out: &mut [i32],
) {
    let span = &span[..K / 4];
    let rows = fours_of::<T, K>(tile);
    let mut sums = [[_mm256_setzero_si256(); 2]; T];
    for f in 0..4 {
        for k in (f..K).step_by(4) {
            codes[k] = unpack(&span[k / 4][tile.half], f);
            add_pairs(&mut sums, codes[k], rows.map(|row| row[k]));
        }
    }
    add_wide(&sums, tile.half, out);
}

/// Adds the products of 16 rows of a span and T tokens.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_tile<const T: usize, const K: usize>(
    codes: &[[__m256i; 2]; K],
    tile: SpanTile<'_>,
    out: &mut [i32],
) {
    let rows = fours_of::<T, K>(tile);
    let mut sums = [[_mm256_setzero_si256(); 2]; T];
    for k in 0..K {
        add_pairs(&mut sums, codes[k], rows.map(|row| row[k]));
    }
    add_wide(&sums, tile.half, out);
}

/// Loads K groups of four activations for each of T tokens.
#[inline(always)]
fn fours_of<const T: usize, const K: usize>(tile: SpanTile<'_>) -> [&[[i8; 4]; K]; T] {
    from_fn(|t| {
        let fours = tile.x.activations.padded_row(tile.token + t).as_chunks().0;
        fours[tile.four..]
            .first_chunk()
            .expect("a row has whole blocks")
    })
}

/// Returns the codes of a field of a block.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn unpack(block: &Block, field: usize) -> [__m256i; 2] {
    let mask = _mm256_set1_epi8(3);
    load_bytes(&block.0).map(|packed| {
        let field = match field {
            0 => packed,
            1 => _mm256_srli_epi32::<2>(packed),
            2 => _mm256_srli_epi32::<4>(packed),
            _ => _mm256_srli_epi32::<6>(packed),
        };
        _mm256_and_si256(field, mask)
    })
}

/// Adds pairs of products of 16 rows and T tokens.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn add_pairs<const T: usize>(
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

/// Widens the sums of 16 rows and T tokens, and adds them to the sums in `out`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_wide<const T: usize>(sums: &[[__m256i; 2]; T], half: usize, out: &mut [i32]) {
    let ones = _mm256_set1_epi16(1);
    let (out, _) = out.as_chunks_mut::<PANEL_ROWS>();
    // The constant length lets the compiler unroll the loops, so that no sum leaves its register.
    let out = out.first_chunk_mut::<T>().expect("sums of T tokens");
    for (sums, out) in sums.iter().zip(out) {
        let out = &mut out.as_chunks_mut::<BLOCK_ROWS>().0[half];
        for (sum, out) in sums.iter().zip(out.as_chunks_mut().0) {
            let wide = _mm256_madd_epi16(*sum, ones);
            store_i32(_mm256_add_epi32(load_i32(out), wide), out);
        }
    }
}
