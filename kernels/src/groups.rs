//! Groups: neighbouring columns of a matrix that share a scale in each row, and how a panel stores
//! them.
//!
//! In a matrix with groups a panel is one stream of records, one for each group. A record has, in
//! this order:
//!
//! 1. its steps, which are pairs of blocks as in a matrix without groups;
//! 2. its rest: the columns that do not fill a step, in two-bit fields. There is none in the
//!    two-bit packing. One or two groups of four columns are in one block: the first fields have
//!    the rows 0..16, the next fields the rows 16..32. Four of them are in a step of their own;
//! 3. a block with the scales of the 32 rows, as the bits of half-precision numbers.
//!
//! | Bits a weight, with its scale | groups of 64 | 128 | 256 |
//! |---|---|---|---|
//! | two-bit packing | 2.25 | 2.125 | 2.0625 |
//! | five-trit packing | 2 | 1.75 | 1.6875 |

use std::error::Error;
use std::fmt;
use std::slice::ChunksExact;

use crate::block::{BLOCK_ROWS, Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::packing::{Packing, WeightPlace};

/// The number of neighbouring columns that share a scale in each row of a matrix, and in each
/// token of its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupSize {
    /// 64 columns: Q2_0 of upstream GGUF.
    G64,
    /// 128 columns: Q1_0, PQ2_0, PTQ1_0 and the legacy Q2_0 of GGUF.
    G128,
    /// 256 columns: TQ1_0 and TQ2_0 of GGUF.
    G256,
}

impl GroupSize {
    /// All sizes, in ascending order.
    pub const ALL: [GroupSize; 3] = [GroupSize::G64, GroupSize::G128, GroupSize::G256];

    /// Returns the number of columns of a group.
    pub const fn columns(self) -> usize {
        match self {
            GroupSize::G64 => 64,
            GroupSize::G128 => 128,
            GroupSize::G256 => 256,
        }
    }

    /// Returns the size of this many columns, or `None` if there is no such size.
    pub fn of(columns: usize) -> Option<GroupSize> {
        let mut sizes = GroupSize::ALL.into_iter();
        sizes.find(|size| size.columns() == columns)
    }

    /// Returns the number of groups in a row of `columns`.
    ///
    /// # Errors
    /// If the row is not whole groups.
    pub fn count(self, columns: usize) -> Result<usize, PartialGroup> {
        if columns.is_multiple_of(self.columns()) {
            Ok(columns / self.columns())
        } else {
            Err(PartialGroup {
                columns,
                group: self,
            })
        }
    }
}

/// The error of a row that is not whole groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialGroup {
    columns: usize,
    group: GroupSize,
}

impl fmt::Display for PartialGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (columns, group) = (self.columns, self.group.columns());
        write!(
            f,
            "a row of {columns} columns is not whole groups of {group}; pad it to {} or use \
             another group size",
            columns.next_multiple_of(group)
        )
    }
}

impl Error for PartialGroup {}

/// Where the weights of a group are in its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordShape {
    packing: Packing,
    steps: usize,
    rest_fours: usize, // Groups of four columns in the rest.
}

/// The record of one group.
pub(crate) struct GroupRecord<'a> {
    pub(crate) steps: &'a [[Block; PANEL_BLOCKS]],
    pub(crate) rest: &'a [Block],
    pub(crate) scales: &'a GroupScales,
}

/// The records of a panel.
pub(crate) struct GroupRecords<'a> {
    shape: RecordShape,
    records: ChunksExact<'a, Block>,
}

impl<'a> Iterator for GroupRecords<'a> {
    type Item = GroupRecord<'a>;

    #[inline(always)]
    fn next(&mut self) -> Option<GroupRecord<'a>> {
        let record = self.records.next()?;
        Some(self.shape.split(record))
    }
}

/// The scales of a panel's rows in one group, as the bits of half-precision numbers.
pub(crate) type GroupScales = [[u16; BLOCK_ROWS]; PANEL_BLOCKS];

impl RecordShape {
    pub(crate) const fn new(packing: Packing, group: GroupSize) -> RecordShape {
        let steps = group.columns() / packing.block_columns();
        RecordShape {
            packing,
            steps,
            rest_fours: (group.columns() - steps * packing.block_columns()) / 4,
        }
    }

    /// Returns the shape of the records of groups of this many columns, one of [`GroupSize`].
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
    pub(crate) const fn of_columns(packing: Packing, columns: usize) -> RecordShape {
        match columns {
            64 => RecordShape::new(packing, GroupSize::G64),
            128 => RecordShape::new(packing, GroupSize::G128),
            256 => RecordShape::new(packing, GroupSize::G256),
            _ => panic!("no group has this many columns"),
        }
    }

    /// Returns the number of blocks of a record.
    #[inline(always)]
    pub(crate) fn blocks(self) -> usize {
        self.step_blocks() + self.rest_blocks() + 1
    }

    /// Returns the number of groups of four columns in the rest: 0, 1, 2 or 4.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
    #[inline(always)]
    pub(crate) fn rest_fours(self) -> usize {
        self.rest_fours
    }

    /// Returns the number of blocks of the steps.
    #[inline(always)]
    pub(crate) fn step_blocks(self) -> usize {
        self.steps * PANEL_BLOCKS
    }

    /// Returns the number of columns in the steps.
    pub(crate) fn step_columns(self) -> usize {
        self.steps * self.packing.block_columns()
    }

    #[inline(always)]
    fn rest_blocks(self) -> usize {
        match self.rest_fours {
            0 => 0,
            _ if self.rest_shares_block() => 1,
            _ => PANEL_BLOCKS,
        }
    }

    /// Returns whether both halves of the panel have their rest in the same block.
    #[inline(always)]
    fn rest_shares_block(self) -> bool {
        self.rest_fours * PANEL_BLOCKS <= Packing::TwoBit.fields()
    }

    /// Returns where the weight of `row` (0..32) and `column` (of the group) is in the record.
    pub(crate) fn place(self, row: usize, column: usize) -> WeightPlace {
        let half = row / BLOCK_ROWS;
        if let Some(column) = column.checked_sub(self.step_columns()) {
            let four = column / 4;
            let (block, field) = if self.rest_shares_block() {
                (0, half * self.rest_fours + four)
            } else {
                (half, four)
            };
            return WeightPlace {
                packing: Packing::TwoBit,
                block: self.step_blocks() + block,
                field,
            };
        }
        self.packing.place_of(row, column)
    }

    /// Fills a record with zero weights and zero scales.
    pub(crate) fn clear(self, record: &mut [Block]) {
        let (weights, scales) = record.split_at_mut(self.blocks() - 1);
        let (steps, rest) = weights.split_at_mut(self.step_blocks());
        steps.fill(Block([self.packing.zero_weights(); 64]));
        rest.fill(Block([Packing::TwoBit.zero_weights(); 64]));
        scales.fill(Block([0; 64]));
    }

    /// Sets the codes of the rest of a row (0..32).
    pub(crate) fn set_rest(self, record: &mut [Block], row: usize, codes: &[u8]) {
        for (four, codes) in codes.as_chunks::<4>().0.iter().enumerate() {
            let place = self.place(row, self.step_columns() + 4 * four);
            let lane = &mut record[place.block].0.as_chunks_mut().0[row % BLOCK_ROWS];
            let others = u32::from_le_bytes(*lane) & !(0x0303_0303 << (2 * place.field));
            let own = u32::from_le_bytes(*codes) << (2 * place.field);
            *lane = (others | own).to_le_bytes();
        }
    }

    /// Returns the records of a panel, in ascending order.
    #[inline]
    pub(crate) fn records(self, panel: &[Block]) -> GroupRecords<'_> {
        GroupRecords {
            shape: self,
            records: panel.chunks_exact(self.blocks()),
        }
    }

    /// Divides a record into its parts.
    #[inline(always)]
    pub(crate) fn split(self, record: &[Block]) -> GroupRecord<'_> {
        let (weights, scales) = record.split_at(self.blocks() - 1);
        let (steps, rest) = weights.split_at(self.step_blocks());
        GroupRecord {
            steps: steps.as_chunks().0,
            rest,
            scales: zerocopy::transmute_ref!(&scales[0]),
        }
    }

    /// Returns the scales of a record, to be filled.
    pub(crate) fn scales_mut(self, record: &mut [Block]) -> &mut [u16; PANEL_ROWS] {
        zerocopy::transmute_mut!(&mut record[self.blocks() - 1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_takes_the_bits_of_its_table() {
        for (packing, bits) in [
            (Packing::TwoBit, [2.25, 2.125, 2.0625]),
            (Packing::FiveTrit, [2.0, 1.75, 1.6875]),
        ] {
            for (group, bits) in GroupSize::ALL.into_iter().zip(bits) {
                let shape = RecordShape::new(packing, group);
                let weights = PANEL_ROWS * group.columns();
                let taken = (shape.blocks() * 64 * 8) as f64 / weights as f64;
                assert_eq!(taken, bits, "{packing:?}, {group:?}");
            }
        }
    }

    #[test]
    fn every_weight_of_a_record_has_a_place_of_its_own() {
        for packing in [Packing::TwoBit, Packing::FiveTrit] {
            for group in GroupSize::ALL {
                let shape = RecordShape::new(packing, group);
                let mut places = std::collections::BTreeSet::new();
                for (row, column) in (0..PANEL_ROWS)
                    .flat_map(|row| (0..group.columns()).map(move |column| (row, column)))
                {
                    let place = shape.place(row, column);
                    assert!(place.block < shape.blocks() - 1);
                    assert!(place.field < place.packing.fields());
                    let byte = row % BLOCK_ROWS * 4 + column % 4;
                    places.insert((place.block, byte, place.field));
                }
                assert_eq!(places.len(), PANEL_ROWS * group.columns());
            }
        }
    }

    #[test]
    fn a_group_size_is_found_by_its_columns() {
        assert_eq!(GroupSize::of(128), Some(GroupSize::G128));
        assert_eq!(GroupSize::of(32), None);
        assert_eq!(GroupSize::G64.count(640), Ok(10));
    }

    #[test]
    fn a_row_with_part_of_a_group_is_refused_by_its_sizes() {
        let refused = GroupSize::G128.count(200).unwrap_err().to_string();
        assert_eq!(
            refused,
            "a row of 200 columns is not whole groups of 128; pad it to 256 or use another group \
             size"
        );
    }
}
