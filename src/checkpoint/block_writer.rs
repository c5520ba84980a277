//! Writes ternary weights in blocks, as `blocks.rs` reads them.

use half::f16;

use super::blocks::{BlockLayout, I2sOrder, ScaleSpan};

impl BlockLayout {
    /// Appends a row of codes. `scales` has one scale for each block, or one for all blocks. A row
    /// of I2_S contains no scale: [`BlockLayout::finish_ternary`] appends the scale of the tensor.
    ///
    /// # Panics
    /// If this layout is not written, a scale is not exact in half precision, or the row is not
    /// whole blocks.
    pub(crate) fn write_ternary_row(self, codes: &[u8], scales: &[f32], out: &mut Vec<u8>) {
        let (weights, _) = self.block();
        assert!(codes.len().is_multiple_of(weights), "a row is whole blocks");
        for (index, codes) in codes.chunks_exact(weights).enumerate() {
            let scale = scales[index % scales.len()];
            let half = f16::from_f32(scale);
            let is_exact = half.to_f32() == scale;
            assert!(
                is_exact || self.scale_span() == Some(ScaleSpan::Tensor),
                "{scale} is exact in half precision"
            );
            let half = half.to_le_bytes();
            match self {
                BlockLayout::I2s(I2sOrder::X86) => put_four_runs(codes, [6, 4, 2, 0], out),
                BlockLayout::Tq1 => {
                    put_trits(&codes[..160], 5, out);
                    put_trits(&codes[160..240], 5, out);
                    put_trits(&codes[240..], 4, out);
                    out.extend(half);
                }
                BlockLayout::Tq2 => {
                    for codes in codes.chunks_exact(128) {
                        put_four_runs(codes, [0, 2, 4, 6], out);
                    }
                    out.extend(half);
                }
                BlockLayout::Q2Group64 | BlockLayout::Q2Group128 => {
                    out.extend(half);
                    let fours = codes.as_chunks::<4>().0.iter();
                    out.extend(fours.map(|[a, b, c, d]| a | b << 2 | c << 4 | d << 6));
                }
                other => unreachable!("{} is not written", other.name()),
            }
        }
    }

    /// Appends the scale and the padding that follow the codes of a tensor in I2_S. Other layouts
    /// end with their codes.
    pub(crate) fn finish_ternary(self, scale: f32, out: &mut Vec<u8>) {
        if self.scale_span() == Some(ScaleSpan::Tensor) {
            out.extend(scale.to_le_bytes());
            out.extend([0; 28]);
        }
    }
}

/// Divides the codes into four runs, and appends bytes that have one code of each run.
fn put_four_runs(codes: &[u8], shifts: [u32; 4], out: &mut Vec<u8>) {
    let run = codes.len() / 4;
    out.extend((0..run).map(|byte| {
        let codes = codes.iter().skip(byte).step_by(run);
        let shifted = codes.zip(shifts).map(|(code, shift)| code << shift);
        shifted.fold(0, |all, code| all | code)
    }));
}

/// Appends bytes of `digits` base-3 digits each. Digit n of byte m is the code n · bytes + m. In
/// base 3, byte / 256 has these digits after the point. The byte is rounded up.
fn put_trits(codes: &[u8], digits: usize, out: &mut Vec<u8>) {
    let bytes = codes.len() / digits;
    out.extend((0..bytes).map(|byte| {
        let digit = |n: usize| {
            if n < digits {
                u32::from(codes[n * bytes + byte])
            } else {
                0
            }
        };
        let total = (0..5).fold(0, |total, n| total * 3 + digit(n));
        (total * 256).div_ceil(243) as u8
    }));
}
