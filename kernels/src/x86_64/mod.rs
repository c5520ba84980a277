//! The kernels of x86-64: the same functions in `avx2.rs` and `avx512.rs`, so that the two, side by side, show only the difference.
//! `avx512vbmi.rs` has the one product that its instructions make faster.
//!
//! Functions here are safe Rust with `#[target_feature]`; `unsafe` stands only at loads and stores.

use std::ops::Range;

pub(crate) mod attention;
pub(crate) mod avx2;
pub(crate) mod avx512;
pub(crate) mod avx512vbmi;

pub(crate) use avx2::prefetch;

/// How far ahead of its use a stream of weights is prefetched: enough to hide the memory's latency. It is asked for into the second-level
/// cache, where more requests can be under way than in the first: on a Xeon with AMX one thread reads at 90 % of its bandwidth, not 64 %.
const PREFETCH_BYTES: usize = 6 << 10;

/// Tokens whose activations are multiplied with all panels before those of the next are: few enough for the second-level cache.
const GROUP_TOKENS: usize = 256;

/// Half-precision values in a cache line.
const CACHE_LINE_HALVES: usize = 32;

/// Shares `count` tokens (or heads) evenly among the fewest blocks of at most `largest`.
fn blocks(count: usize, largest: usize) -> impl Iterator<Item = Range<usize>> {
    let blocks = count.div_ceil(largest);
    (0..blocks).map(move |block| block * count / blocks..(block + 1) * count / blocks)
}

/// Where each of some rows of a matrix begins, and how far from there the next of them does; the last is its own next.
fn starts_and_nexts(rows: &[u32], columns: usize) -> impl Iterator<Item = (usize, isize)> {
    let start = move |row: &u32| *row as usize * columns;
    let nexts = rows.iter().skip(1).chain(rows.last());
    rows.iter().zip(nexts).map(move |(row, next)| {
        let (row, next) = (start(row), start(next));
        (row, next.cast_signed() - row.cast_signed())
    })
}

/// The last, partial chunk of a row, filled up with zeros so that it goes through the same operations as a whole one.
fn padded<T: Copy + Default, const N: usize>(rest: &[T]) -> [T; N] {
    let mut chunk = [T::default(); N];
    chunk[..rest.len()].copy_from_slice(rest);
    chunk
}

/// Four neighbouring activations (`field` 0..4 of a block) as the 32 bits that are broadcast to all rows.
#[inline(always)]
fn four_activations<const C: usize>(block: &[i8; C], field: usize) -> i32 {
    i32::from_le_bytes(std::array::from_fn(|i| {
        block[4 * field + i].cast_unsigned()
    }))
}
