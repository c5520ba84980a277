//! Kernels for AVX2 with FMA and F16C: sixteen floats, or the rows of a block, take two registers.

use std::arch::x86_64::*;
use std::hint::black_box;

use super::PREFETCH_BYTES;
use super::attention::attention_kernels;
use super::dense::dense_kernels;
use super::int8_attention::int8_attention_kernels;
use super::registers::avx2::{FloatPair, load_bytes};
use super::registers::prefetch;
use crate::row_kernels::row_kernels;

mod four_bit;
mod grouped;
mod int8;
mod ternary;

pub(crate) use attention::{attention_span, probe_f32, store_f16};
pub(crate) use dense::{dense_dots, dense_matmul, dense_row};
pub(crate) use four_bit::four_bit_matmul;
pub(super) use four_bit::{split_codes, store_odd_sums};
pub(crate) use grouped::grouped_matmul;
pub(crate) use int8::int8_matmul;
pub(crate) use int8_attention::int8_attention_span;
pub(crate) use ternary::ternary_matmul;

row_kernels! { #[target_feature(enable = "avx2,fma,f16c")] }

dense_kernels! {
    features: "avx2,fma,f16c",
    registers: avx2,
    floats: super::FloatPair,
    rows: 2,
    tokens: [1 2],
}

attention_kernels! {
    features: "avx2,fma,f16c",
    registers: avx2,
    pages: [1],
    value_chunks: 1,
    tile_rows: [1 2 3 4 5 6],
    tile_chunks: 1,
    probe_sums: 6,
}

int8_attention_kernels! {
    features: "avx2,fma,f16c",
    registers: avx2,
    pages: [1],
    value_chunks: 1,
    prefetched_lines: [1 8 1],
}

/// Reads all bytes into eight registers that do not depend on each other.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn probe_read(bytes: &[u8], prefetches: bool) {
    let mut seen = [[_mm256_setzero_si256(); 2]; 4];
    for lines in bytes.as_chunks::<64>().0.as_chunks::<4>().0 {
        for (seen, line) in seen.iter_mut().zip(lines) {
            if prefetches {
                prefetch(line.as_ptr().wrapping_add(PREFETCH_BYTES));
            }
            let [low, high] = load_bytes(line);
            *seen = [
                _mm256_or_si256(seen[0], low),
                _mm256_or_si256(seen[1], high),
            ];
        }
    }
    black_box(seen);
}

/// Computes twelve independent chains, each of 32 multiplications and 16 additions a round. A real
/// sum needs a further addition, which partly takes the place of a multiplication, so no product
/// quite reaches this.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn probe_int8(rounds: u64) -> u64 {
    let codes = black_box(_mm256_set1_epi8(2));
    let mut pairs = black_box([_mm256_set1_epi8(-3); 12]);
    for _ in 0..rounds {
        for pair in &mut pairs {
            *pair = _mm256_maddubs_epi16(codes, *pair);
        }
    }
    black_box(pairs);
    rounds * 12 * 32 * 2
}
