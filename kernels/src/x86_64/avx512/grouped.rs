//! Products of ternary weights with groups, written once for both packings.

use std::arch::x86_64::*;

use crate::activation::ActivationSlices;
use crate::block::{Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::packing::Packing;
use crate::x86_64::four_activations;
use crate::x86_64::registers::avx512::{fused, lanes, load, load_block};

/// What T tokens multiply a matrix with groups of G columns by, `[token][group]`. All slices have
/// the same length, so that the compiler checks an index once.
pub(super) struct GroupedTokens<'a, const T: usize, const G: usize> {
    pub(super) rows: [&'a [[i8; G]]; T],
    sums: [&'a [i32]; T],
    pub(super) factors: [&'a [f32]; T],
}

impl<'a, const T: usize, const G: usize> GroupedTokens<'a, T, G> {
    /// Takes T tokens from `first` on, each with this many groups.
    #[inline(always)]
    pub(super) fn new(
        x: ActivationSlices<'a>,
        first: usize,
        groups: usize,
    ) -> GroupedTokens<'a, T, G> {
        let mut tokens = GroupedTokens {
            rows: [&[]; T],
            sums: [&[]; T],
            factors: [&[]; T],
        };
        for t in 0..T {
            let token = x.token(first + t, G);
            tokens.rows[t] = &token.values.as_chunks().0[..groups];
            tokens.sums[t] = &token.sums[..groups];
            tokens.factors[t] = &token.factors[..groups];
        }
        tokens
    }

    /// Returns the start of the sums of a group: minus the activations' sums, because a code is the
    /// weight plus one.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(super) fn minus_sums(&self, group: usize) -> [[__m512i; PANEL_BLOCKS]; T] {
        let mut sums = [[_mm512_setzero_si512(); PANEL_BLOCKS]; T];
        for (sums, all) in sums.iter_mut().zip(&self.sums) {
            let sum = _mm512_set1_epi32(all[group]);
            *sums = [_mm512_sub_epi32(_mm512_setzero_si512(), sum); PANEL_BLOCKS];
        }
        sums
    }
}

/// Adds the sums of a token and a group to its outputs, each times the scale of its row and the
/// factor of the token.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn add_scaled(
    sums: [__m512i; PANEL_BLOCKS],
    scales: [__m512; PANEL_BLOCKS],
    factor: f32,
    out: &mut [f32; PANEL_ROWS],
) {
    let factor = _mm512_set1_ps(factor);
    let (out, _) = out.as_chunks_mut();
    for half in 0..PANEL_BLOCKS {
        let dot = _mm512_cvtepi32_ps(sums[half]);
        let factor = _mm512_mul_ps(scales[half], factor);
        out[half] = lanes(fused(dot, factor, load(&out[half])));
    }
}

/// Adds the products of T tokens and R groups of four columns that do not fill a step.
#[expect(
    clippy::needless_range_loop,
    reason = "the number selects the field too, in both halves"
)]
#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
pub(super) fn add_rest<const T: usize, const R: usize>(
    rest: &[Block],
    fours: [&[[i8; 4]]; T],
    sums: &mut [[__m512i; PANEL_BLOCKS]; T],
) {
    let mask = _mm512_set1_epi8(3);
    // If both halves of the panel share a block, the second half has its later fields.
    let shares = R * PANEL_BLOCKS <= Packing::TwoBit.fields();
    let blocks = if shares {
        [load_block(&rest[0]); PANEL_BLOCKS]
    } else {
        [load_block(&rest[0]), load_block(&rest[1])]
    };
    for four in 0..R {
        let mut codes = blocks;
        for half in 0..PANEL_BLOCKS {
            let field = if shares { half * R + four } else { four };
            let shifted = match field {
                0 => blocks[half],
                1 => _mm512_srli_epi32::<2>(blocks[half]),
                2 => _mm512_srli_epi32::<4>(blocks[half]),
                _ => _mm512_srli_epi32::<6>(blocks[half]),
            };
            codes[half] = _mm512_and_si512(shifted, mask);
        }
        for t in 0..T {
            let q = _mm512_set1_epi32(four_activations(&fours[t][four], 0));
            for half in 0..PANEL_BLOCKS {
                sums[t][half] = _mm512_dpbusd_epi32(sums[t][half], codes[half], q);
            }
        }
    }
}

/// Defines the products of one packing with groups, beside the products without groups.
macro_rules! grouped_products {
    (
        features: $features:literal,
        packing: $packing:expr,
        unpacker: $unpacker:ident,
        function: $grouped_function:ident,
    ) => {
        /// Multiplies up to eight tokens at a time by the rows of some panels with groups.
        #[target_feature(enable = $features)]
        pub(crate) fn $grouped_function(
            weights: &TernaryMatrix,
            panels: Range<usize>,
            x: ScaledActivations<'_>,
            out: &mut [f32],
            prefetches: &mut PrefetchQueue<'_, '_>,
        ) {
            let group = weights.group().map_or(0, GroupSize::columns);
            let (tokens, x) = (x.activations.tokens(), x.slices());
            for_each_tile::<_, TILE_TOKENS>(panels, tokens, out, |panel, tokens, out| {
                let panel = weights.panel(panel);
                by_count!(tokens.len(), [1 2 3 4 5 6 7 8], T => {
                    by_count!(group, [64 128 256], G => {
                        multiply_records::<T, G>(panel, x, tokens.start, prefetches, out)
                    })
                })
            });
        }

        /// Multiplies the 32 rows of a panel with groups of G columns by T tokens from `first` on.
        #[target_feature(enable = $features)]
        #[inline]
        fn multiply_records<const T: usize, const G: usize>(
            panel: &[Block],
            x: ActivationSlices<'_>,
            first: usize,
            prefetches: &mut PrefetchQueue<'_, '_>,
            out: &mut [f32],
        ) {
            let shape = const { RecordShape::of_columns($packing, G) };
            let out = out.as_chunks_mut().0.first_chunk_mut::<T>();
            let out = out.expect("outputs of T tokens");
            *out = [[0.0; PANEL_ROWS]; T];
            let unpacker = $unpacker::new();
            let groups = panel.len() / shape.blocks();
            let tokens = GroupedTokens::<T, G>::new(x, first, groups);
            for group in 0..groups {
                let record = shape.split(&panel[group * shape.blocks()..][..shape.blocks()]);
                let (mut rows, mut fours): ([&[_]; T], [&[_]; T]) = ([&[]; T], [&[]; T]);
                for t in 0..T {
                    let (steps, rest) = tokens.rows[t][group].as_chunks();
                    (rows[t], fours[t]) = (steps, rest.as_chunks().0);
                }
                let mut sums = tokens.minus_sums(group);
                // The rest comes first: after the steps, the sums of eight tokens did not stay in
                // registers.
                prefetch_rest(&record);
                match shape.rest_fours() {
                    0 => {}
                    1 => add_rest::<T, 1>(record.rest, fours, &mut sums),
                    2 => add_rest::<T, 2>(record.rest, fours, &mut sums),
                    _ => add_rest::<T, 4>(record.rest, fours, &mut sums),
                }
                add_steps::<T, G>(unpacker, record.steps, rows, prefetches, &mut sums);
                let scales = [widen(&record.scales[0]), widen(&record.scales[1])];
                // Not a function of all tokens: it would be too large to be inlined.
                for t in 0..T {
                    add_scaled(sums[t], scales, tokens.factors[t][group], &mut out[t]);
                }
            }
        }
    };
}

pub(super) use grouped_products;
