//! Products of 4-bit weights for AVX2.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::activation::QuantizedActivations;
use crate::block::{BLOCK_ROWS, Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::four_bit::{FOUR_BIT_COLUMNS, FourBitMatrix, ODD_ZERO};
use crate::x86_64::registers::avx2::{load_bytes, store_i32};
use crate::x86_64::{for_each_tile, four_activations, prefetch_step};

/// Tokens of a tile: with the codes of a block, the sums of half a panel and these tokens fit into
/// registers.
const TILE_TOKENS: usize = 4;

/// Multiplies up to four tokens at a time by half of the rows of a panel.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn four_bit_matmul(
    weights: &FourBitMatrix,
    panels: Range<usize>,
    x: &QuantizedActivations,
    out: &mut [i32],
) {
    for_each_tile::<_, TILE_TOKENS>(panels, x.tokens(), out, |panel, tokens, out| {
        let panel = weights.panel(panel).as_chunks().0;
        by_count!(tokens.len(), [1 2 3 4], T => {
            for half in 0..PANEL_BLOCKS {
                multiply_blocks::<T>(panel, half, x, tokens.start, out)
            }
        });
    });
}

/// Multiplies 16 rows, block `half` of each step, by T tokens from `first` on. The codes are
/// multiplied as they are: the products of two pairs, of at most 15 · 128 each, fit into 16 bits.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn multiply_blocks<const T: usize>(
    panel: &[[Block; PANEL_BLOCKS]],
    half: usize,
    x: &QuantizedActivations,
    first: usize,
    out: &mut [i32],
) {
    let mut rows: [&[[i8; FOUR_BIT_COLUMNS]]; T] = [&[]; T];
    for (t, row) in rows.iter_mut().enumerate() {
        *row = &x.padded_row(first + t).as_chunks().0[..panel.len()];
    }
    let ones = _mm256_set1_epi16(1);
    let mut sums = [[_mm256_setzero_si256(); 2]; T];
    for (b, step) in panel.iter().enumerate() {
        if half == 0 {
            prefetch_step(step);
        }
        let [low, high] = split_codes(&step[half]);
        for t in 0..T {
            let q = [0, 1].map(|field| _mm256_set1_epi32(four_activations(&rows[t][b], field)));
            for part in 0..2 {
                let pairs = _mm256_add_epi16(
                    _mm256_maddubs_epi16(low[part], q[0]),
                    _mm256_maddubs_epi16(high[part], q[1]),
                );
                let fours = _mm256_madd_epi16(pairs, ones);
                sums[t][part] = _mm256_add_epi32(sums[t][part], fours);
            }
        }
    }
    store_odd_sums(&sums, half, x, first, out);
}

/// Returns the codes of a block's lower bits, then those of its upper bits. Each are 16 rows, in
/// two registers.
#[target_feature(enable = "avx2")]
#[inline]
pub(in crate::x86_64) fn split_codes(block: &Block) -> [[__m256i; 2]; 2] {
    let (bytes, low_bits) = (load_bytes(&block.0), _mm256_set1_epi8(15));
    [
        bytes.map(|bytes| _mm256_and_si256(bytes, low_bits)),
        bytes.map(|bytes| _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low_bits)),
    ]
}

/// Stores the products of T tokens and the 16 rows of block `half`. A weight is 2 · code − 15, so a
/// product is 2 · Σ code · q − 15 · Σ q.
#[target_feature(enable = "avx2")]
#[inline]
pub(in crate::x86_64) fn store_odd_sums<const T: usize>(
    sums: &[[__m256i; 2]; T],
    half: usize,
    x: &QuantizedActivations,
    first: usize,
    out: &mut [i32],
) {
    for (t, parts) in sums.iter().enumerate() {
        let offset = _mm256_set1_epi32(ODD_ZERO * x.sum(first + t));
        for (part, sum) in parts.iter().enumerate() {
            let sum = _mm256_sub_epi32(_mm256_slli_epi32::<1>(*sum), offset);
            let row = half * BLOCK_ROWS + part * BLOCK_ROWS / 2;
            store_i32(sum, &mut out[t * PANEL_ROWS + row..]);
        }
    }
}
