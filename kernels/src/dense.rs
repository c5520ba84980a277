//! Float matrices (`lm_head`, the embedding, linear layers that are not ternary) and half
//! precision.
//!
//! Invariant: rows are contiguous and not padded.
//!
//! Invariant: conversions between f16 and f32 follow IEEE 754, round to nearest even, and have the
//! same bits as the F16C instructions, including subnormals, infinities and NaN (which becomes
//! quiet).

use crate::block::PANEL_ROWS;
use crate::huge::HugeSlice;

/// A matrix of floats, `rows` × `columns`, row-major.
pub struct DenseMatrix {
    rows: usize,
    columns: usize,
    values: DenseValues,
}

/// How the values are stored.
pub(crate) enum DenseValues {
    /// IEEE half precision, as bits.
    F16(HugeSlice<u16>),
    F32(HugeSlice<f32>),
}

impl DenseMatrix {
    /// Makes a matrix of the bits of half-precision values.
    ///
    /// # Panics
    /// If a dimension is zero or `values` is not `rows * columns` long.
    pub fn from_f16(rows: usize, columns: usize, values: impl Into<HugeSlice<u16>>) -> DenseMatrix {
        let values = values.into();
        DenseMatrix::checked(rows, columns, values.len(), DenseValues::F16(values))
    }

    /// Makes a matrix of single-precision values.
    ///
    /// # Panics
    /// If a dimension is zero or `values` is not `rows * columns` long.
    pub fn from_f32(rows: usize, columns: usize, values: impl Into<HugeSlice<f32>>) -> DenseMatrix {
        let values = values.into();
        DenseMatrix::checked(rows, columns, values.len(), DenseValues::F32(values))
    }

    fn checked(rows: usize, columns: usize, len: usize, values: DenseValues) -> DenseMatrix {
        assert!(rows > 0 && columns > 0, "a matrix of {rows} × {columns}");
        assert_eq!(
            len,
            rows * columns,
            "the values of a matrix of {rows} × {columns}"
        );
        DenseMatrix {
            rows,
            columns,
            values,
        }
    }

    /// Returns the number of rows: the outputs of a product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns: the inputs of a product.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the number of panels of [`PANEL_ROWS`] rows. The rows may not fill the last one.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL_ROWS)
    }

    /// Returns the size of the values, in bytes.
    pub fn bytes(&self) -> usize {
        match &self.values {
            DenseValues::F16(values) => size_of_val(&values[..]),
            DenseValues::F32(values) => size_of_val(&values[..]),
        }
    }

    pub(crate) fn values(&self) -> &DenseValues {
        &self.values
    }
}

/// Returns the bits of the half-precision number nearest to `value`, ties to even.
#[inline]
pub fn f16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    sign | match magnitude {
        0x7f80_0001.. => 0x7e00 | (magnitude >> 13) as u16 & 0x01ff, // NaN, made quiet
        0x477f_f000.. => 0x7c00, // 65520 and above round to infinity
        0x3880_0000.. => {
            // Normal. The exponent's bias shrinks from 127 to 15. A carry out of the mantissa
            // correctly increments the exponent.
            let shifted = magnitude - (112 << 23);
            let half_minus_one = 0x0fff + ((shifted >> 13) & 1);
            ((shifted + half_minus_one) >> 13) as u16
        }
        // Subnormal. The last place of 0.5 is 2⁻²⁴, the unit of a subnormal half, so the addition
        // rounds correctly.
        _ => (f32::from_bits(magnitude) + 0.5)
            .to_bits()
            .wrapping_sub(0.5_f32.to_bits()) as u16,
    }
}

/// Returns the value of the bits of a half-precision number.
#[inline]
pub fn f32_from_f16(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let magnitude = u32::from(half & 0x7fff);
    let bits = match magnitude {
        0x7c01.. => 0x7fc0_0000 | (magnitude << 13), // NaN, made quiet
        0x7c00 => 0x7f80_0000,
        0x0400.. => (magnitude << 13) + (112 << 23),
        // Subnormal: a multiple of 2⁻²⁴.
        _ => (magnitude as f32 * (1.0 / 16_777_216.0)).to_bits(),
    };
    f32::from_bits(sign | bits)
}
