//! Vector registers: loads, stores, prefetches, and the operations on sixteen floats.
//!
//! The modules for AVX2 and AVX-512 name their functions alike, so that `dense.rs` and
//! `attention.rs` are written once for both.
//!
//! Invariant: this file has all `unsafe` code of the x86-64 kernels.
#![expect(unsafe_code, reason = "vector loads and stores, prefetches")]

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

/// Prefetches the cache line at `address`, which need not be valid, into the second-level cache.
/// The processor can have more requests outstanding there than in the first level.
#[inline(always)]
pub(crate) fn prefetch<T>(address: *const T) {
    // SAFETY: every x86-64 CPU has SSE, and a prefetch reads nothing.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
}

/// Sixteen floats in two registers of AVX2.
pub(super) mod avx2 {
    use std::arch::x86_64::*;

    use crate::block::BLOCK_ROWS;
    use crate::elementwise::LANES;
    use crate::int8_rows::LOW_BITS;
    use crate::kv_page::StoredFloats;

    /// Sixteen floats: lanes 0..8 and 8..16.
    pub(crate) type FloatPair = [__m256; 2];

    /// 64 bytes or sixteen integers: lanes 0..8 and 8..16.
    pub(crate) type IntegerPair = [__m256i; 2];

    /// Returns zero in every lane.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn zero() -> FloatPair {
        [_mm256_setzero_ps(); 2]
    }

    /// Returns `value` in every lane.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn broadcast(value: f32) -> FloatPair {
        [_mm256_set1_ps(value); 2]
    }

    /// Returns `a · b + c`, rounded once.
    #[target_feature(enable = "avx2,fma")]
    #[inline]
    pub(crate) fn fused(a: FloatPair, b: FloatPair, c: FloatPair) -> FloatPair {
        [
            _mm256_fmadd_ps(a[0], b[0], c[0]),
            _mm256_fmadd_ps(a[1], b[1], c[1]),
        ]
    }

    /// Adds up sixteen lanes in the order of `elementwise::sum_lanes`: the upper half onto the
    /// lower, until one lane remains.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn sum_lanes(lanes: FloatPair) -> f32 {
        sum_eight_lanes(_mm256_add_ps(lanes[0], lanes[1]))
    }

    /// Adds up eight lanes in the same order.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn sum_eight_lanes(eight: __m256) -> f32 {
        let four = _mm_add_ps(
            _mm256_castps256_ps128(eight),
            _mm256_extractf128_ps::<1>(eight),
        );
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }

    /// Loads sixteen floats.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn load(values: &[f32; LANES]) -> FloatPair {
        let values = values.as_ptr();
        // SAFETY: `values` is sixteen readable floats, two registers' worth, and `loadu` needs no
        // alignment.
        unsafe { [_mm256_loadu_ps(values), _mm256_loadu_ps(values.add(8))] }
    }

    /// Loads sixteen half-precision floats as f32.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    pub(crate) fn widen(halves: &[u16; LANES]) -> FloatPair {
        let register = halves.as_ptr().cast::<__m128i>();
        // SAFETY: `halves` is 32 readable bytes, two registers' worth, and `loadu` needs no
        // alignment.
        let [low, high] = unsafe { [_mm_loadu_si128(register), _mm_loadu_si128(register.add(1))] };
        [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
    }

    /// Loads sixteen stored floats as f32.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    pub(crate) fn widen_stored(stored: StoredFloats<'_>) -> FloatPair {
        match stored {
            StoredFloats::F16(bytes) => load_halves(bytes).map(|half| _mm256_cvtph_ps(half)),
            StoredFloats::Bf16(bytes) => load_halves(bytes).map(|half| {
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
            }),
            StoredFloats::E4m3(bytes) => {
                // The sign moves to bit 15, the rest to bits 13..7. Bit 14 has the sign too.
                let signed = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(load_sixteen(bytes)));
                widen_both(_mm256_and_si256(signed, _mm256_set1_epi16(!0x4000)))
            }
            StoredFloats::E5m2(bytes) => {
                let wide = _mm256_cvtepu8_epi16(load_sixteen(bytes));
                widen_both(_mm256_slli_epi16::<8>(wide))
            }
        }
    }

    /// Converts sixteen half-precision floats to f32.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    fn widen_both(halves: __m256i) -> FloatPair {
        [
            _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
            _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)),
        ]
    }

    /// Loads 32 bytes as two halves.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn load_halves(bytes: &[u8; 2 * LANES]) -> [__m128i; 2] {
        let register = bytes.as_ptr().cast::<__m128i>();
        // SAFETY: `bytes` is 32 readable bytes, two registers' worth, and `loadu` needs no
        // alignment.
        unsafe { [_mm_loadu_si128(register), _mm_loadu_si128(register.add(1))] }
    }

    /// Loads sixteen bytes.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn load_sixteen(bytes: &[u8; LANES]) -> __m128i {
        // SAFETY: `bytes` is 16 readable bytes, and `loadu` needs no alignment.
        unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
    }

    /// Rounds sixteen floats to half precision, to nearest even.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    pub(crate) fn narrow(values: FloatPair) -> [u16; LANES] {
        let mut halves = [0; LANES];
        for (part, values) in halves.as_chunks_mut::<8>().0.iter_mut().zip(values) {
            let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
            // SAFETY: `part` is 16 writable bytes, and `storeu` needs no alignment.
            unsafe { _mm_storeu_si128(part.as_mut_ptr().cast(), rounded) }
        }
        halves
    }

    /// Returns the lanes as an array.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn lanes(registers: FloatPair) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        for (part, register) in lanes.as_chunks_mut::<8>().0.iter_mut().zip(registers) {
            // SAFETY: `part` is 32 writable bytes, and `storeu` needs no alignment.
            unsafe { _mm256_storeu_ps(part.as_mut_ptr(), register) }
        }
        lanes
    }

    /// Loads 64 bytes. In a block these are rows 0..8 and 8..16.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn load_bytes(bytes: &[u8; 64]) -> [__m256i; 2] {
        let register = bytes.as_ptr().cast::<__m256i>();
        // SAFETY: `bytes` is 64 readable bytes, two registers' worth, and `loadu` needs no
        // alignment.
        unsafe {
            [
                _mm256_loadu_si256(register),
                _mm256_loadu_si256(register.add(1)),
            ]
        }
    }

    /// Loads eight sums.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn load_i32(sums: &[i32; 8]) -> __m256i {
        // SAFETY: `sums` is 32 readable bytes, and `loadu` needs no alignment.
        unsafe { _mm256_loadu_si256(sums.as_ptr().cast()) }
    }

    /// Stores eight sums at the start of `out`.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn store_i32(sums: __m256i, out: &mut [i32]) {
        let out = &mut out[..BLOCK_ROWS / 2];
        // SAFETY: `out` is eight writable `i32`, by the slice just taken, and `storeu` needs no
        // alignment.
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), sums) }
    }

    /// Returns what the products of keys and a query start with.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn first_sums(_query_sum: i32) -> IntegerPair {
        [_mm256_setzero_si256(); 2]
    }

    /// Adds to each lane the product of four keys and the four numbers of `query`, none of which is
    /// −128.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn dot_keys(sums: IntegerPair, keys: IntegerPair, query: [i8; 4]) -> IntegerPair {
        let query = _mm256_set1_epi32(i32::from_le_bytes(query.map(i8::cast_unsigned)));
        let magnitudes = _mm256_abs_epi8(query);
        let mut out = sums;
        for (out, keys) in out.iter_mut().zip(keys) {
            let keys = _mm256_xor_si256(keys, _mm256_set1_epi8(i8::MIN));
            // Two products of at most 127² in 16 bits.
            let pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(keys, query));
            let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            *out = _mm256_add_epi32(*out, fours);
        }
        out
    }

    /// Converts sixteen integers to floats.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn to_floats(integers: IntegerPair) -> FloatPair {
        integers.map(|half| _mm256_cvtepi32_ps(half))
    }

    /// Returns sixteen weighted sums of nothing.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn weighted_zero() -> IntegerPair {
        [_mm256_setzero_si256(); 2]
    }

    /// Adds to each lane the product of four signed bytes and four weights of 14 bits, in two
    /// halves of 7 bits.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn add_weighted(
        sums: IntegerPair,
        values: IntegerPair,
        high: [u8; 4],
        low: [u8; 4],
    ) -> IntegerPair {
        let [high, low] = [high, low].map(|four| _mm256_set1_epi32(i32::from_le_bytes(four)));
        let mut out = sums;
        for (out, values) in out.iter_mut().zip(values) {
            // Two products of at most 127² in 16 bits.
            let highs = _mm256_maddubs_epi16(high, values);
            let lows = _mm256_maddubs_epi16(low, values);
            let highs = _mm256_madd_epi16(highs, _mm256_set1_epi16(1 << LOW_BITS));
            let lows = _mm256_madd_epi16(lows, _mm256_set1_epi16(1));
            *out = _mm256_add_epi32(*out, _mm256_add_epi32(highs, lows));
        }
        out
    }

    /// Returns the weighted sums times `scale`.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(crate) fn scaled_sums(sums: IntegerPair, scale: f32) -> FloatPair {
        to_floats(sums).map(|half| _mm256_mul_ps(half, _mm256_set1_ps(scale)))
    }
}

/// Integers in two registers of AVX-VNNI, whose dot-product instruction multiplies four unsigned
/// bytes of a lane by four signed bytes. The rest is as with AVX2.
pub(super) mod avxvnni {
    use std::arch::x86_64::*;

    pub(crate) use super::avx2::{
        FloatPair, IntegerPair, fused, lanes, load, load_bytes, store_i32, to_floats, widen,
    };
    use crate::int8_rows::LOW_BITS;
    use crate::kv_geometry::KEY_ZERO;

    /// Returns the start of the products of keys and a query: minus what [`KEY_ZERO`] in each key
    /// adds.
    #[target_feature(enable = "avx2,avxvnni")]
    #[inline]
    pub(crate) fn first_sums(query_sum: i32) -> IntegerPair {
        [_mm256_set1_epi32(-i32::from(KEY_ZERO) * query_sum); 2]
    }

    /// Adds to each lane the product of four keys, with [`KEY_ZERO`] added, and the four numbers of
    /// `query`.
    #[target_feature(enable = "avx2,avxvnni")]
    #[inline]
    pub(crate) fn dot_keys(sums: IntegerPair, keys: IntegerPair, query: [i8; 4]) -> IntegerPair {
        let query = _mm256_set1_epi32(i32::from_le_bytes(query.map(i8::cast_unsigned)));
        let mut out = sums;
        for (out, keys) in out.iter_mut().zip(keys) {
            *out = _mm256_dpbusd_avx_epi32(*out, keys, query);
        }
        out
    }

    /// Returns sixteen weighted sums of nothing: the sums of the upper and of the lower halves of
    /// weights.
    #[target_feature(enable = "avx2,avxvnni")]
    #[inline]
    pub(crate) fn weighted_zero() -> [IntegerPair; 2] {
        [[_mm256_setzero_si256(); 2]; 2]
    }

    /// Adds to each lane the products of four signed bytes and four weights of 14 bits, in two
    /// halves of 7 bits.
    #[target_feature(enable = "avx2,avxvnni")]
    #[inline]
    pub(crate) fn add_weighted(
        sums: [IntegerPair; 2],
        values: IntegerPair,
        high: [u8; 4],
        low: [u8; 4],
    ) -> [IntegerPair; 2] {
        let mut out = sums;
        for (out, four) in out.iter_mut().zip([high, low]) {
            let four = _mm256_set1_epi32(i32::from_le_bytes(four));
            for (out, values) in out.iter_mut().zip(values) {
                *out = _mm256_dpbusd_avx_epi32(*out, four, values);
            }
        }
        out
    }

    /// Returns the weighted sums times `scale`.
    #[target_feature(enable = "avx2,avxvnni")]
    #[inline]
    pub(crate) fn scaled_sums([high, low]: [IntegerPair; 2], scale: f32) -> FloatPair {
        let mut sums = low;
        for (sums, high) in sums.iter_mut().zip(high) {
            *sums = _mm256_add_epi32(_mm256_slli_epi32::<{ LOW_BITS as i32 }>(high), *sums);
        }
        super::avx2::scaled_sums(sums, scale)
    }
}

/// Sixteen floats in one register of AVX-512.
pub(super) mod avx512 {
    use std::arch::x86_64::*;

    use super::avx2::{load_sixteen, sum_eight_lanes};
    use crate::block::{BLOCK_ROWS, Block};
    use crate::elementwise::LANES;
    use crate::int8_rows::LOW_BITS;
    use crate::kv_geometry::KEY_ZERO;
    use crate::kv_page::StoredFloats;

    /// Returns zero in every lane.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn zero() -> __m512 {
        _mm512_setzero_ps()
    }

    /// Returns `value` in every lane.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn broadcast(value: f32) -> __m512 {
        _mm512_set1_ps(value)
    }

    /// Returns `a · b + c`, rounded once.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn fused(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }

    /// Adds up sixteen lanes in the order of `elementwise::sum_lanes`: the upper half onto the
    /// lower, until one lane remains.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn sum_lanes(lanes: __m512) -> f32 {
        let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(lanes)));
        sum_eight_lanes(_mm256_add_ps(_mm512_castps512_ps256(lanes), upper))
    }

    /// Loads sixteen floats.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn load(values: &[f32; LANES]) -> __m512 {
        // SAFETY: `values` is 64 readable bytes, and `loadu` needs no alignment.
        unsafe { _mm512_loadu_ps(values.as_ptr()) }
    }

    /// Loads sixteen half-precision floats as f32.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn widen(halves: &[u16; LANES]) -> __m512 {
        // SAFETY: `halves` is 32 readable bytes, and `loadu` needs no alignment.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(halves.as_ptr().cast()) })
    }

    /// Loads sixteen stored floats as f32.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn widen_stored(stored: StoredFloats<'_>) -> __m512 {
        match stored {
            StoredFloats::F16(bytes) => _mm512_cvtph_ps(load_halves(bytes)),
            StoredFloats::Bf16(bytes) => {
                let wide = _mm512_cvtepu16_epi32(load_halves(bytes));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
            StoredFloats::E4m3(bytes) => {
                // The sign moves to bit 15, the rest to bits 13..7. Bit 14 has the sign too.
                let signed = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(load_sixteen(bytes)));
                _mm512_cvtph_ps(_mm256_and_si256(signed, _mm256_set1_epi16(!0x4000)))
            }
            StoredFloats::E5m2(bytes) => {
                let wide = _mm256_cvtepu8_epi16(load_sixteen(bytes));
                _mm512_cvtph_ps(_mm256_slli_epi16::<8>(wide))
            }
        }
    }

    /// Loads 32 bytes.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn load_halves(bytes: &[u8; 2 * LANES]) -> __m256i {
        // SAFETY: `bytes` is 32 readable bytes, and `loadu` needs no alignment.
        unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
    }

    /// Rounds sixteen floats to half precision, to nearest even.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn narrow(values: __m512) -> [u16; LANES] {
        let mut halves = [0; LANES];
        let rounded = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
        // SAFETY: `halves` is 32 writable bytes, and `storeu` needs no alignment.
        unsafe { _mm256_storeu_si256(halves.as_mut_ptr().cast(), rounded) }
        halves
    }

    /// Returns the lanes as an array.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn lanes(register: __m512) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: `lanes` is 64 writable bytes, and `storeu` needs no alignment.
        unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), register) }
        lanes
    }

    /// Loads 64 bytes.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn load_bytes(bytes: &[u8; 64]) -> __m512i {
        // SAFETY: `bytes` is 64 readable bytes, and `loadu` needs no alignment.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    /// Loads a block.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn load_block(block: &Block) -> __m512i {
        // SAFETY: a `Block` is 64 readable bytes, aligned to 64 by its type.
        unsafe { _mm512_load_si512((&raw const block.0).cast()) }
    }

    /// Stores sixteen sums at the start of `out`.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn store_i32(sums: __m512i, out: &mut [i32]) {
        let out = &mut out[..BLOCK_ROWS];
        // SAFETY: `out` is sixteen writable `i32`, by the slice just taken, and `storeu` needs no
        // alignment.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), sums) }
    }

    /// Returns the start of the products of keys and a query: minus what [`KEY_ZERO`] in each key
    /// adds.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn first_sums(query_sum: i32) -> __m512i {
        _mm512_set1_epi32(-i32::from(KEY_ZERO) * query_sum)
    }

    /// Adds to each lane the product of four keys, with [`KEY_ZERO`] added, and the four numbers of
    /// `query`.
    #[target_feature(enable = "avx512f,avx512vnni")]
    #[inline]
    pub(crate) fn dot_keys(sums: __m512i, keys: __m512i, query: [i8; 4]) -> __m512i {
        let query = i32::from_le_bytes(query.map(i8::cast_unsigned));
        _mm512_dpbusd_epi32(sums, keys, _mm512_set1_epi32(query))
    }

    /// Converts sixteen integers to floats.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn to_floats(integers: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(integers)
    }

    /// Returns sixteen weighted sums of nothing: the sums of the upper and of the lower halves of
    /// weights.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn weighted_zero() -> [__m512i; 2] {
        [_mm512_setzero_si512(); 2]
    }

    /// Adds to each lane the products of four signed bytes and four weights of 14 bits, in two
    /// halves of 7 bits.
    #[target_feature(enable = "avx512f,avx512vnni")]
    #[inline]
    pub(crate) fn add_weighted(
        sums: [__m512i; 2],
        values: __m512i,
        high: [u8; 4],
        low: [u8; 4],
    ) -> [__m512i; 2] {
        let [high, low] = [high, low].map(|four| _mm512_set1_epi32(i32::from_le_bytes(four)));
        [
            _mm512_dpbusd_epi32(sums[0], high, values),
            _mm512_dpbusd_epi32(sums[1], low, values),
        ]
    }

    /// Returns the weighted sums times `scale`.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn scaled_sums(sums: [__m512i; 2], scale: f32) -> __m512 {
        let sums = _mm512_add_epi32(_mm512_slli_epi32::<LOW_BITS>(sums[0]), sums[1]);
        _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(scale))
    }
}
