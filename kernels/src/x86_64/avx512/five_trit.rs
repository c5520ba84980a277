//! Products of weights that are packed five to a byte, for AVX-512 with VBMI. At 1.6 bits a weight,
//! a step reads a fifth less memory than with two bits.
//!
//! A byte is v = 81 t4 + u with u = 27 t3 + 9 t2 + 3 t1 + t0. Two subtractions of 81, each kept
//! only if the result is not negative, turn v into u. Then v − u is 81 t4, and one look-up among
//! 128 bytes turns u into the two-bit fields t0..t3.

use std::arch::x86_64::*;
use std::array::from_fn;
use std::ops::Range;

use super::grouped::{GroupedTokens, add_rest, add_scaled, grouped_products};
use super::ternary::{
    Unpacked, divided_by_81, field_mask, store_scaled, sum_of_fields, ternary_products,
};
use super::{TILE_TOKENS, minus_offsets, two_bit};
use crate::activation::{ActivationSlices, ScaledActivations};
use crate::block::{Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::groups::{GroupSize, RecordShape};
use crate::packing::Packing;
use crate::prefetch::PrefetchQueue;
use crate::ternary::TernaryMatrix;
use crate::x86_64::registers::avx512::{load_block, widen};
use crate::x86_64::{for_each_tile, four_activations, prefetch_rest, prefetch_step, rolled};

/// The two-bit fields t0..t3 of each u below 81. The other entries are never used.
static FIELDS_OF_U: [u8; 128] = {
    let mut fields = [0; 128];
    let mut u = 0;
    while u < 81 {
        fields[u as usize] = u % 3 + 4 * (u / 3 % 3) + 16 * (u / 9 % 3) + 64 * (u / 27);
        u += 1;
    }
    fields
};

/// Multiplies all tokens by the rows of some panels, in either packing.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
pub(crate) fn ternary_matmul(
    weights: &TernaryMatrix,
    panels: Range<usize>,
    x: ScaledActivations<'_>,
    out: &mut [f32],
    prefetches: &mut PrefetchQueue<'_, '_>,
) {
    match weights.packing() {
        Packing::TwoBit => two_bit::ternary_matmul(weights, panels, x, out, prefetches),
        Packing::FiveTrit => five_trit_matmul(weights, panels, x, out, prefetches),
    }
}

/// Multiplies all tokens by the rows of some panels with groups, in either packing.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
pub(crate) fn grouped_matmul(
    weights: &TernaryMatrix,
    panels: Range<usize>,
    x: ScaledActivations<'_>,
    out: &mut [f32],
    prefetches: &mut PrefetchQueue<'_, '_>,
) {
    match weights.packing() {
        Packing::TwoBit => two_bit::grouped_matmul(weights, panels, x, out, prefetches),
        Packing::FiveTrit => five_trit_grouped_matmul(weights, panels, x, out, prefetches),
    }
}

ternary_products! {
    features: "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi",
    packing: Packing::FiveTrit,
    unpacker: FiveTritUnpacker,
    function: five_trit_matmul,
}

grouped_products! {
    features: "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi",
    packing: Packing::FiveTrit,
    unpacker: FiveTritUnpacker,
    function: five_trit_grouped_matmul,
}

/// The constants of unpacking, in registers.
#[derive(Clone, Copy)]
struct FiveTritUnpacker {
    fields_of_u: [__m512i; 2],
    eighty_one: __m512i,
}

impl FiveTritUnpacker {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
    #[inline]
    fn new() -> FiveTritUnpacker {
        let (low, high) = FIELDS_OF_U.split_at(64);
        let load = |half: &[u8]| {
            let mut block = Block([0; 64]);
            block.0.copy_from_slice(half);
            load_block(&block)
        };
        FiveTritUnpacker {
            fields_of_u: [load(low), load(high)],
            eighty_one: _mm512_set1_epi8(81),
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
    #[inline]
    fn unpack(self, block: &Block) -> Unpacked {
        let v = load_block(block);
        // A negative byte wraps to a large one, so the minimum keeps the byte as it was.
        let once = _mm512_min_epu8(v, _mm512_sub_epi8(v, self.eighty_one));
        let u = _mm512_min_epu8(once, _mm512_sub_epi8(once, self.eighty_one));
        Unpacked {
            fields: _mm512_permutex2var_epi8(self.fields_of_u[0], u, self.fields_of_u[1]),
            fifth: _mm512_sub_epi8(v, u),
        }
    }
}
