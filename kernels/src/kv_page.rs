//! The bytes of a page of keys and values, by number format.
//!
//! Formats of floats share all kernels: a chunk of sixteen stored numbers is widened to single
//! precision when it is read. [`FloatChunk`] is what a kernel needs to know of such a format.

use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::dense::f32_from_f16;
use crate::elementwise::LANES;
use crate::kv_dtype::KvDtype;
use crate::kv_geometry::{INT8_STEP, KEY_ZERO, PAGE_TOKENS, SCALES_BYTES, SPAN_PAGES, SPAN_TOKENS};
use crate::small_floats::{E4M3_UNIT, f16_from_e4m3, f16_from_e5m2, f32_from_bf16};

/// Sixteen stored floats: one dimension of the keys of a page, or sixteen dimensions of a value.
pub(crate) trait FloatChunk: FromBytes + Immutable + KnownLayout + Copy {
    /// The factor of the stored scales by which widened numbers become keys and values. `None` if
    /// the format has no scales.
    const UNIT: Option<f32>;

    /// Returns the bytes and their format.
    fn stored(&self) -> StoredFloats<'_>;
}

/// The bytes of sixteen floats of some format. After inlining, the compiler knows which.
pub(crate) enum StoredFloats<'a> {
    F16(&'a [u8; 2 * LANES]),
    Bf16(&'a [u8; 2 * LANES]),
    E4m3(&'a [u8; LANES]),
    E5m2(&'a [u8; LANES]),
}

impl StoredFloats<'_> {
    /// Returns one of the numbers in single precision, divided by the format's unit.
    #[inline(always)]
    pub(crate) fn widened(&self, lane: usize) -> f32 {
        let pair = |bytes: &[u8; 2 * LANES]| u16::from_le_bytes(bytes.as_chunks().0[lane]);
        match self {
            StoredFloats::F16(bytes) => f32_from_f16(pair(bytes)),
            StoredFloats::Bf16(bytes) => f32_from_bf16(pair(bytes)),
            StoredFloats::E4m3(bytes) => f32_from_f16(f16_from_e4m3(bytes[lane])),
            StoredFloats::E5m2(bytes) => f32_from_f16(f16_from_e5m2(bytes[lane])),
        }
    }
}

/// Defines the chunk of each format.
macro_rules! float_chunks {
    ($($(#[$doc:meta])* $chunk:ident, $format:ident, $bytes:expr, $unit:expr;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
            #[repr(transparent)]
            pub(crate) struct $chunk([u8; $bytes]);

            impl FloatChunk for $chunk {
                const UNIT: Option<f32> = $unit;

                #[inline(always)]
                fn stored(&self) -> StoredFloats<'_> {
                    StoredFloats::$format(&self.0)
                }
            }
        )*
    };
}

float_chunks! {
    /// Sixteen half-precision floats.
    F16Chunk, F16, 2 * LANES, None;
    /// Sixteen bfloat16.
    Bf16Chunk, Bf16, 2 * LANES, None;
    /// Sixteen FP8 E4M3.
    E4m3Chunk, E4m3, LANES, Some(E4M3_UNIT);
    /// Sixteen FP8 E5M2.
    E5m2Chunk, E5m2, LANES, Some(1.0);
}

/// One KV head's keys and values of [`PAGE_TOKENS`] tokens, as floats.
#[derive(Clone, Copy)]
pub(crate) struct FloatPage<'a, C> {
    /// `[head_dim]`: a chunk is one dimension of all tokens, so a token is a lane.
    pub(crate) keys: &'a [C],
    /// `[16][head_dim / 16]`.
    pub(crate) values: &'a [C],
}

impl<'a, C: FloatChunk> FloatPage<'a, C> {
    const NONE: FloatPage<'a, C> = FloatPage {
        keys: &[],
        values: &[],
    };

    #[inline(always)]
    fn of(page: &'a [u8], head_dim: usize) -> FloatPage<'a, C> {
        let (keys, rest) = page.split_at(head_dim * size_of::<C>());
        let (values, _) = rest.split_at(head_dim * size_of::<C>());
        let [keys, values] = [keys, values].map(|bytes| match <[C]>::ref_from_bytes(bytes) {
            Ok(chunks) => chunks,
            Err(_) => unreachable!("whole chunks, which need no alignment"),
        });
        FloatPage { keys, values }
    }

    /// Returns up to a span's pages.
    #[inline(always)]
    pub(crate) fn all_of(pages: &[&'a [u8]], head_dim: usize) -> [FloatPage<'a, C>; SPAN_PAGES] {
        let mut all = [FloatPage::NONE; SPAN_PAGES];
        for (typed, page) in all.iter_mut().zip(pages) {
            *typed = FloatPage::of(page, head_dim);
        }
        all
    }
}

/// One KV head's keys and values of [`PAGE_TOKENS`] tokens, as 8-bit integers.
#[derive(Clone, Copy)]
pub(crate) struct Int8Page<'a> {
    /// `[head_dim / 4][16][4]`: four dimensions of each token. [`KEY_ZERO`] is added to each.
    pub(crate) keys: &'a [[u8; 64]],
    /// `[4][head_dim / 16][16][4]`: four tokens of each dimension, signed.
    pub(crate) values: &'a [[u8; 64]],
}

impl<'a> Int8Page<'a> {
    #[inline(always)]
    fn of(page: &'a [u8], head_dim: usize) -> Int8Page<'a> {
        let lines = page.as_chunks().0;
        let (keys, rest) = lines.split_at(head_dim / INT8_STEP);
        Int8Page {
            keys,
            values: &rest[..head_dim / INT8_STEP],
        }
    }

    /// Returns up to a span's pages.
    #[inline(always)]
    pub(crate) fn all_of(pages: &[&'a [u8]], head_dim: usize) -> [Int8Page<'a>; SPAN_PAGES] {
        let none = Int8Page {
            keys: &[],
            values: &[],
        };
        let mut all = [none; SPAN_PAGES];
        for (typed, page) in all.iter_mut().zip(pages) {
            *typed = Int8Page::of(page, head_dim);
        }
        all
    }

    /// Returns a dimension of a token's key.
    #[inline(always)]
    pub(crate) fn key(&self, token: usize, i: usize) -> i8 {
        let byte = self.keys[i / INT8_STEP][token * INT8_STEP + i % INT8_STEP];
        byte.wrapping_sub(KEY_ZERO).cast_signed()
    }

    /// Returns a dimension of a token's value.
    #[inline(always)]
    pub(crate) fn value(&self, token: usize, i: usize) -> i8 {
        let lines = self.values.len() / (PAGE_TOKENS / INT8_STEP);
        let line = &self.values[token / INT8_STEP * lines + i / LANES];
        line[i % LANES * INT8_STEP + token % INT8_STEP].cast_signed()
    }
}

/// The scales of the keys and values of a span.
pub(crate) struct SpanScales {
    pub(crate) keys: [f32; SPAN_TOKENS],
    pub(crate) values: [f32; SPAN_TOKENS],
}

impl SpanScales {
    /// Reads the scales of some pages of 8-bit numbers, and multiplies them by `unit`.
    #[inline(always)]
    pub(crate) fn of(pages: &[&[u8]], unit: f32) -> SpanScales {
        let mut scales = SpanScales {
            keys: [0.0; SPAN_TOKENS],
            values: [0.0; SPAN_TOKENS],
        };
        let keys = scales.keys.as_chunks_mut::<PAGE_TOKENS>().0.iter_mut();
        let values = scales.values.as_chunks_mut::<PAGE_TOKENS>().0;
        for ((page, keys), values) in pages.iter().zip(keys).zip(values) {
            let bytes = page
                .last_chunk::<SCALES_BYTES>()
                .expect("a page with scales");
            let (of_keys, of_values) = bytes.as_chunks::<2>().0.split_at(PAGE_TOKENS);
            for (scale, &bits) in keys.iter_mut().zip(of_keys) {
                *scale = f32_from_bf16(u16::from_le_bytes(bits)) * unit;
            }
            for (scale, &bits) in values.iter_mut().zip(of_values) {
                *scale = f32_from_bf16(u16::from_le_bytes(bits)) * unit;
            }
        }
        scales
    }
}

impl KvDtype {
    /// Reads one token of a page: its key and value as attention uses them.
    ///
    /// # Panics
    /// If `page` is not a page of heads of `key.len()` values, if `value` has another length, or if
    /// there is no such slot.
    pub fn load(self, page: &[u8], slot: usize, key: &mut [f32], value: &mut [f32]) {
        let head_dim = key.len();
        assert_eq!(page.len(), self.page_bytes(head_dim), "bytes of a page");
        assert_eq!(value.len(), head_dim, "key and value of a head");
        match self {
            KvDtype::F16 => load_floats::<F16Chunk>(page, slot, key, value),
            KvDtype::Bf16 => load_floats::<Bf16Chunk>(page, slot, key, value),
            KvDtype::Fp8E4m3 => load_floats::<E4m3Chunk>(page, slot, key, value),
            KvDtype::Fp8E5m2 => load_floats::<E5m2Chunk>(page, slot, key, value),
            KvDtype::Int8 => {
                let (stored, scales) = (Int8Page::of(page, head_dim), SpanScales::of(&[page], 1.0));
                for (i, (key, value)) in key.iter_mut().zip(value).enumerate() {
                    *key = f32::from(stored.key(slot, i)) * scales.keys[slot];
                    *value = f32::from(stored.value(slot, i)) * scales.values[slot];
                }
            }
        }
    }
}

fn load_floats<C: FloatChunk>(page: &[u8], slot: usize, key: &mut [f32], value: &mut [f32]) {
    let stored = FloatPage::<C>::of(page, key.len());
    let [of_key, of_value] = C::UNIT.map_or([1.0; 2], |unit| {
        let scales = SpanScales::of(&[page], unit);
        [scales.keys[slot], scales.values[slot]]
    });
    let values = &stored.values[slot * (value.len() / LANES)..];
    for (i, (key, value)) in key.iter_mut().zip(value).enumerate() {
        *key = stored.keys[i].stored().widened(slot) * of_key;
        *value = values[i / LANES].stored().widened(i % LANES) * of_value;
    }
}
