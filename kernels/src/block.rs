//! The unit of memory in which quantized weights are packed.
//!
//! A matrix is cut into panels of 32 rows. A panel is one stream of blocks, in this order: block 0
//! of rows 0..16, block 0 of rows 16..32, block 1 of rows 0..16, and so on. A block is 64 bytes,
//! four bytes for each of its 16 rows: a 32-bit lane of a vector register is one row.

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Rows of a panel: the unit in which matrices are packed and products are shared among threads.
pub const PANEL_ROWS: usize = 32;

/// Rows of a block.
pub(crate) const BLOCK_ROWS: usize = 16;

/// Blocks side by side in a panel.
pub(crate) const PANEL_BLOCKS: usize = PANEL_ROWS / BLOCK_ROWS;

/// 16 rows of a few columns.
#[repr(C, align(64))]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
pub(crate) struct Block(pub(crate) [u8; 64]);
