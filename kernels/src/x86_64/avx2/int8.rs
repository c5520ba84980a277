//! Products of 8-bit weights for AVX2.

use std::arch::x86_64::*;
use std::array::from_fn;
use std::ops::Range;

use crate::activation::QuantizedActivations;
use crate::block::{BLOCK_ROWS, Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::int8::{BYTE_ZERO, INT8_COLUMNS, Int8Matrix};
use crate::x86_64::registers::avx2::{load_bytes, store_i32};
use crate::x86_64::{blocks, four_activations, prefetch_step};

/// Multiplies up to four tokens at a time by the rows of some panels.
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
            let first = tokens.start;
            // The sums of a whole panel and more than two tokens do not fit into registers.
            match tokens.len() {
                1 => multiply_blocks::<2, 1>(panel, 0, x, first, out),
                2 => multiply_blocks::<2, 2>(panel, 0, x, first, out),
                3 => (0..PANEL_BLOCKS)
                    .for_each(|half| multiply_blocks::<1, 3>(panel, half, x, first, out)),
                _ => (0..PANEL_BLOCKS)
                    .for_each(|half| multiply_blocks::<1, 4>(panel, half, x, first, out)),
            }
        }
    }
}

/// Multiplies H · 16 rows, from block `half` of each step on, by T tokens from `first` on.
///
/// The instruction multiplies an unsigned byte by a signed one, so the sign of the activation moves
/// to the weight. Two products of at most 128 · 127 each then fit into 16 bits.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn multiply_blocks<const H: usize, const T: usize>(
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
        prefetch_step(step);
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

/// Stores the sums of T tokens and H · 16 rows from block `half` on.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn store_sums<const H: usize, const T: usize>(
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
