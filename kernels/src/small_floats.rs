//! bfloat16 and FP8: conversions from and to single precision.
//!
//! Invariant: conversions from f32 round to nearest, ties to even. Conversions to FP8 saturate.

/// Returns the bits of the bfloat16 number nearest to `value`, ties to even. NaN becomes quiet.
#[inline(always)]
pub fn bf16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    let quiet = (bits >> 16) as u16 | 0x0040;
    if value.is_nan() { quiet } else { rounded }
}

/// Returns the value of the bits of a bfloat16 number.
#[inline(always)]
pub fn f32_from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Returns the bits of the smallest bfloat16 number that is at least `value`, which is positive and
/// at most the largest bfloat16 number.
#[inline(always)]
pub(crate) fn bf16_from_f32_upwards(value: f32) -> u16 {
    (value.to_bits().wrapping_add(0xffff) >> 16) as u16
}

/// A format of 8 bits: a sign, an exponent and a mantissa.
struct SmallFormat {
    mantissa_bits: u32,
    exponent_bias: u32,
    largest: f32,
}

const E4M3: SmallFormat = SmallFormat {
    mantissa_bits: 3,
    exponent_bias: 7,
    largest: E4M3_MAX,
};

const E5M2: SmallFormat = SmallFormat {
    mantissa_bits: 2,
    exponent_bias: 15,
    largest: E5M2_MAX,
};

/// The largest number of FP8 E4M3.
pub(crate) const E4M3_MAX: f32 = 448.0;

/// The largest number of FP8 E5M2.
pub(crate) const E5M2_MAX: f32 = 57344.0;

/// By this number, [`f16_from_e4m3`] is smaller than its argument.
pub(crate) const E4M3_UNIT: f32 = 256.0;

/// Returns the bits of the FP8 E4M3 number nearest to `value`, ties to even; ±448 if `value` is
/// larger. NaN is not allowed.
#[inline(always)]
pub fn e4m3_from_f32(value: f32) -> u8 {
    E4M3.nearest(value)
}

/// Returns the bits of the FP8 E5M2 number nearest to `value`, ties to even; ±57,344 if `value` is
/// larger. NaN is not allowed.
#[inline(always)]
pub fn e5m2_from_f32(value: f32) -> u8 {
    E5M2.nearest(value)
}

impl SmallFormat {
    #[inline(always)]
    fn nearest(&self, value: f32) -> u8 {
        let sign = (value.to_bits() >> 24) as u8 & 0x80;
        let magnitude = value.abs();
        let magnitude = if magnitude < self.largest {
            magnitude
        } else {
            self.largest
        };
        // Normal: the exponent's bias shrinks, and the mantissa loses bits. A carry out of the
        // mantissa correctly increments the exponent.
        let lost = 23 - self.mantissa_bits;
        let rebias = (127 - self.exponent_bias) << 23;
        let bits = magnitude.to_bits().wrapping_sub(rebias);
        let half_minus_one = (1 << (lost - 1)) - 1 + (bits >> lost & 1);
        let normal = bits.wrapping_add(half_minus_one) >> lost;
        // Subnormal: `unit` has the last place of a subnormal number, so the addition rounds
        // correctly.
        let unit_exponent = 127 + 1 - self.exponent_bias + lost;
        let unit = f32::from_bits(unit_exponent << 23);
        let subnormal = (magnitude + unit).to_bits().wrapping_sub(unit.to_bits());
        let smallest_normal = f32::from_bits((128 - self.exponent_bias) << 23);
        let is_normal = magnitude >= smallest_normal;
        sign | if is_normal { normal } else { subnormal } as u8
    }
}

/// Returns the bits of a half-precision number that is the FP8 E4M3 number divided by
/// [`E4M3_UNIT`]. The bits of NaN give a number.
#[inline(always)]
pub(crate) fn f16_from_e4m3(bits: u8) -> u16 {
    u16::from(bits & 0x80) << 8 | u16::from(bits & 0x7f) << 7
}

/// Returns the bits of the half-precision number that equals the FP8 E5M2 number.
#[inline(always)]
pub(crate) fn f16_from_e5m2(bits: u8) -> u16 {
    u16::from(bits) << 8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dense::f32_from_f16;

    fn e4m3(bits: u8) -> f32 {
        f32_from_f16(f16_from_e4m3(bits)) * E4M3_UNIT
    }

    fn e5m2(bits: u8) -> f32 {
        f32_from_f16(f16_from_e5m2(bits))
    }

    #[test]
    fn fp8_bits_have_the_values_of_their_formats() {
        let cases = [(0x00, 0.0), (0x01, 2.0_f32.powi(-9)), (0x07, 7.0 / 512.0)];
        for (bits, value) in cases {
            assert_eq!(e4m3(bits), value);
        }
        assert_eq!(
            [e4m3(0x08), e4m3(0x38), e4m3(0x7e)],
            [1.0 / 64.0, 1.0, 448.0]
        );
        assert_eq!([e4m3(0xb9), e4m3(0xfe)], [-1.125, -448.0]);
        assert_eq!(
            [e5m2(0x01), e5m2(0x04)],
            [2.0_f32.powi(-16), 2.0_f32.powi(-14)]
        );
        assert_eq!([e5m2(0x3c), e5m2(0xbd), e5m2(0x7b)], [1.0, -1.25, 57344.0]);
    }

    /// Every finite number comes back, and halfway to the next one rounds to the even bits.
    fn check(nearest: fn(f32) -> u8, value: fn(u8) -> f32, last: u8) {
        for bits in 0..=last {
            assert_eq!(nearest(value(bits)), bits);
            assert_eq!(nearest(-value(bits)), bits | 0x80);
            if bits < last {
                let middle = f32::midpoint(value(bits), value(bits + 1));
                assert_eq!(nearest(middle), bits + (bits & 1), "{middle}");
                assert_eq!(nearest(middle.next_down()), bits, "{middle}");
                assert_eq!(nearest(middle.next_up()), bits + 1, "{middle}");
            }
        }
        for large in [value(last) * 1.001, 1e6, f32::MAX, f32::INFINITY] {
            assert_eq!([nearest(large), nearest(-large)], [last, last | 0x80]);
        }
        assert_eq!([nearest(1e-30), nearest(-1e-30)], [0, 0x80]);
    }

    #[test]
    fn floats_round_to_the_nearest_fp8_number_and_saturate() {
        check(e4m3_from_f32, e4m3, 0x7e);
        check(e5m2_from_f32, e5m2, 0x7b);
    }

    #[test]
    fn floats_round_to_the_nearest_bfloat16() {
        for bits in (0..=u16::MAX).filter(|bits| bits & 0x7f80 != 0x7f80) {
            let value = f32_from_bf16(bits);
            assert_eq!(bf16_from_f32(value), bits);
            let middle = f32::from_bits(value.to_bits() | 0x8000);
            assert_eq!(bf16_from_f32(middle), bits + (bits & 1), "{middle}");
            let [below, above] = [-1, 1].map(|by| middle.to_bits().wrapping_add_signed(by));
            assert_eq!(bf16_from_f32(f32::from_bits(below)), bits);
            assert_eq!(bf16_from_f32(f32::from_bits(above)), bits + 1);
        }
        assert_eq!(bf16_from_f32(f32::INFINITY), 0x7f80);
        assert!(f32_from_bf16(bf16_from_f32(f32::NAN)).is_nan());
        assert!(f32_from_bf16(bf16_from_f32(f32::from_bits(0x7f80_0001))).is_nan());
    }

    #[test]
    fn a_scale_is_rounded_up_to_a_bfloat16() {
        for value in [1.0, 1.0 + f32::EPSILON, 0.3, 1e-30, 3e30] {
            let up = f32_from_bf16(bf16_from_f32_upwards(value));
            assert!(
                up >= value && up <= value * (1.0 + 1.0 / 128.0),
                "{value}: {up}"
            );
        }
        assert_eq!(bf16_from_f32_upwards(1.0), 0x3f80);
    }
}
