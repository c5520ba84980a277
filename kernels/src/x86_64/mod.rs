//! The kernels of x86-64.
//!
//! AVX2, AVX-VNNI and AVX-512 multiply small integers by different algorithms, in `avx2/`,
//! `avxvnni/` and `avx512/`. Products of floats and attention differ in the registers only:
//! `dense.rs`, `attention.rs` and `int8_attention.rs` are written once and compiled for each.
//!
//! Functions are safe Rust with `#[target_feature]`. `unsafe` occurs only in `registers.rs`.

use std::ops::Range;

use crate::block::{Block, PANEL_BLOCKS, PANEL_ROWS};
use crate::groups::GroupRecord;

/// Evaluates `$call` with `$N` as a constant that equals `$count`, which is one of the literals.
macro_rules! by_count {
    ($count:expr, [$($n:literal)*], $N:ident => $call:block) => {
        match $count {
            $($n => {
                const $N: usize = $n;
                $call
            })*
            count => unreachable!("no code for a count of {count}"),
        }
    };
}

mod attention;
pub(crate) mod avx2;
pub(crate) mod avx512;
pub(crate) mod avxvnni;
mod dense;
mod int8_attention;
mod page_prefetch;
pub(crate) mod registers;

/// How many bytes ahead of its use a stream of weights is prefetched: enough to hide the latency of
/// memory.
const PREFETCH_BYTES: usize = 6 << 10;

/// Tokens whose activations fit into the second-level cache.
const CACHED_TOKENS: usize = 256;

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

/// Prefetches the two blocks [`PREFETCH_BYTES`] after `step`. They belong to this panel or the
/// next.
#[inline(always)]
fn prefetch_step(step: &[Block; PANEL_BLOCKS]) {
    for block in step {
        registers::prefetch(block.0.as_ptr().wrapping_add(PREFETCH_BYTES));
    }
}

/// Prefetches the blocks [`PREFETCH_BYTES`] after the rest and the scales of a record.
#[inline(always)]
fn prefetch_rest(record: &GroupRecord<'_>) {
    for block in record.rest {
        registers::prefetch(block.0.as_ptr().wrapping_add(PREFETCH_BYTES));
    }
    let scales = std::ptr::from_ref(record.scales).cast::<u8>();
    registers::prefetch(scales.wrapping_add(PREFETCH_BYTES));
}

/// Returns the number of steps of a loop, so that the compiler does not know it. The compiler
/// unrolls a short loop of a known number, and then some sums leave their registers.
#[inline(always)]
fn rolled(count: usize) -> usize {
    std::hint::black_box(count)
}

/// Divides `count` tokens (or heads) evenly into the fewest blocks of at most `max`.
fn blocks(count: usize, max: usize) -> impl Iterator<Item = Range<usize>> {
    let blocks = count.div_ceil(max);
    (0..blocks).map(move |block| block * count / blocks..(block + 1) * count / blocks)
}

/// Calls `tile(panel, tokens, out)` for up to `TILE_TOKENS` tokens and one panel at a time. The
/// outer loop is over [`CACHED_TOKENS`], whose activations stay in the second-level cache while the
/// panels are read.
#[inline(always)]
fn for_each_tile<V, const TILE_TOKENS: usize>(
    panels: Range<usize>,
    tokens: usize,
    out: &mut [V],
    mut tile: impl FnMut(usize, Range<usize>, &mut [V]),
) {
    for cached in blocks(tokens, CACHED_TOKENS) {
        let outs = out.chunks_exact_mut(tokens * PANEL_ROWS);
        for (panel, out) in panels.clone().zip(outs) {
            for tokens in blocks(cached.len(), TILE_TOKENS) {
                let tokens = cached.start + tokens.start..cached.start + tokens.end;
                let out = &mut out[tokens.start * PANEL_ROWS..tokens.end * PANEL_ROWS];
                tile(panel, tokens, out);
            }
        }
    }
}

/// Returns where each of some rows of a matrix begins, and the distance from each row to the next
/// one. The last row is its own next.
fn starts_and_nexts(rows: &[u32], columns: usize) -> impl Iterator<Item = (usize, isize)> {
    let start = move |row: &u32| *row as usize * columns;
    let nexts = rows.iter().skip(1).chain(rows.last());
    rows.iter().zip(nexts).map(move |(row, next)| {
        let (row, next) = (start(row), start(next));
        (row, next.cast_signed() - row.cast_signed())
    })
}

/// Fills the last, partial chunk of a row with zeros, so that it goes through the same operations
/// as a whole one.
fn padded<T: Copy + Default, const N: usize>(rest: &[T]) -> [T; N] {
    let mut chunk = [T::default(); N];
    chunk[..rest.len()].copy_from_slice(rest);
    chunk
}

/// Returns the four neighbouring activations that a field of a block is multiplied by, as the 32
/// bits that are broadcast to all rows.
#[inline(always)]
fn four_activations<const C: usize>(block: &[i8; C], field: usize) -> i32 {
    i32::from_le_bytes(std::array::from_fn(|i| {
        block[4 * field + i].cast_unsigned()
    }))
}
