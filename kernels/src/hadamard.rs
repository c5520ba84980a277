//! The Walsh–Hadamard transform of the input of rotated weights.
//!
//! Rotated weights are stored as `W·H·D`: each row in blocks, multiplied by a symmetric orthogonal
//! matrix H and by signs D. So the product needs the input `H·D·x`. The story: a few values of a
//! row are far larger than the rest, and one scale of 8 bits must hold them all. H spreads each
//! value over its whole block, so all values of the rotated row are about equally large.
//!
//! As in `elementwise.rs`, the body is the definition and the implementation at once.

use crate::elementwise::LANES;

/// Multiplies each block of `x` by the normalized matrix H of Sylvester's order:
/// `H[i][j] = (−1)^popcount(i & j) / sqrt(block)`. The block is a power of two and divides x.
///
/// The order of the operations is part of the result: first the factor, then sums and differences
/// of values that are 1, 2, 4 … `block / 2` apart. The factor is 1 / sqrt(block), rounded once.
#[inline(always)]
pub(crate) fn hadamard(x: &mut [f32], block: usize) {
    let factor = (1.0 / (block as f64).sqrt()) as f32;
    for x in x.chunks_exact_mut(block) {
        for value in x.iter_mut() {
            *value *= factor;
        }
        let mut distance = 1;
        if block >= LANES {
            for lanes in x.as_chunks_mut::<LANES>().0 {
                *lanes = butterfly::<1>(*lanes);
                *lanes = butterfly::<2>(*lanes);
                *lanes = butterfly::<4>(*lanes);
                *lanes = butterfly::<8>(*lanes);
            }
            distance = LANES;
        }
        while distance < block {
            for pair in x.chunks_exact_mut(2 * distance) {
                let (low, high) = pair.split_at_mut(distance);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            distance *= 2;
        }
    }
}

/// Replaces the values i and i + `DISTANCE` by their sum and their difference. The loop has the
/// shape that the compiler turns into one permutation, one sign change and one addition.
#[inline(always)]
fn butterfly<const DISTANCE: usize>(lanes: [f32; LANES]) -> [f32; LANES] {
    std::array::from_fn(|lane| {
        let own = lanes[lane];
        let own = if lane & DISTANCE == 0 { own } else { -own };
        lanes[lane ^ DISTANCE] + own
    })
}
