//! Kernels for AVX-512 with VNNI: sixteen floats, or the rows of a block, take one register.

use std::arch::x86_64::*;
use std::hint::black_box;

use super::PREFETCH_BYTES;
use super::attention::attention_kernels;
use super::dense::dense_kernels;
use super::int8_attention::int8_attention_kernels;
use super::registers::avx512::load_bytes;
use super::registers::prefetch;
use crate::activation::QuantizedActivations;
use crate::block::PANEL_BLOCKS;
use crate::row_kernels::row_kernels;

pub(crate) mod five_trit;
mod four_bit;
mod grouped;
mod int8;
mod ternary;
mod two_bit;

pub(crate) use attention::{attention_span, probe_f32, store_f16};
pub(crate) use dense::{dense_dots, dense_matmul, dense_row};
pub(crate) use four_bit::four_bit_matmul;
pub(crate) use int8::int8_matmul;
pub(crate) use int8_attention::int8_attention_span;
pub(crate) use two_bit::{grouped_matmul, ternary_matmul};

/// Tokens of a tile: the sums of a panel and these tokens fit into registers.
const TILE_TOKENS: usize = 8;

row_kernels! { #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")] }

dense_kernels! {
    features: "avx512f,avx512bw,avx512vl,avx512vnni",
    registers: avx512,
    floats: std::arch::x86_64::__m512,
    rows: 4,
    tokens: [1 2 3 4],
}

attention_kernels! {
    features: "avx512f,avx512bw,avx512vl,avx512vnni",
    registers: avx512,
    pages: [4 2 1],
    value_chunks: 4,
    tile_rows: [1 2 3 4 5 6 7 8 9 10 11 12],
    tile_chunks: 2,
    probe_sums: 16,
}

int8_attention_kernels! {
    features: "avx512f,avx512bw,avx512vl,avx512vnni",
    registers: avx512,
    pages: [4 2 1],
    value_chunks: 2,
    prefetched_lines: [2 36 2],
}

/// Returns the start of the sums of T tokens: a code is the weight plus `offset`, so the sum of
/// `offset` times the activations is subtracted.
#[target_feature(enable = "avx512f")]
#[inline]
fn minus_offsets<const T: usize>(
    x: &QuantizedActivations,
    first: usize,
    offset: i32,
) -> [[__m512i; PANEL_BLOCKS]; T] {
    let mut sums = [[_mm512_setzero_si512(); PANEL_BLOCKS]; T];
    for (t, sums) in sums.iter_mut().enumerate() {
        *sums = [_mm512_set1_epi32(-offset * x.sum(first + t)); PANEL_BLOCKS];
    }
    sums
}

/// Reads all bytes into eight registers that do not depend on each other.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn probe_read(bytes: &[u8], prefetches: bool) {
    let mut seen = [_mm512_setzero_si512(); 8];
    for lines in bytes.as_chunks::<64>().0.as_chunks::<8>().0 {
        for (seen, line) in seen.iter_mut().zip(lines) {
            if prefetches {
                prefetch(line.as_ptr().wrapping_add(PREFETCH_BYTES));
            }
            *seen = _mm512_or_si512(*seen, load_bytes(line));
        }
    }
    black_box(seen);
}

/// Computes sixteen independent sums of register operands, each of 64 multiplications and as many
/// additions a round.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(crate) fn probe_int8(rounds: u64) -> u64 {
    let (codes, q) = black_box((_mm512_set1_epi8(2), _mm512_set1_epi8(-3)));
    let mut sums = [_mm512_setzero_si512(); 16];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, codes, q);
        }
    }
    black_box(sums);
    rounds * 16 * 64 * 2
}
