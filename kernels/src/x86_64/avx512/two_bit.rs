//! Products of two-bit weights.

use std::arch::x86_64::*;
use std::array::from_fn;
use std::ops::Range;

use super::grouped::{GroupedTokens, add_rest, add_scaled, grouped_products};
use super::ternary::{
    Unpacked, divided_by_81, field_mask, store_scaled, sum_of_fields, ternary_products,
};
use super::{TILE_TOKENS, minus_offsets};
use crate::activation::{ActivationSlices, ScaledActivations};
use crate::block::{Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::groups::{GroupSize, RecordShape};
use crate::packing::Packing;
use crate::prefetch::PrefetchQueue;
use crate::ternary::TernaryMatrix;
use crate::x86_64::registers::avx512::{load_block, widen};
use crate::x86_64::{for_each_tile, four_activations, prefetch_rest, prefetch_step, rolled};

ternary_products! {
    features: "avx512f,avx512bw,avx512vl,avx512vnni",
    packing: Packing::TwoBit,
    unpacker: TwoBitUnpacker,
    function: ternary_matmul,
}

grouped_products! {
    features: "avx512f,avx512bw,avx512vl,avx512vnni",
    packing: Packing::TwoBit,
    unpacker: TwoBitUnpacker,
    function: grouped_matmul,
}

/// Loads blocks: their fields are already where the products need them.
#[derive(Clone, Copy)]
struct TwoBitUnpacker;

impl TwoBitUnpacker {
    fn new() -> TwoBitUnpacker {
        TwoBitUnpacker
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    #[inline]
    fn unpack(self, block: &Block) -> Unpacked {
        Unpacked {
            fields: load_block(block),
            fifth: _mm512_setzero_si512(),
        }
    }
}
