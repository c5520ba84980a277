//! Products of 4-bit weights for AVX-VNNI.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::activation::QuantizedActivations;
use crate::block::{Block, PANEL_BLOCKS};
use crate::four_bit::{FOUR_BIT_COLUMNS, FourBitMatrix};
use crate::x86_64::avx2::{split_codes, store_odd_sums};
use crate::x86_64::{for_each_tile, four_activations, prefetch_step};

/// Tokens of a tile: with the codes of a block, the sums of half a panel and these tokens fit into
/// registers.
const TILE_TOKENS: usize = 4;

/// Multiplies up to four tokens at a time by half of the rows of a panel.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
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
/// multiplied as they are.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
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
    let mut sums = [[_mm256_setzero_si256(); 2]; T];
    for (b, step) in panel.iter().enumerate() {
        if half == 0 {
            prefetch_step(step);
        }
        let fields = split_codes(&step[half]);
        for t in 0..T {
            for (field, codes) in fields.iter().enumerate() {
                let q = _mm256_set1_epi32(four_activations(&rows[t][b], field));
                for part in 0..2 {
                    sums[t][part] = _mm256_dpbusd_avx_epi32(sums[t][part], codes[part], q);
                }
            }
        }
    }
    store_odd_sums(&sums, half, x, first, out);
}
