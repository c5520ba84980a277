//! The number formats in which keys and values are stored, and the size of a page in each.

use std::fmt;
use std::ops::Range;

use crate::kv_geometry::{PAGE_TOKENS, SCALES_BYTES};

/// A number format of stored keys and values.
///
/// A page holds one KV head's keys, then its values, of [`PAGE_TOKENS`] tokens. Formats of 8 bits
/// are followed by a scale for each token's key and one for each token's value, as bfloat16: the
/// token's largest magnitude divided by the format's largest number, rounded up. So no other token
/// changes how a token is stored, and no stored number overflows.
///
/// | Format | Keys | Values | Scales |
/// |---|---|---|---|
/// | `F16`, `Bf16` | `[head_dim][16]` | `[16][head_dim]` | |
/// | `Fp8E4m3`, `Fp8E5m2` | `[head_dim][16]` | `[16][head_dim]` | `[key, value][16]` |
/// | `Int8` | `[head_dim / 4][16][4]`, plus 128 | `[4][head_dim][4]` | `[key, value][16]` |
///
/// The Open Compute Project defines the FP8 formats. A key or value with a number that is not
/// finite has the scale NaN, so every query that sees the token becomes NaN too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// IEEE half precision.
    #[default]
    F16,
    /// bfloat16: the range of single precision, and 8 bits of precision.
    Bf16,
    /// −127 to 127.
    Int8,
    /// FP8 with 4 bits of exponent and 3 of mantissa. The largest number is 448.
    Fp8E4m3,
    /// FP8 with 5 bits of exponent and 2 of mantissa. The largest number is 57,344.
    Fp8E5m2,
}

impl KvDtype {
    /// All formats, in the order of the tables of kernels.
    pub const ALL: [KvDtype; 5] = [
        KvDtype::F16,
        KvDtype::Bf16,
        KvDtype::Int8,
        KvDtype::Fp8E4m3,
        KvDtype::Fp8E5m2,
    ];

    /// Returns the format of this name.
    pub fn named(name: &str) -> Option<KvDtype> {
        KvDtype::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Returns the format's name.
    pub fn name(self) -> &'static str {
        match self {
            KvDtype::F16 => "f16",
            KvDtype::Bf16 => "bf16",
            KvDtype::Int8 => "int8",
            KvDtype::Fp8E4m3 => "fp8_e4m3",
            KvDtype::Fp8E5m2 => "fp8_e5m2",
        }
    }

    /// Returns the bytes of a page of one KV head: a multiple of a cache line.
    pub fn page_bytes(self, head_dim: usize) -> usize {
        let scales = if self.has_scales() { SCALES_BYTES } else { 0 };
        2 * PAGE_TOKENS * head_dim * self.value_bytes() + scales
    }

    /// Returns where in a page the values of some slots are stored. The values of other slots may
    /// lie between them.
    pub fn value_range(self, head_dim: usize, slots: Range<usize>) -> Range<usize> {
        let slots = match self {
            KvDtype::Int8 => slots.start / 4 * 4..slots.end.next_multiple_of(4),
            _ => slots,
        };
        let at = |slot: usize| (PAGE_TOKENS + slot) * head_dim * self.value_bytes();
        at(slots.start)..at(slots.end)
    }

    /// Returns whether a page has scales.
    pub(crate) fn has_scales(self) -> bool {
        self.value_bytes() == 1
    }

    fn value_bytes(self) -> usize {
        match self {
            KvDtype::F16 | KvDtype::Bf16 => 2,
            KvDtype::Int8 | KvDtype::Fp8E4m3 | KvDtype::Fp8E5m2 => 1,
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bits_hold_nearly_twice_the_tokens_of_sixteen() {
        let bytes = KvDtype::ALL.map(|dtype| dtype.page_bytes(128));
        assert_eq!(bytes, [8192, 8192, 4160, 4160, 4160]);
        for dtype in KvDtype::ALL {
            assert_eq!(KvDtype::named(dtype.name()), Some(dtype));
            for head_dim in [16, 48, 256] {
                assert_eq!(dtype.page_bytes(head_dim) % 64, 0);
            }
        }
        assert_eq!(KvDtype::named("int4"), None);
    }

    #[test]
    fn a_value_range_begins_after_the_keys() {
        assert_eq!(KvDtype::F16.value_range(32, 5..7), 21 * 64..23 * 64);
        assert_eq!(KvDtype::Fp8E4m3.value_range(32, 5..7), 21 * 32..23 * 32);
        assert_eq!(KvDtype::Int8.value_range(32, 5..7), 20 * 32..24 * 32);
        assert_eq!(KvDtype::Int8.value_range(32, 0..16), 16 * 32..32 * 32);
    }
}
