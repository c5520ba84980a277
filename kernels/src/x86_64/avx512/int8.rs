//! Products of 8-bit weights for AVX-512.

use std::arch::x86_64::*;
use std::array::from_fn;
use std::ops::Range;

use super::{TILE_TOKENS, minus_offsets};
use crate::activation::QuantizedActivations;
use crate::block::{BLOCK_ROWS, Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::int8::{BYTE_ZERO, INT8_COLUMNS, Int8Matrix};
use crate::x86_64::registers::avx512::{load_block, store_i32};
use crate::x86_64::registers::prefetch;
use crate::x86_64::{PREFETCH_BYTES, for_each_tile, four_activations, prefetch_step};

/// Multiplies up to eight tokens at a time by the rows of some panels.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn int8_matmul(
    weights: &Int8Matrix,
    panels: Range<usize>,
    x: &QuantizedActivations,
    out: &mut [i32],
) {
    let last = weights.panels() - 1;
    for_each_tile::<_, TILE_TOKENS>(panels, x.tokens(), out, |panel, tokens, out| {
        // If a panel has several tiles, each prefetches its part of the next panel. If the first
        // tile prefetched all of it, that tile alone would wait for memory.
        let next = weights.panel(last.min(panel + 1));
        let part = |token| next.len() * token / x.tokens();
        let ahead = if tokens.len() < x.tokens() {
            &next[part(tokens.start)..part(tokens.end)]
        } else {
            &[]
        };
        let panel = weights.panel(panel).as_chunks().0;
        by_count!(tokens.len(), [1 2 3 4 5 6 7 8], T => {
            multiply_panel::<T>(panel, x, tokens.start, ahead, out)
        });
    });
}

/// Multiplies the 32 rows of a panel by T tokens from `first` on. The bytes are multiplied as they
/// are. The sums start at −128 · Σ q, because a byte is the weight plus 128.
///
/// Each step prefetches a block of `ahead`, or the blocks [`PREFETCH_BYTES`] further on if `ahead`
/// is empty.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn multiply_panel<const T: usize>(
    panel: &[[Block; PANEL_BLOCKS]],
    x: &QuantizedActivations,
    first: usize,
    ahead: &[Block],
    out: &mut [i32],
) {
    let rows: [&[[i8; INT8_COLUMNS]]; T] = from_fn(|t| x.padded_row(first + t).as_chunks().0);
    let mut sums = minus_offsets::<T>(x, first, i32::from(BYTE_ZERO));
    for (b, step) in panel.iter().enumerate() {
        match ahead.get(b) {
            Some(block) => prefetch(block.0.as_ptr()),
            None if !ahead.is_empty() => {}
            None if T <= 4 => prefetch_one(step),
            None => prefetch_step(step),
        }
        let bytes = [load_block(&step[0]), load_block(&step[1])];
        for t in 0..T {
            let q = _mm512_set1_epi32(four_activations(&rows[t][b], 0));
            for half in 0..PANEL_BLOCKS {
                sums[t][half] = _mm512_dpbusd_epi32(sums[t][half], bytes[half], q);
            }
        }
    }
    for (t, sums) in sums.iter().enumerate() {
        for (half, sum) in sums.iter().enumerate() {
            store_i32(*sum, &mut out[t * PANEL_ROWS + half * BLOCK_ROWS..]);
        }
    }
}

/// Prefetches the first of the two blocks that [`prefetch_step`] prefetches, for products that only
/// wait for memory. The hardware's own prefetching brings the second block, and a second request
/// would delay later requests. With more work for each block, two requests are faster.
#[inline(always)]
fn prefetch_one(step: &[Block; PANEL_BLOCKS]) {
    prefetch(step[0].0.as_ptr().wrapping_add(PREFETCH_BYTES));
}
