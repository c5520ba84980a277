//! Products of 8-bit weights for AVX-VNNI.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::activation::QuantizedActivations;
use crate::block::{BLOCK_ROWS, Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::int8::{BYTE_ZERO, INT8_COLUMNS, Int8Matrix};
use crate::x86_64::registers::avxvnni::{load_bytes, store_i32};
use crate::x86_64::{for_each_tile, four_activations, prefetch_step};

/// Tokens of a tile.
const TILE_TOKENS: usize = 6;

/// Multiplies up to six tokens at a time by the rows of some panels: one or two by a whole panel at
/// a time, more by half of one. So there are up to twelve sums.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(crate) fn int8_matmul(
    weights: &Int8Matrix,
    panels: Range<usize>,
    x: &QuantizedActivations,
    out: &mut [i32],
) {
    for_each_tile::<_, TILE_TOKENS>(panels, x.tokens(), out, |panel, tokens, out| {
        let panel = weights.panel(panel).as_chunks().0;
        let first = tokens.start;
        match tokens.len() {
            1 => multiply_blocks::<2, 1>(panel, 0, x, first, out),
            2 => multiply_blocks::<2, 2>(panel, 0, x, first, out),
            count => by_count!(count, [3 4 5 6], T => {
                for half in 0..PANEL_BLOCKS {
                    multiply_blocks::<1, T>(panel, half, x, first, out)
                }
            }),
        }
    });
}

/// Multiplies H · 16 rows, from block `half` of each step on, by T tokens from `first` on. The
/// bytes are multiplied as they are. The sums start at −128 · Σ q, because a byte is the weight
/// plus 128.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
#[inline]
fn multiply_blocks<const H: usize, const T: usize>(
    panel: &[[Block; PANEL_BLOCKS]],
    half: usize,
    x: &QuantizedActivations,
    first: usize,
    out: &mut [i32],
) {
    let mut rows: [&[[i8; INT8_COLUMNS]]; T] = [&[]; T];
    let mut sums = [[[_mm256_setzero_si256(); 2]; H]; T];
    for t in 0..T {
        rows[t] = &x.padded_row(first + t).as_chunks().0[..panel.len()];
        let start = _mm256_set1_epi32(-i32::from(BYTE_ZERO) * x.sum(first + t));
        sums[t] = [[start; 2]; H];
    }
    for (b, step) in panel.iter().enumerate() {
        if half == 0 {
            prefetch_step(step);
        }
        let mut q = [_mm256_setzero_si256(); T];
        for t in 0..T {
            q[t] = _mm256_set1_epi32(four_activations(&rows[t][b], 0));
        }
        for h in 0..H {
            let bytes = load_bytes(&step[half + h].0);
            for t in 0..T {
                for part in 0..2 {
                    sums[t][h][part] = _mm256_dpbusd_avx_epi32(sums[t][h][part], bytes[part], q[t]);
                }
            }
        }
    }
    for (t, blocks) in sums.iter().enumerate() {
        for (h, parts) in blocks.iter().enumerate() {
            let out = &mut out[t * PANEL_ROWS + (half + h) * BLOCK_ROWS..];
            store_i32(parts[0], out);
            store_i32(parts[1], &mut out[BLOCK_ROWS / 2..]);
        }
    }
}
