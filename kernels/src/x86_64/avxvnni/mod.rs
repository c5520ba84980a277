//! Kernels for AVX-VNNI: products of small integers in registers of 256 bits. The other kernels are
//! those of AVX2.
//!
//! The dot-product instruction multiplies four unsigned bytes of each lane by four signed bytes,
//! and adds the products to the lane, as in `avx512/`. But there are sixteen registers, half as
//! large. A tile of 16 rows and up to six tokens has twelve sums, more than the instruction's
//! latency needs.

use std::arch::x86_64::*;
use std::hint::black_box;

use super::int8_attention::int8_attention_kernels;

mod four_bit;
mod int8;
mod ternary;

pub(crate) use four_bit::four_bit_matmul;
pub(crate) use int8::int8_matmul;
pub(crate) use int8_attention::int8_attention_span;
pub(crate) use ternary::{grouped_matmul, ternary_matmul};

int8_attention_kernels! {
    features: "avx2,fma,f16c,avxvnni",
    registers: avxvnni,
    pages: [1],
    value_chunks: 1,
    prefetched_lines: [1 8 1],
}

/// Computes twelve independent sums of register operands, each of 32 multiplications and as many
/// additions a round.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(crate) fn probe_int8(rounds: u64) -> u64 {
    let (codes, q) = black_box((_mm256_set1_epi8(2), _mm256_set1_epi8(-3)));
    let mut sums = [_mm256_setzero_si256(); 12];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm256_dpbusd_avx_epi32(*sum, codes, q);
        }
    }
    black_box(sums);
    rounds * 12 * 32 * 2
}
