//! Products of 4-bit weights for AVX-512.

use std::arch::x86_64::*;
use std::array::from_fn;
use std::ops::Range;

use super::TILE_TOKENS;
use crate::activation::QuantizedActivations;
use crate::block::{BLOCK_ROWS, Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::four_bit::{FOUR_BIT_COLUMNS, FourBitMatrix, ODD_ZERO};
use crate::x86_64::registers::avx512::{load_block, store_i32};
use crate::x86_64::{for_each_tile, four_activations, prefetch_step};

/// Multiplies up to eight tokens at a time by the rows of some panels.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn four_bit_matmul(
    weights: &FourBitMatrix,
    panels: Range<usize>,
    x: &QuantizedActivations,
    out: &mut [i32],
) {
    for_each_tile::<_, TILE_TOKENS>(panels, x.tokens(), out, |panel, tokens, out| {
        let panel = weights.panel(panel).as_chunks().0;
        by_count!(tokens.len(), [1 2 3 4 5 6 7 8], T => {
            multiply_panel::<T>(panel, x, tokens.start, out)
        });
    });
}

/// Multiplies the 32 rows of a panel by T tokens from `first` on. The codes are multiplied as they
/// are. A weight is 2 · code − 15, so a sum is 2 · Σ code · q − 15 · Σ q.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn multiply_panel<const T: usize>(
    panel: &[[Block; PANEL_BLOCKS]],
    x: &QuantizedActivations,
    first: usize,
    out: &mut [i32],
) {
    let rows: [&[[i8; FOUR_BIT_COLUMNS]]; T] = from_fn(|t| x.padded_row(first + t).as_chunks().0);
    let low_bits = _mm512_set1_epi8(15);
    let mut sums = [[_mm512_setzero_si512(); PANEL_BLOCKS]; T];
    for (b, step) in panel.iter().enumerate() {
        prefetch_step(step);
        for half in 0..PANEL_BLOCKS {
            let bytes = load_block(&step[half]);
            let low = _mm512_and_si512(bytes, low_bits);
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low_bits);
            for t in 0..T {
                for (field, codes) in [low, high].into_iter().enumerate() {
                    let q = _mm512_set1_epi32(four_activations(&rows[t][b], field));
                    sums[t][half] = _mm512_dpbusd_epi32(sums[t][half], codes, q);
                }
            }
        }
    }
    for (t, sums) in sums.iter().enumerate() {
        let offset = _mm512_set1_epi32(ODD_ZERO * x.sum(first + t));
        for (half, sum) in sums.iter().enumerate() {
            let sum = _mm512_sub_epi32(_mm512_slli_epi32::<1>(*sum), offset);
            store_i32(sum, &mut out[t * PANEL_ROWS + half * BLOCK_ROWS..]);
        }
    }
}
