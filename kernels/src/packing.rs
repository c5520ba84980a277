//! How ternary weights share the bytes of a block.
//!
//! A byte has several fields, each of which holds a weight; [`Packing`] says how they share the
//! byte. A block of `F` fields a byte has 16 rows and `4 F` columns. Byte `4 r + i` holds, for row
//! `r` of the block, the columns `4 f + i` for f in 0..F. So one field of the four bytes of a
//! 32-bit lane is four neighbouring columns of a row, which the dot-product instructions multiply
//! by four neighbouring activations.
//!
//! Invariant: a field holds the code `weight + 1`, so 0, 1 or 2.

use crate::block::{BLOCK_ROWS, PANEL_BLOCKS};

/// Columns of a block of two-bit fields.
pub(crate) const TWO_BIT_COLUMNS: usize = Packing::TwoBit.block_columns();

/// Columns of a block of base-3 digits.
pub(crate) const FIVE_TRIT_COLUMNS: usize = Packing::FiveTrit.block_columns();

/// How the fields of a byte share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Packing {
    /// Four fields, field f in the bits 2 f and 2 f + 1. 2 bits a weight, fast to unpack on any
    /// machine.
    TwoBit,
    /// Five fields, the digits of a number in base 3: field f counts 3^f. 1.6 bits a weight,
    /// unpacked by looking up bytes in a table.
    FiveTrit,
}

impl Packing {
    /// Returns the number of fields of a byte.
    pub const fn fields(self) -> usize {
        match self {
            Packing::TwoBit => 4,
            Packing::FiveTrit => 5,
        }
    }

    /// Returns the number of columns of a block.
    pub(crate) const fn block_columns(self) -> usize {
        4 * self.fields()
    }

    /// Returns what a field that is 1 counts in its byte.
    const fn place(self, field: usize) -> u8 {
        match self {
            Packing::TwoBit => 1 << (2 * field),
            Packing::FiveTrit => [1, 3, 9, 27, 81][field],
        }
    }

    /// Returns the four bytes of a lane, given the codes of its columns. They are added up as one
    /// number: no byte of the sum exceeds 255, so none carries into the next.
    #[inline(always)]
    fn pack<const C: usize>(self, codes: &[u8; C]) -> [u8; 4] {
        let fields = codes.as_chunks::<4>().0.iter().enumerate();
        let lane: u32 = fields
            .map(|(field, four)| u32::from_le_bytes(*four) * u32::from(self.place(field)))
            .sum();
        lane.to_le_bytes()
    }

    /// Returns a field of a byte.
    #[inline]
    pub(crate) const fn unpack(self, byte: u8, field: usize) -> u8 {
        // Divisors that the compiler knows become multiplications.
        match (self, field) {
            (Packing::TwoBit, _) => byte >> (2 * field) & 3,
            (Packing::FiveTrit, 0) => byte % 3,
            (Packing::FiveTrit, 1) => byte / 3 % 3,
            (Packing::FiveTrit, 2) => byte / 9 % 3,
            (Packing::FiveTrit, 3) => byte / 27 % 3,
            (Packing::FiveTrit, _) => byte / 81 % 3,
        }
    }

    /// Returns where the weight of `row` (0..32) and `column` is in steps of this packing.
    #[inline]
    pub(crate) fn place_of(self, row: usize, column: usize) -> WeightPlace {
        WeightPlace {
            packing: self,
            block: column / self.block_columns() * PANEL_BLOCKS + row / BLOCK_ROWS,
            field: column % self.block_columns() / 4,
        }
    }

    /// Returns the byte whose fields are all 1, the weight zero.
    pub(crate) fn zero_weights(self) -> u8 {
        (0..self.fields()).map(|field| self.place(field)).sum()
    }
}

/// Where one weight is.
pub(crate) struct WeightPlace {
    pub(crate) packing: Packing,
    /// The block, counted from the first of some steps or of a record.
    pub(crate) block: usize,
    pub(crate) field: usize,
}

/// Packs a row of codes, C columns into each lane of four bytes.
#[inline(always)]
pub(crate) fn pack_row<'a, const C: usize>(
    packing: Packing,
    codes: &[u8],
    lanes: impl Iterator<Item = &'a mut [u8; 4]>,
) {
    let (chunks, rest) = codes.as_chunks::<C>();
    let mut last = [1; C];
    last[..rest.len()].copy_from_slice(rest);
    for (lane, codes) in lanes.zip(chunks.iter().chain([&last])) {
        *lane = packing.pack(codes);
    }
}
