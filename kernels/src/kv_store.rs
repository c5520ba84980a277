//! Storing a token's key and value in a page, in every number format except half precision.
//!
//! As in `elementwise.rs`, these bodies are the definition and the implementation at once.
//!
//! Invariant: what is stored depends on the token alone.

use crate::elementwise::{ROUND, all_finite, largest_magnitude};
use crate::kv_geometry::{INT8_STEP, KEY_ZERO, MAX_HEAD_DIM, PAGE_TOKENS, SCALES_BYTES};
use crate::small_floats::{
    E4M3_MAX, E5M2_MAX, bf16_from_f32, bf16_from_f32_upwards, e4m3_from_f32, e5m2_from_f32,
    f32_from_bf16,
};

/// The largest magnitude of an int8 key or value.
const INT8_MAX: f32 = 127.0;

/// The largest magnitude of a token's numbers counts as at least this. So the scale of a token of
/// zeros is not zero.
const SMALLEST: f32 = 1e-30;

/// The bits of a scale of a token with a number that is not finite.
const NAN_SCALE: u16 = 0x7fc0;

/// Stores a token's key as a lane of the page's keys and its value as a row, as bfloat16.
#[inline(always)]
pub(crate) fn store_bf16(key: &[f32], value: &[f32], slot: usize, page: &mut [u8]) {
    let (keys, values) = page
        .as_chunks_mut::<2>()
        .0
        .split_at_mut(key.len() * PAGE_TOKENS);
    let mut codes = [0; MAX_HEAD_DIM];
    for (code, &key) in codes.iter_mut().zip(key) {
        *code = bf16_from_f32(key);
    }
    for (row, code) in keys.as_chunks_mut::<PAGE_TOKENS>().0.iter_mut().zip(codes) {
        row[slot] = code.to_le_bytes();
    }
    for (stored, &value) in values[slot * value.len()..].iter_mut().zip(value) {
        *stored = bf16_from_f32(value).to_le_bytes();
    }
}

/// Stores a token as FP8 E4M3, with a scale for the key and one for the value.
#[inline(always)]
pub(crate) fn store_e4m3(key: &[f32], value: &[f32], slot: usize, page: &mut [u8]) {
    store_fp8(key, value, slot, page, |x| {
        quantize(x, E4M3_MAX, e4m3_from_f32)
    });
}

/// Stores a token as FP8 E5M2, with a scale for the key and one for the value.
#[inline(always)]
pub(crate) fn store_e5m2(key: &[f32], value: &[f32], slot: usize, page: &mut [u8]) {
    store_fp8(key, value, slot, page, |x| {
        quantize(x, E5M2_MAX, e5m2_from_f32)
    });
}

#[inline(always)]
fn store_fp8(
    key: &[f32],
    value: &[f32],
    slot: usize,
    page: &mut [u8],
    quantize: impl Fn(&[f32]) -> QuantizedHead,
) {
    let (keys, rest) = page.split_at_mut(key.len() * PAGE_TOKENS);
    let (key, quantized_value) = (quantize(key), quantize(value));
    for (row, code) in keys
        .as_chunks_mut::<PAGE_TOKENS>()
        .0
        .iter_mut()
        .zip(key.codes)
    {
        row[slot] = code;
    }
    rest[slot * value.len()..][..value.len()]
        .copy_from_slice(&quantized_value.codes[..value.len()]);
    store_scales(rest, slot, [key.scale, quantized_value.scale]);
}

/// Stores a token as 8-bit integers, with a scale for the key and one for the value.
#[inline(always)]
pub(crate) fn store_int8(key: &[f32], value: &[f32], slot: usize, page: &mut [u8]) {
    let head_dim = key.len();
    let (keys, rest) = page.split_at_mut(head_dim * PAGE_TOKENS);
    let [key, value] = [key, value].map(|x| quantize(x, INT8_MAX, nearest_integer));
    let fours = key.codes.as_chunks::<INT8_STEP>().0;
    for (line, four) in keys.as_chunks_mut::<64>().0.iter_mut().zip(fours) {
        let places = line.as_chunks_mut::<INT8_STEP>().0;
        places[slot] = four.map(|code| code.wrapping_add(KEY_ZERO));
    }
    let fours = rest.as_chunks_mut::<INT8_STEP>().0;
    let fours = fours[slot / INT8_STEP * head_dim..][..head_dim].iter_mut();
    for (four, code) in fours.zip(value.codes) {
        four[slot % INT8_STEP] = code;
    }
    store_scales(rest, slot, [key.scale, value.scale]);
}

/// Stores the scales of a token's key and value at the end of its page.
#[inline(always)]
fn store_scales(page: &mut [u8], slot: usize, [key, value]: [u16; 2]) {
    let scales = page
        .last_chunk_mut::<SCALES_BYTES>()
        .expect("a page with scales");
    let scales = scales.as_chunks_mut::<2>().0;
    scales[slot] = key.to_le_bytes();
    scales[PAGE_TOKENS + slot] = value.to_le_bytes();
}

/// A key or value in 8 bits.
struct QuantizedHead {
    codes: [u8; MAX_HEAD_DIM],
    scale: u16, // The bits of a bfloat16.
}

/// Divides the numbers by their scale and rounds them with `nearest`. The scale is the largest
/// magnitude, divided by `largest` and rounded up. If a number is not finite, the scale is NaN.
#[inline(always)]
fn quantize(x: &[f32], largest: f32, nearest: impl Fn(f32) -> u8) -> QuantizedHead {
    let mut codes = [0; MAX_HEAD_DIM];
    if !all_finite(x) {
        let scale = NAN_SCALE;
        return QuantizedHead { codes, scale };
    }
    let scale = bf16_from_f32_upwards(largest_magnitude(x).max(SMALLEST) / largest);
    let inverse = 1.0 / f32_from_bf16(scale);
    for (code, &x) in codes.iter_mut().zip(x) {
        *code = nearest(x * inverse);
    }
    QuantizedHead { codes, scale }
}

/// Returns a number up to 127 in magnitude as the nearest integer, ties to even.
#[inline(always)]
fn nearest_integer(x: f32) -> u8 {
    (x + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as u8
}
