//! Ternary products for AVX-512 with VBMI: five weights a byte, 1.6 bits each, so that a step reads a fifth less memory.
//!
//! A byte is v = 81 t4 + u with u = 27 t3 + 9 t2 + 3 t1 + t0. Two subtractions that only count where they do not go below zero leave u;
//! v − u is 81 t4; and one look-up among 128 bytes turns u into the two-bit fields t0..t3, which then go the way of two-bit weights.

use std::arch::x86_64::*;
use std::array::from_fn;
use std::ops::Range;

use super::avx512::{
    self, field_mask, for_each_tile, load_block, minus_sums, prefetch_panel, store_scaled,
    sum_of_fields,
};
use super::four_activations;
use crate::activation::{QuantizedActivations, ScaledActivations};
use crate::prefetch::PrefetchQueue;
use crate::ternary::{Block, FIVE_TRIT_COLUMNS, PANEL_BLOCKS, Packing, TernaryMatrix};

/// What the fifth field counts in its byte.
const FIFTH: u8 = 81;

/// FIFTH times this is 1, modulo 2³²: multiplying by it divides a multiple of FIFTH, also one that has overflowed.
const PER_FIFTH: u32 = 0x7819_48b1;
const _: () = assert!(PER_FIFTH.wrapping_mul(FIFTH as u32) == 1);

/// The two-bit fields t0..t3 of each u below 81; of the rest nothing is asked.
static FIELDS: [u8; 128] = {
    let mut fields = [0; 128];
    let mut u = 0;
    while u < FIFTH {
        fields[u as usize] = u % 3 + 4 * (u / 3 % 3) + 16 * (u / 9 % 3) + 64 * (u / 27);
        u += 1;
    }
    fields
};

/// Products of panels of weights in either packing with up to eight tokens at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
pub(crate) fn ternary_matmul(
    weights: &TernaryMatrix,
    panels: Range<usize>,
    x: ScaledActivations<'_>,
    out: &mut [f32],
    prefetches: &mut PrefetchQueue<'_, '_>,
) {
    if weights.packing() == Packing::TwoBit {
        return avx512::ternary_matmul(weights, panels, x, out, prefetches);
    }
    let ScaledActivations {
        activations: x,
        factors,
    } = x;
    for_each_tile(panels, x.tokens(), out, |panel, tokens, out| {
        let panel = weights.panel(panel).as_chunks().0;
        let at = (tokens.start, &factors[tokens.clone()]);
        match tokens.len() {
            1 => in_place::<1>(panel, x, at, out),
            2 => in_place::<2>(panel, x, at, out),
            3 => shifted::<3>(panel, x, at, prefetches, out),
            4 => shifted::<4>(panel, x, at, prefetches, out),
            5 => shifted::<5>(panel, x, at, prefetches, out),
            6 => shifted::<6>(panel, x, at, prefetches, out),
            7 => shifted::<7>(panel, x, at, prefetches, out),
            _ => shifted::<8>(panel, x, at, prefetches, out),
        }
    });
}

/// 32 rows × T tokens, for few tokens: fields are multiplied where they stand, as 4^f · code and 81 · code, each into a sum of its own
/// that is divided at the end. The fifth sum may overflow; its division undoes that.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
#[inline]
fn in_place<const T: usize>(
    panel: &[[Block; PANEL_BLOCKS]],
    x: &QuantizedActivations,
    (first, factors): (usize, &[f32]),
    out: &mut [f32],
) {
    let rows: [&[[i8; FIVE_TRIT_COLUMNS]]; T] = from_fn(|t| x.padded_row(first + t).as_chunks().0);
    let table = Table::new();
    let mut sums = [[[_mm512_setzero_si512(); PANEL_BLOCKS]; T]; 4];
    let mut fifth_sums = [[_mm512_setzero_si512(); PANEL_BLOCKS]; T];
    for (b, step) in panel.iter().enumerate() {
        prefetch_panel(step);
        let unpacked = [table.unpack(&step[0]), table.unpack(&step[1])];
        for (f, sums) in sums.iter_mut().enumerate() {
            let mask = field_mask(f);
            let codes = [
                _mm512_and_si512(unpacked[0].fields, mask),
                _mm512_and_si512(unpacked[1].fields, mask),
            ];
            for t in 0..T {
                let q = _mm512_set1_epi32(four_activations(&rows[t][b], f));
                for half in 0..PANEL_BLOCKS {
                    sums[t][half] = _mm512_dpbusd_epi32(sums[t][half], codes[half], q);
                }
            }
        }
        for (t, sums) in fifth_sums.iter_mut().enumerate() {
            let q = _mm512_set1_epi32(four_activations(&rows[t][b], 4));
            for half in 0..PANEL_BLOCKS {
                sums[half] = _mm512_dpbusd_epi32(sums[half], unpacked[half].fifth, q);
            }
        }
    }
    let per_fifth = _mm512_set1_epi32(PER_FIFTH.cast_signed());
    let mut totals = minus_sums::<T>(x, first, 1);
    for (t, totals) in totals.iter_mut().enumerate() {
        for (half, total) in totals.iter_mut().enumerate() {
            let fifth = _mm512_mullo_epi32(fifth_sums[t][half], per_fifth);
            let sum = _mm512_add_epi32(sum_of_fields(sums.map(|sums| sums[t][half])), fifth);
            *total = _mm512_add_epi32(sum, *total);
        }
    }
    store_scaled(&totals, factors, out);
}

/// 32 rows × T tokens: each field is shifted down once and multiplied with every token. Unpacking hides behind the multiplications.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
#[inline]
fn shifted<const T: usize>(
    panel: &[[Block; PANEL_BLOCKS]],
    x: &QuantizedActivations,
    (first, factors): (usize, &[f32]),
    prefetches: &mut PrefetchQueue<'_, '_>,
    out: &mut [f32],
) {
    let rows: [&[[i8; FIVE_TRIT_COLUMNS]]; T] = from_fn(|t| x.padded_row(first + t).as_chunks().0);
    let table = Table::new();
    let mask = _mm512_set1_epi8(3);
    let mut sums = minus_sums::<T>(x, first, 1);
    for (b, step) in panel.iter().enumerate() {
        prefetch_panel(step);
        prefetches.step();
        let unpacked = [table.unpack(&step[0]), table.unpack(&step[1])];
        // 81 t4 has t4 in its two highest bits.
        let fifth = [
            _mm512_srli_epi32::<6>(unpacked[0].fifth),
            _mm512_srli_epi32::<6>(unpacked[1].fifth),
        ];
        let mut packed = [unpacked[0].fields, unpacked[1].fields];
        for f in 0..5 {
            let codes = [
                _mm512_and_si512(packed[0], mask),
                _mm512_and_si512(packed[1], mask),
            ];
            packed = match f {
                3 => fifth,
                _ => [
                    _mm512_srli_epi32::<2>(packed[0]),
                    _mm512_srli_epi32::<2>(packed[1]),
                ],
            };
            for t in 0..T {
                let q = _mm512_set1_epi32(four_activations(&rows[t][b], f));
                for half in 0..PANEL_BLOCKS {
                    sums[t][half] = _mm512_dpbusd_epi32(sums[t][half], codes[half], q);
                }
            }
        }
    }
    store_scaled(&sums, factors, out);
}

/// The constants of unpacking, in registers.
#[derive(Clone, Copy)]
struct Table {
    fields: [__m512i; 2],
    fifth: __m512i,
}

/// A block, taken apart.
#[derive(Clone, Copy)]
struct Unpacked {
    /// t0..t3 of each byte, two bits each.
    fields: __m512i,
    /// 81 t4 of each byte.
    fifth: __m512i,
}

impl Table {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
    #[inline]
    fn new() -> Table {
        let (low, high) = FIELDS.split_at(64);
        let load = |half: &[u8]| {
            let mut block = Block([0; 64]);
            block.0.copy_from_slice(half);
            load_block(&block)
        };
        Table {
            fields: [load(low), load(high)],
            fifth: _mm512_set1_epi8(FIFTH.cast_signed()),
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
    #[inline]
    fn unpack(self, block: &Block) -> Unpacked {
        let v = load_block(block);
        // Below zero a byte wraps to a large one, and the minimum leaves it as it was.
        let once = _mm512_min_epu8(v, _mm512_sub_epi8(v, self.fifth));
        let u = _mm512_min_epu8(once, _mm512_sub_epi8(once, self.fifth));
        Unpacked {
            fields: _mm512_permutex2var_epi8(self.fields[0], u, self.fields[1]),
            fifth: _mm512_sub_epi8(v, u),
        }
    }
}
