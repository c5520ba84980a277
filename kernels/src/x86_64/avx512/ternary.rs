//! Products of ternary weights without groups, and the sums of steps, written once for both
//! packings.
//!
//! The dot-product instruction of VNNI multiplies four unsigned bytes of each lane (four columns of
//! a row) by four signed activations, and adds the products to the lane.

use std::arch::x86_64::*;

use crate::block::{PANEL_BLOCKS, PANEL_ROWS};
use crate::x86_64::registers::avx512::lanes;

/// An unpacked block.
#[derive(Clone, Copy)]
pub(super) struct Unpacked {
    /// The first four fields of each byte, two bits each.
    pub(super) fields: __m512i,
    /// 81 times the fifth field of each byte, if the packing has one.
    pub(super) fifth: __m512i,
}

/// Returns the bits of field `f` of each byte.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn field_mask(f: usize) -> __m512i {
    _mm512_set1_epi8((3_u8 << (2 * f)).cast_signed())
}

/// Adds up the sums of fields 0..4, which were multiplied as 4^f · code.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn sum_of_fields([s0, s1, s2, s3]: [__m512i; 4]) -> __m512i {
    let low = _mm512_add_epi32(s0, _mm512_srai_epi32::<2>(s1));
    let high = _mm512_add_epi32(_mm512_srai_epi32::<4>(s2), _mm512_srai_epi32::<6>(s3));
    _mm512_add_epi32(low, high)
}

/// Stores the sums of T tokens, `[T][32]`, each times the factor of its token.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn store_scaled<const T: usize>(
    sums: &[[__m512i; PANEL_BLOCKS]; T],
    factors: &[f32],
    out: &mut [f32],
) {
    let (out, _) = out.as_chunks_mut::<PANEL_ROWS>();
    for ((sums, &factor), out) in sums.iter().zip(&factors[..T]).zip(&mut out[..T]) {
        let factor = _mm512_set1_ps(factor);
        for (sum, out) in sums.iter().zip(out.as_chunks_mut().0) {
            *out = lanes(_mm512_mul_ps(_mm512_cvtepi32_ps(*sum), factor));
        }
    }
}

/// Defines the products of one packing. `unpacker` is a type with the methods `new` and `unpack`.
macro_rules! ternary_products {
    (
        features: $features:literal,
        packing: $packing:expr,
        unpacker: $unpacker:ident,
        function: $function:ident,
    ) => {
        const FIELDS: usize = $packing.fields();
        const COLUMNS: usize = $packing.block_columns();

        /// Multiplies up to eight tokens at a time by the rows of some panels.
        #[target_feature(enable = $features)]
        pub(crate) fn $function(
            weights: &TernaryMatrix,
            panels: Range<usize>,
            x: ScaledActivations<'_>,
            out: &mut [f32],
            prefetches: &mut PrefetchQueue<'_, '_>,
        ) {
            let tokens = x.activations.tokens();
            for_each_tile::<_, TILE_TOKENS>(panels, tokens, out, |panel, tokens, out| {
                let panel = weights.panel(panel).as_chunks().0;
                by_count!(tokens.len(), [1 2 3 4 5 6 7 8], T => {
                    multiply_panel::<T>(panel, x, tokens.start, prefetches, out)
                })
            });
        }

        /// Multiplies the 32 rows of a panel by T tokens from `first` on.
        #[target_feature(enable = $features)]
        #[inline]
        fn multiply_panel<const T: usize>(
            panel: &[[Block; PANEL_BLOCKS]],
            x: ScaledActivations<'_>,
            first: usize,
            prefetches: &mut PrefetchQueue<'_, '_>,
            out: &mut [f32],
        ) {
            let ScaledActivations {
                activations: x,
                factors,
            } = x;
            let rows = from_fn(|t| x.padded_row(first + t).as_chunks().0);
            let mut sums = minus_offsets::<T>(x, first, 1);
            add_steps::<T, 0>($unpacker::new(), panel, rows, prefetches, &mut sums);
            store_scaled(&sums, &factors[first..], out);
        }

        /// Adds the products of some steps and T tokens, whose activations are `rows`.
        ///
        /// This and what it calls is compiled for each group size G (0 if there are no groups). So
        /// each of the functions has one caller, and the compiler inlines it, whatever its size.
        #[target_feature(enable = $features)]
        #[inline]
        fn add_steps<const T: usize, const G: usize>(
            unpacker: $unpacker,
            steps: &[[Block; PANEL_BLOCKS]],
            rows: [&[[i8; COLUMNS]]; T],
            prefetches: &mut PrefetchQueue<'_, '_>,
            sums: &mut [[__m512i; PANEL_BLOCKS]; T],
        ) {
            if T <= 2 {
                add_in_place::<T, G>(unpacker, steps, rows, sums);
            } else {
                add_shifted::<T, G>(unpacker, steps, rows, prefetches, sums);
            }
        }

        /// Adds products for few tokens. Fields are multiplied where they are in their bytes, as
        /// 4^f · code, each into a sum of its own that is shifted at the end. The largest of these
        /// sums, 128 · 128 · columns / 4, fits an `i32` by the limit on columns.
        ///
        /// A fifth field is multiplied as 81 · code. Its sum may overflow, which the division at
        /// the end undoes.
        #[target_feature(enable = $features)]
        #[inline]
        fn add_in_place<const T: usize, const G: usize>(
            unpacker: $unpacker,
            steps: &[[Block; PANEL_BLOCKS]],
            rows: [&[[i8; COLUMNS]]; T],
            totals: &mut [[__m512i; PANEL_BLOCKS]; T],
        ) {
            let (mut steps, mut rows) = (steps, rows);
            if T == 1 && G > 0 {
                steps = &steps[..rolled(steps.len())];
                rows[0] = &rows[0][..steps.len()];
            }
            let mut sums = [[[_mm512_setzero_si512(); PANEL_BLOCKS]; T]; 4];
            let mut fifth_sums = [[_mm512_setzero_si512(); PANEL_BLOCKS]; T];
            for (b, step) in steps.iter().enumerate() {
                prefetch_step(step);
                let unpacked = [unpacker.unpack(&step[0]), unpacker.unpack(&step[1])];
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
                if FIELDS > 4 {
                    for (t, sums) in fifth_sums.iter_mut().enumerate() {
                        let q = _mm512_set1_epi32(four_activations(&rows[t][b], 4));
                        for half in 0..PANEL_BLOCKS {
                            sums[half] = _mm512_dpbusd_epi32(sums[half], unpacked[half].fifth, q);
                        }
                    }
                }
            }
            for (t, totals) in totals.iter_mut().enumerate() {
                for (half, total) in totals.iter_mut().enumerate() {
                    let mut sum = sum_of_fields(sums.map(|sums| sums[t][half]));
                    if FIELDS > 4 {
                        sum = _mm512_add_epi32(sum, divided_by_81(fifth_sums[t][half]));
                    }
                    *total = _mm512_add_epi32(sum, *total);
                }
            }
        }

        /// Adds products for several tokens. Each field is shifted down once and multiplied by
        /// every token, so that unpacking takes no extra time beside the multiplications.
        #[target_feature(enable = $features)]
        #[inline]
        fn add_shifted<const T: usize, const G: usize>(
            unpacker: $unpacker,
            steps: &[[Block; PANEL_BLOCKS]],
            rows: [&[[i8; COLUMNS]]; T],
            prefetches: &mut PrefetchQueue<'_, '_>,
            sums: &mut [[__m512i; PANEL_BLOCKS]; T],
        ) {
            let mask = _mm512_set1_epi8(3);
            for (b, step) in steps.iter().enumerate() {
                prefetch_step(step);
                prefetches.step();
                let unpacked = [unpacker.unpack(&step[0]), unpacker.unpack(&step[1])];
                // The two highest bits of 81 · code are the code.
                let fifth = [
                    _mm512_srli_epi32::<6>(unpacked[0].fifth),
                    _mm512_srli_epi32::<6>(unpacked[1].fifth),
                ];
                let mut packed = [unpacked[0].fields, unpacked[1].fields];
                for f in 0..FIELDS {
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
        }
    };
}

/// 81 times this is 1, modulo 2³². So the product with it divides a multiple of 81, even one that
/// has overflowed.
const INVERSE_OF_81: u32 = 0x7819_48b1;
const _: () = assert!(INVERSE_OF_81.wrapping_mul(81) == 1);

/// Divides multiples of 81 by 81.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn divided_by_81(sums: __m512i) -> __m512i {
    _mm512_mullo_epi32(sums, _mm512_set1_epi32(INVERSE_OF_81.cast_signed()))
}

pub(super) use ternary_products;
