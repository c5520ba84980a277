//! How keys and values are cut and laid out, for the code that stores, reads and multiplies them.

/// Tokens of a page of keys and values: as many as a vector register has lanes, and as the
/// scheduler's pages have.
pub const PAGE_TOKENS: usize = 16;

/// Keys of a span, the unit of reduction.
pub const SPAN_TOKENS: usize = 256;

/// Pages of a span.
pub(crate) const SPAN_PAGES: usize = SPAN_TOKENS / PAGE_TOKENS;

/// The largest number of values of a head.
pub const MAX_HEAD_DIM: usize = SPAN_TOKENS;

/// The bytes of the scales of a page: two for each token's key, then two for each token's value.
pub(crate) const SCALES_BYTES: usize = 2 * 2 * PAGE_TOKENS;

/// Dimensions of a line of int8 keys, and tokens of a line of int8 values.
pub(crate) const INT8_STEP: usize = 4;

/// What is added to an int8 key.
pub(crate) const KEY_ZERO: u8 = 128;
